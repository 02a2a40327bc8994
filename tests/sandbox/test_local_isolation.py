"""What programs in the local sandbox see of the machine and of one another, with and without namespaces."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from cookbook.core.errors import ConfigError
from cookbook.sandbox import local
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.protocol import WORK_PREFIX
from tests.sandbox.local_runs import (
    BROKEN_LIMITS,
    SMALL,
    idle_zygotes,
    isolation,
    needs_linux,
    run,
)

pytestmark = needs_linux


LEAVES_TRACES = """
    import builtins, os, random, sys, time
    SECRET = 'bmsfujgpqs/bofjh'
    random.seed(5); builtins.print = None; sys.path.append('/x'); os.environ['LEFT'] = '1'; sys.modules['math'] = None
    for name in ('/tmp/left', 'left', '/dev/shm/left'):
        open(name, 'w').write('left')
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(100)
"""
LOOKS_FOR_TRACES = """
    import os, random, re, sys
    import math
    print(math.floor(1.5), 'LEFT' in os.environ, '/x' in sys.path)
    print([name for name in ('/tmp/left', 'left', '/dev/shm/left') if os.path.exists(name)])
    print(os.listdir('.'), [fd for fd in os.listdir('/proc/self/fd') if int(fd) > 3])
    others = [int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) not in (1, os.getpid())]
    print(others)
    # All memory, held against the text that the program before it had, but for one bit a letter.
    shifted, changed = bytes(c ^ 1 for c in range(256)), b'clrgtkfqpr.cngki'
    found = 0
    with open('/proc/self/mem', 'rb', buffering=0) as memory:
        for line in open('/proc/self/maps'):
            start, end = (int(part, 16) for part in line.split()[0].split('-'))
            if line.split()[1][0] == 'r' and '[v' not in line:
                memory.seek(start)
                found += memory.read(end - start).translate(shifted).count(changed)
    print(found, random.random())
