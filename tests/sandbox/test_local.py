"""The local sandbox: what programs can do, what ends them, and what they find of one another. Hostile ones: test_hostile.py."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cookbook.core.errors import ConfigError
from cookbook.sandbox import cpp, local
from cookbook.sandbox.base import ExecResult, Language, Limits
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.protocol import WORK_PREFIX
from cookbook.sandbox.worker import Outcome, Worker, WorkerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local sandbox needs Linux")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def _isolation() -> str:
    sandbox = LocalSandbox(workers=1)
    sandbox.close()
    return sandbox.isolation


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    made = LocalSandbox(workers=2)
    yield made
    made.close()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSandbox]:
    """On a machine that has no namespaces."""
    monkeypatch.setattr(local, "USE_NAMESPACES", False)
    made = LocalSandbox(workers=1)
    yield made
    made.close()


def run(
    sandbox: LocalSandbox,
    code: str,
    stdin: str = "",
    *,
    language: Language = "python",
    files: dict[str, str] | None = None,
    limits: Limits | None = None,
) -> ExecResult:
    return asyncio.run(sandbox.run(textwrap.dedent(code), language, stdin, files, limits))


def eventually(happened: Callable[[], bool], within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if happened():
            return True
        time.sleep(0.02)
    return False


PROGRAMS = {
    "input": ("print(int(input()) + int(input()))", "2\n40", 0, "42\n"),
    "buffer": ("import sys; print(len(sys.stdin.buffer.read()))", "żółw", 0, "7\n"),
    "open0": ("print(sum(map(int, open(0))))", "1\n2\n3\n", 0, "6\n"),
    "dev_stdin": ("print(open('/dev/stdin').read())", "x", 0, "x\n"),
    "main": (
        "if __name__ == '__main__': print(__file__.rpartition('/')[2], __import__('sys').argv[1:])",
        "",
        0,
        "main.py []\n",
    ),
    "unicode": ("print(input()[::-1])", "ąβ漢", 0, "漢βą\n"),
    "bytes": (r"import sys; sys.stdout.buffer.write(b'a\0\xff\n')", "", 0, "a\0�\n"),
    "exit": ("print('x', end=''); exit(7)", "", 7, "x"),
    "exit_none": ("import sys; sys.exit()", "", 0, ""),
    "os_exit": ("import os; print('lost'); os._exit(3)", "", 3, ""),
    "signal": ("import os; os.kill(os.getpid(), 15)", "", -15, ""),
    "unread": ("print(1)", "x\n" * 100_000, 0, "1\n"),
    "closed_stdin": ("import sys; sys.stdin.close(); print(2)", "x", 0, "2\n"),
    "thread": ("import threading; threading.Thread(target=lambda: print('t')).start()", "", 0, "t\n"),
    "atexit": ("import atexit; atexit.register(print, 'bye'); print('hi')", "", 0, "hi\nbye\n"),
    "recursion": ("import sys; print(sys.getrecursionlimit())", "", 0, "1000\n"),
    "pool": ("from multiprocessing import Pool; print(Pool(2).map(abs, [-1, -2]))", "", 0, "[1, 2]\n"),
    "child": ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(6)'])", "", 0, "6\n"),
    "temporary": ("import tempfile; print(tempfile.TemporaryFile().write(b'abc'))", "", 0, "3\n"),
    "hash": ("print(hash('a'))", "", 0, None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_python_programs_behave_as_under_a_fresh_interpreter(sandbox: LocalSandbox, name: str) -> None:
    code, stdin, status, stdout = PROGRAMS[name]
    result = run(sandbox, code, stdin)
    assert (result.exit, result.stderr) == (status, "")
    assert result.status == ("ok" if status == 0 else "runtime_error")
    if stdout is None:  # The same every time, by decision.
        stdout = run(sandbox, code, stdin).stdout
    assert result.stdout == stdout
    assert 0 < result.wall_s < 10 and 0 < result.memory_mb < 200


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return 1 / x\n\nf(0)\n",
        "print('before')\nx = = 1\n",
        "try:\n    {}['k']\nexcept KeyError as error:\n    raise ValueError('ż') from error\n",
        "import sys\nprint(1)\nsys.exit('message')\n",
        "import helper\nhelper.f()\n",
        "def f(n):\n    return f(n + 1)\ntry:\n    f(0)\nexcept RecursionError as error:\n    print(error)\n",
        "import sys\nsys.stdout.write('no newline')\nraise SystemExit(3)\n",
        "assert False, 'no'\n",
    ],
)
def test_output_and_tracebacks_are_those_of_the_interpreter(sandbox: LocalSandbox, code: str, tmp_path: Path) -> None:
    helper = "def f():\n    raise OSError(5, 'x')\n"
    (tmp_path / "main.py").write_text(code)
    (tmp_path / "helper.py").write_text(helper)
    command = [sys._base_executable, "-s", "-B", str(tmp_path / "main.py")]  # pyright: ignore[reportAttributeAccessIssue]
    real = subprocess.run(command, capture_output=True, text=True, env={"LANG": "C.UTF-8"}, check=False)
    result = run(sandbox, code, files={"helper.py": helper})
    ours, theirs = (re.sub(r'"[^"]*/(main|helper)\.py"', r'"\1.py"', text) for text in (result.stderr, real.stderr))
    assert (result.stdout, ours, result.exit) == (real.stdout, theirs, real.returncode)


def test_files_are_given_and_large_input_and_output_pass(sandbox: LocalSandbox) -> None:
    code = "import sys; text = sys.stdin.read(); print(open('sub/a.txt').read(), len(text)); sys.stdout.write('y' * 1_000_000)"
    result = run(sandbox, code, "x" * 8_000_000, files={"sub/a.txt": "given\r\n"})
    assert result.status == "ok" and result.stdout.startswith("given\n 8000000\n") and result.stdout.endswith("yyy")
    assert len(result.stdout) > 1_000_000
    for name in ("../x", "/x", "", "a/../../x"):
        with pytest.raises(ValueError, match="not a name inside"):
            run(sandbox, "", files={name: ""})


SMALL = Limits(wall_s=3.0, cpu_s=0.3, memory_mb=100, processes=8, file_mb=2, output_kb=64)

BROKEN_LIMITS = {
    "cpu": ("while True: pass", "timeout"),
    "cpu_of_children": ("import os\nfor _ in range(3): os.fork()\nwhile True: pass", "timeout"),
    "wall": ("import time; time.sleep(60)", "timeout"),
    "memory": (
        "x = bytearray(200 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(9)",
        "memory",
    ),
    "memory_of_children": (
        "import os, time\nos.fork(); os.fork()\nx = b'x' * (40 << 20)\ntime.sleep(9)",
        "memory",
    ),
    "memory_refused": ("bytearray(10 << 30)", "memory"),
    "stdout": ("while True: print('x' * 1000)", "output"),
    "stderr": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "file": ("open('f', 'wb').write(b'x' * (3 << 20))", "runtime_error"),
    "files": ("for i in range(9): open(str(i), 'wb').write(b'x' * (1 << 20))", "runtime_error"),
    "processes": (
        "import threading, time\nfor i in range(20): threading.Thread(target=time.sleep, args=(9,)).start()",
        "timeout",
    ),
    "descriptors": ("import os\nwhile True: os.dup(0)", "runtime_error"),
}


@pytest.mark.parametrize("name", BROKEN_LIMITS)
def test_what_breaks_a_limit_ends_with_its_status(sandbox: LocalSandbox, name: str) -> None:
    if name == "files" and "NO namespaces" in sandbox.isolation:
        pytest.skip("only a file system of its own can count all files of a program")
    code, status = BROKEN_LIMITS[name]
    started = time.monotonic()
    result = run(
        sandbox, code, limits=Limits(**{**vars(SMALL), "wall_s": 1.0}) if name in ("wall", "processes") else SMALL
    )
    assert result.status == status, result
    assert time.monotonic() - started < 10
    assert len(result.stdout) <= 64 * 1024 and len(result.stderr) <= 64 * 1024
    if status == "memory" and name != "memory_refused":
        assert 90 < result.memory_mb < 400
    if name == "processes":
        assert "can't start new thread" in result.stderr


def test_the_time_in_the_queue_is_not_run_time(sandbox: LocalSandbox) -> None:
    async def many() -> list[ExecResult]:
        limits = Limits(wall_s=1.5)
        return await asyncio.gather(
            *[
                sandbox.run("import time; time.sleep(0.4); print(input())", "python", str(i), limits=limits)
                for i in range(10)
            ]
        )

    started = time.monotonic()
    results = asyncio.run(many())
    assert time.monotonic() - started > 1.9  # Ten of them, two at a time.
    assert [(result.status, result.stdout) for result in results] == [("ok", f"{i}\n") for i in range(10)]


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


@pytest.mark.skipif("NO namespaces" in _isolation(), reason="this machine has no namespaces")
def test_namespaces_show_a_program_little_and_let_it_change_nothing(sandbox: LocalSandbox) -> None:
    code = """
        import os, socket
        print(os.getuid() != 0, os.getgroups())
        status = open('/proc/self/status').read()
        wanted = ('CapPrm', 'CapEff', 'CapAmb', 'NoNewPrivs', 'Seccomp:')
        print([line.split()[1] for line in status.splitlines() if line.startswith(wanted)])
        for path in ('/etc/shadow', '/proc/1/environ', '/proc/1/mem', '/proc/kcore', '/proc/sys/kernel/hostname', '/sys/kernel'):
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
        name for name in os.listdir(tempfile.gettempdir()) if name.startswith(f"{WORK_PREFIX}{_zygotes(bare)[0]}-")
    ] == []


def test_isolation_may_be_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "USE_NAMESPACES", False)
    with pytest.raises(ConfigError, match=r"^sandbox.require_isolation: .*switched off.*\S$"):
        LocalSandbox(workers=1, require_isolation=True)
    with pytest.raises(ConfigError, match=r"sandbox.workers: 0"):
        LocalSandbox(workers=0)


@needs_compiler
def test_cpp_is_compiled_once_and_judged_by_the_same_limits(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_one = cpp.compile

    def counted(worker: Worker, code: str, limits: Limits, target: int):
        compiled.append(code)
        return compile_one(worker, code, limits, target)

    monkeypatch.setattr(cpp, "compile", counted)
    code = r"""
        #include <cstdio>
        #include <fstream>
        #include <vector>
        #include <string>
        int depth(int n) { volatile char page[1024]; page[0] = 1; return n ? depth(n - 1) + page[0] : 0; }
        int main() {
            int what, number;
            if (scanf("%d %d", &what, &number) != 2) return 9;
            if (what == 1) { std::vector<long> big(4000000000ul, 1); }
            if (what == 2) { volatile int *null = nullptr; *null = 1; }
            if (what == 3) while (true) {}
            if (what == 4) while (true) puts("x");
            if (what == 5) printf("%d\n", depth(50000));
            if (what == 6) { std::vector<std::vector<char>> kept; while (true) kept.emplace_back(1 << 20, 'x'); }
            if (what == 7) { std::string text; std::ifstream("a.txt") >> text; puts(text.c_str()); }
            if (what == 8 && fopen("/proc/self/exe", "w")) return 8;
            printf("%d\n", number);
            return what == 9 ? 3 : 0;
        }
    """

    async def all_of_them() -> list[ExecResult]:
        return await asyncio.gather(
            *[sandbox.run(code, "cpp", f"{what} 5", {"a.txt": "given"}, SMALL) for what in range(10)]
        )

    results = asyncio.run(all_of_them())
    statuses = [result.status for result in results]
    assert statuses == [
        "ok",
        "memory",
        "runtime_error",
        "timeout",
        "output",
        "ok",
        "memory",
        "ok",
        "ok",
        "runtime_error",
    ]
    assert [results[i].stdout for i in (0, 5, 7)] == ["5\n", "50000\n5\n", "given\n5\n"]
    assert (results[2].exit, results[9].exit) == (-signal.SIGSEGV, 3)
    assert len(compiled) == 1

    wrong = run(sandbox, "int main() { return x; }", language="cpp")
    assert wrong.status == "compile_error" and "main.cpp:1:" in wrong.stderr
    bomb = run(sandbox, '#include "/dev/random"\n', language="cpp", limits=Limits(compile_s=0.5))
    assert bomb.status == "compile_error" and "limit" in bomb.stderr


def test_a_language_that_is_not_there_is_refused(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot run rust"):
        run(sandbox, "fn main() {}", language="rust")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    poorer = LocalSandbox(workers=1)
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        run(poorer, "int main() {}", language="cpp")
    poorer.close()


def _zygotes(sandbox: LocalSandbox) -> list[int]:
    """The last process in line of each worker."""
    found = []
    for worker in sandbox._pool._all:
        pid = worker._process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        found.append(pid)
    return found


def test_a_worker_that_dies_is_replaced_and_its_run_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = LocalSandbox(workers=1)
    for number in (signal.SIGKILL, signal.SIGKILL):
        os.kill(_zygotes(sandbox)[0], number)
        assert run(sandbox, "print(1)").stdout == "1\n"
    # In the middle of a run.
    results: list[ExecResult] = []
    thread = threading.Thread(target=lambda: results.append(run(sandbox, "import time; time.sleep(1.0); print(2)")))
    zygote = _zygotes(sandbox)[0]
    thread.start()
    time.sleep(0.4)
    os.kill(next(iter(sandbox._pool._all))._process.pid, signal.SIGKILL)
    thread.join()
    assert results[0].stdout == "2\n" and eventually(lambda: not os.path.exists(f"/proc/{zygote}"))

    def broken(*_: object, **__: object) -> None:
        raise WorkerError("a sandbox worker has died")

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", broken)
        failed = run(sandbox, "print(1)")
    assert (failed.status, failed.exit) == ("infrastructure_error", None) and "died" in failed.stderr
    assert run(sandbox, "print(3)").stdout == "3\n"
    sandbox.close()


def test_closing_ends_everything_and_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    sandbox = LocalSandbox(workers=2)

    async def closed_while_running() -> list[ExecResult | BaseException]:
        runs = [asyncio.ensure_future(sandbox.run("import time; time.sleep(60)", "python")) for _ in range(3)]
        await asyncio.sleep(0.6)
        sandbox.close()
        return await asyncio.gather(*runs, return_exceptions=True)

    started = time.monotonic()
    pids = _zygotes(sandbox)
    results = asyncio.run(closed_while_running())
    assert time.monotonic() - started < 10
    assert {result.status if isinstance(result, ExecResult) else "cancelled" for result in results} == {
        "infrastructure_error",
        "cancelled",
    }
    sandbox.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    with pytest.raises(ConfigError, match="closed"):
        run(sandbox, "")
    assert eventually(lambda: set(os.listdir("/proc/self/fd")) <= before)


def test_a_sandbox_that_is_forgotten_is_closed() -> None:
    sandbox = LocalSandbox(workers=1)
    run(sandbox, "")
    pids = _zygotes(sandbox)
    del sandbox
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


@pytest.mark.parametrize("namespaces", [True, False])
def test_workers_and_programs_die_with_a_killed_host(namespaces: bool) -> None:
    code = f"""
import asyncio, threading, time
from cookbook.sandbox import local
local.USE_NAMESPACES = {namespaces}
sandbox = local.LocalSandbox(workers=1)
threading.Thread(target=lambda: asyncio.run(sandbox.run("import time; time.sleep(60)", "python"))).start()
time.sleep(0.5)
print(next(iter(sandbox._pool._all))._process.pid, flush=True)
"""
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    ) as host:
        assert host.stdout is not None
        pids = [int(host.stdout.readline())]
        while children := Path(f"/proc/{pids[-1]}/task/{pids[-1]}/children").read_text().split():
            pids.append(int(children[0]))
        assert len(pids) >= 2
        host.kill()
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


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
        shutil.copytree(
            package / "sandbox",
            f"{directory}/cookbook/sandbox",
            ignore=shutil.ignore_patterns("__pycache__", "fusion.py"),
        )
        for name in ("__init__.py", "errors.py", "notices.py"):
            shutil.copy(package / name, f"{directory}/cookbook/{name}")
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


def test_the_cache_of_binaries_is_bounded_in_files() -> None:
    cache = cpp.BinaryCache()

    def compile_into(target: int) -> Outcome:
        os.write(target, b"binary")
        return Outcome(None, 0, b"", b"", 0.0, 0.0, 0.0)

    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        cache.get(str(number), 1.0, compile_into)
    assert len(os.listdir("/proc/self/fd")) - before <= 128
    cache.clear()