"""


def test_no_program_finds_a_trace_of_the_one_before() -> None:
    sandbox = LocalSandbox(workers=1)
    try:
        numbers = set[str]()
        for _ in range(2):
            assert run(sandbox, LEAVES_TRACES).status == "ok"
            result = run(sandbox, LOOKS_FOR_TRACES)
            assert result.status == "ok", result.stderr
            *lines, last = result.stdout.splitlines()
            found, number = last.split()
            numbers.add(number)
            assert lines == ["1 False False", "[]", "['main.py'] []", "[]"] or "NO namespaces" in sandbox.isolation
            assert found == "0"
        assert len(numbers) == 2  # Seeded anew.
        # The search is able to find: the same text in its own source.
        assert not run(sandbox, LOOKS_FOR_TRACES + "    # bmsfujgpqs/bofjh").stdout.splitlines()[-1].startswith("0 ")
    finally:
        sandbox.close()


@pytest.mark.skipif("NO namespaces" in isolation(), reason="this machine has no namespaces")
def test_namespaces_show_a_program_little_and_let_it_change_nothing(sandbox: LocalSandbox) -> None:
    code = """
        import os, socket
        print(os.getuid() != 0, os.getgroups())
        status = open('/proc/self/status').read()
        wanted = ('CapPrm', 'CapEff', 'CapAmb', 'NoNewPrivs', 'Seccomp:')
        print([line.split()[1] for line in status.splitlines() if line.startswith(wanted)])
        secret = ('/etc/shadow', '/proc/1/environ', '/proc/1/mem', '/proc/kcore')
        for path in (*secret, '/proc/sys/kernel/hostname', '/sys/kernel'):
            try:
                open(path, 'rb').read(1); print('read', path)
            except OSError: pass
        for path in ('/x', '/etc/passwd', '/usr/x', '/dev/x', '/var/x', os.__file__):
            try:
                open(path, 'ab'); print('wrote', path)
            except OSError: pass
        try:
            socket.socket(); print('socket')
        except PermissionError: pass
        import ctypes
        libc = ctypes.CDLL(None)
        print(libc.unshare(0x10000000), libc.ptrace(16, os.getppid(), 0, 0), libc.memfd_create(b'x', 0))
        print(libc.mount(b'', b'/', b'', 32, None), libc.umount2(b'/tmp', 2))
        print(socket.gethostname(), sorted(os.environ), os.path.exists('/home'))
    """
    result = run(sandbox, code)
    zero = "0" * 16
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "True []",
        str([zero, zero, zero, "1", "2"]),
        "-1 -1 -1",
        "-1 -1",
        "sandbox ['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR'] False",
    ]
    assert sandbox.isolation.startswith("namespaces: ") and "\n" not in sandbox.isolation


def test_without_namespaces_processes_and_files_still_end(bare: LocalSandbox) -> None:
    assert "NO namespaces" in bare.isolation and "\n" not in bare.isolation
    marker = f"{os.getpid() % 1000 + 2000}.5"
    code = f"""
        import os, socket, subprocess, time
        subprocess.Popen(['sleep', '{marker}'], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp('sleep', ['sleep', '{marker}'])
            os._exit(0)
        os.makedirs('d/e'); os.chmod('d', 0)
        try:
            socket.socket()
        except PermissionError:
            print('refused')
        for path in ('/etc/shadow', '/etc/x'):
            try:
                open(path, 'a'); print('opened')
            except OSError: pass
        for target in ({os.getpid()}, os.getppid()):
            try:
                os.kill(target, 9)
            except PermissionError:
                print('refused')
    """
    result = run(bare, code)
    assert (result.status, result.stdout) == ("ok", "refused\n" * 3), result
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()]
    assert not [command for command in commands if marker.encode() in command]
    for name, (code, status) in BROKEN_LIMITS.items():
        if name in ("cpu_of_children", "memory_of_children", "stdout"):
            assert run(bare, code, limits=SMALL).status == status, name
    assert [
        name for name in os.listdir(tempfile.gettempdir()) if name.startswith(f"{WORK_PREFIX}{idle_zygotes(bare)[0]}-")
    ] == []


def test_isolation_may_be_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "USE_NAMESPACES", False)
    with pytest.raises(ConfigError, match=r"^sandbox.require_isolation: .*switched off.*\S$"):
        LocalSandbox(workers=1, require_isolation=True)
    with pytest.raises(ConfigError, match=r"sandbox.workers: 0"):
        LocalSandbox(workers=0)


def test_an_ordinary_user_has_the_same_isolation(tmp_path_factory: pytest.TempPathFactory) -> None:
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.getuid() != 0 or python is None or shutil.which("setpriv") is None:
        pytest.skip("needs root, setpriv and a python3 that other users may read")
    if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], check=False).returncode:
        pytest.skip(f"{python} is too old")
    code = """
import asyncio
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.base import Limits
sandbox = LocalSandbox(workers=1)
program = '''
import os, resource
for target in (1, os.getppid()):
    try:
        resource.prlimit(target, resource.RLIMIT_NOFILE, (3, 3)); print('changed')
    except PermissionError: pass
try: open('/proc/1/environ').read(); print('read')
except PermissionError: pass
os.kill(-1, 19) if os.fork() == 0 else print(os.getuid(), os.listdir('.'))
'''
for _ in range(2):
    result = asyncio.run(sandbox.run(program, "python", limits=Limits(wall_s=0.5)))
    print(result.status, result.stdout, result.stderr)
print(asyncio.run(sandbox.run("import os\\nwhile True: os.fork()", "python", limits=Limits(wall_s=1))).status)
print(sandbox.isolation)
"""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        package = Path(__file__).parents[2] / "cookbook"
        for name in ("core", "sandbox"):
            shutil.copytree(
                package / name, f"{directory}/cookbook/{name}", ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(package / "__init__.py", f"{directory}/cookbook")
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-B", "-c", code]
        environment = {"PYTHONPATH": directory, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd="/", timeout=60, check=False
        )
    if "NO namespaces" in done.stdout:
        pytest.skip("unprivileged user namespaces are not allowed here")
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[:2] == lines[2:4] or lines[0].startswith("timeout") or lines[0].startswith("ok")
    assert "changed" not in done.stdout and "read" not in done.stdout.replace("read-only", "")
    assert lines[-2] == "runtime_error" and lines[-1].startswith("namespaces: ")


def test_a_tree_too_deep_for_python_is_removed(bare: LocalSandbox) -> None:
    dig = "import os\nfor _ in range(1500):\n    os.mkdir('d' * 100)\n    os.chdir('d' * 100)\nprint('deep')"
    before = set(Path(tempfile.gettempdir()).glob(f"{WORK_PREFIX}*"))
    assert run(bare, dig).stdout == "deep\n"
    assert run(bare, "print(1)").stdout == "1\n"
    assert not set(Path(tempfile.gettempdir()).glob(f"{WORK_PREFIX}*")) - before
