"""What stands between a program and the machine, as seen from inside a worker: namespaces, a file system of its own, rights given up.

Imported by workers only, which run on the bare standard library.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NoReturn

from cookbook.sandbox import kernel
from cookbook.sandbox.protocol import WORK_PREFIX

MOUNTED_DIRECTORY = "/tmp/work"
"""The directory of every program where there are namespaces: each worker has a /tmp of its own, each program a new one."""
OPEN_FILES = 128
_SHOWN_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/libx32", "/lib64")
_SHOWN_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_WRITABLE_BY_ALL = [directory for directory in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(directory)]
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MB = 1 << 20
_ADDRESS_SPACE_MARGIN_MB = 4096
_STACK_MB = 256
_INODES = 8192

Mode = Literal["namespaces", "processes"]


@dataclass(frozen=True)
class Isolation:
    """How one worker holds its programs. `uid` and `gid` are theirs; `own_pids` counts the worker's processes of that same uid.

    `missing` says why there are no namespaces, "" if there are.
    """

    mode: Mode
    uid: int
    gid: int
    own_pids: int
    missing: str
    protected_pids: tuple[int, ...] = ()
    """Processes of that uid which programs can see and must not signal; a group is a negative number."""
    interpreter_hidden: bool = False
    """Programs cannot read Python's own files: they have the modules that were imported beforehand and no others."""

    def describe(self) -> str:
        """One line."""
        user = f"an unprivileged user ({self.uid})" if os.getuid() == 0 else "your own user without capabilities"
        filtered = (
            "a system-call filter"
            if kernel.seccomp_filter(self.protected_pids)
            else "NO system-call filter (unknown machine)"
        )
        if self.mode == "namespaces":
            return (
                "namespaces: each program has its own processes, a read-only view of the system without homes, a private /tmp, "
                f"no network; it runs as {user} under {filtered} and resource limits"
            )
        hidden = (
            "; it imports only modules loaded beforehand: Python's files are not readable by others"
            if self.interpreter_hidden
            else ""
        )
        return (
            f"NO namespaces ({self.missing}): a program sees the machine's files and processes and may write where {user} may; it has "
            f"a session and a directory of its own under {filtered} (no sockets but Unix ones) and resource limits, none of them on "
            f"the sum of its files{hidden}"
        )


def enter(namespaces: bool, host_pids: tuple[int, ...]) -> Isolation:
    """Isolate this process, which has one thread and becomes a worker. Returns in a child where a PID namespace needs one.

    Args:
        namespaces: False does without, as on a machine that has none.
        host_pids: processes that a program with the same uid must not signal (a group is negative).
    """
    uid, gid = (_unprivileged_id("uid"), _unprivileged_id("gid")) if os.getuid() == 0 else (os.getuid(), os.getgid())
    missing = "switched off"
    if namespaces:
        missing = _try_in_child()
        if not missing:
            _enter_namespaces(uid, gid)
            own_pids, protected = (0, ()) if os.getuid() == 0 else (2, (1,))  # The launcher and the worker; the worker.
            kernel.set_dumpable(False)
            return Isolation("namespaces", uid, gid, own_pids, "", protected)
    kernel.become_subreaper()
    kernel.set_dumpable(False)
    _remove_stale_directories()
    protected = () if os.getuid() == 0 else (-1, os.getpid(), *host_pids)
    hidden = os.getuid() == 0 and not _readable_by_others(sys.base_prefix)
    return Isolation("processes", uid, gid, 0, missing, protected, interpreter_hidden=hidden)


def _unprivileged_id(kind: Literal["uid", "gid"]) -> int:
    """One that nobody else has: high in the range that this user namespace knows, different for each worker."""
    with open(f"/proc/self/{kind}_map") as lines:
        end = max(int(first) + int(count) for first, _, count in (line.split() for line in lines))
    top = min(end, 1 << 31) - 2
    return top - os.getpid() % min(top // 2, 1 << 22)


def _try_in_child() -> str:
    """Enter namespaces in a child process first, since there is no way back. Returns what is missing, or ""."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _enter_namespaces(1, 1)
            os.write(write_end, b"ok")
        except (OSError, KeyError) as error:
            os.write(write_end, f"{error.strerror if isinstance(error, OSError) else error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return "" if text == "ok" else text or "the kernel refused"


def _enter_namespaces(uid: int, gid: int) -> None:
    """Leave this process waiting and return in a child that is process 1 of new namespaces, with a file system of its own."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    if os.getuid() == 0:
        if not kernel.has_sys_admin():
            raise OSError(1, "root without CAP_SYS_ADMIN, as in a container")
        kernel.unshare(flags)
    else:
        own_uid, own_gid = os.getuid(), os.getgid()
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{own_uid} {own_uid} 1"),
            ("gid_map", f"{own_gid} {own_gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.die_with_parent(signal.SIGKILL)
    socket.sethostname("sandbox")
    _build_root(uid, gid)


def _build_root(uid: int, gid: int) -> None:
    """A root directory that holds what programs, compilers and Python need, all of it read-only, and nothing else."""
    prefix, shown_prefix = os.path.realpath(sys.base_prefix), sys.base_prefix
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    root, old = "/tmp", "/old"
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.mkdir(root + old)
    kernel.pivot_root(root, root + old)
    os.chdir("/")
    for directory in _SHOWN_DIRECTORIES:
        if os.path.islink(old + directory):
            os.symlink(os.readlink(old + directory), directory)
        elif os.path.isdir(old + directory):
            os.mkdir(directory)
            kernel.bind_read_only(old + directory, directory)
    if not shown_prefix.startswith("/usr/") and shown_prefix != "/usr":
        os.makedirs(shown_prefix, 0o755, exist_ok=True)
        kernel.bind_read_only(old + prefix, shown_prefix)
    for path in _SHOWN_FILES:
        if os.path.exists(old + path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.mkdir(path) if os.path.isdir(old + path) else _write(path, "")
            kernel.bind_read_only(old + path, path)
    os.makedirs("/etc", exist_ok=True)
    _write("/etc/passwd", f"root:x:0:0::/:/bin/sh\nprogram:x:{uid}:{gid}::/tmp:/bin/sh\n")
    _write("/etc/group", f"root:x:0:\nprogram:x:{gid}:\n")
    _write("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n")
    os.mkdir("/dev")
    for name in _DEVICES:
        _write(f"/dev/{name}", "")
        kernel.bind_read_only(f"{old}/dev/{name}", f"/dev/{name}", devices=True)
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
        ("shm", "/tmp"),
    ):
        os.symlink(target, f"/dev/{name}")
    for directory in ("/proc", "/tmp", "/var"):
        os.mkdir(directory)
    os.symlink("/tmp", "/var/tmp")
    # Before the old root goes: without rights over the whole machine, /proc may be mounted only where one is to be seen.
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, "subset=pid")
    kernel.unmount(old)
    os.rmdir(old)
    kernel.mount(
        "", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    )


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def make_directory(isolation: Isolation, size_mb: int) -> str:
    """A directory for one program, all of whose files take at most `size_mb` where there are namespaces."""
    if isolation.mode == "namespaces":
        options = f"size={size_mb}m,nr_inodes={_INODES},mode=1777"
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        directory = MOUNTED_DIRECTORY
        os.mkdir(directory, 0o700)
    else:
        import tempfile  # Here and below: it brings `random`, which does something after every fork, and other things that cost.

        directory = tempfile.mkdtemp(prefix=f"{WORK_PREFIX}{os.getpid()}-")
    if os.getuid() == 0:
        os.chown(directory, isolation.uid, isolation.gid)
    return directory


def remove_directory(isolation: Isolation, directory: str) -> None:
    """With whatever the program left there, unreadable directories included, and in other places where anybody may write."""
    if isolation.mode == "namespaces":
        kernel.unmount("/tmp")
        return
    _remove_tree(directory)
    if os.getuid() == 0:  # Whose programs have a user of their own.
        for parent in _WRITABLE_BY_ALL:
            for name in os.listdir(parent):
                path = os.path.join(parent, name)
                with suppress(FileNotFoundError):  # Others come and go there.
                    facts = os.lstat(path)
                    if facts.st_uid == isolation.uid:
                        _remove_tree(path) if stat.S_ISDIR(facts.st_mode) else os.unlink(path)


def _remove_tree(directory: str) -> None:
    import shutil
    import subprocess

    with suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if os.path.exists(directory):  # Nested too deeply for Python, or with rights taken away.
        subprocess.run(
            ["/bin/chmod", "-R", "u+rwX", directory], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        subprocess.run(
            ["/bin/rm", "-rf", "--", directory], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def _remove_stale_directories() -> None:
    """Those of workers that were killed before they could."""
    import tempfile

    parent = tempfile.gettempdir()
    for name in os.listdir(parent):
        owner = name.removeprefix(WORK_PREFIX).partition("-")[0]
        path = os.path.join(parent, name)
        stale = name.startswith(WORK_PREFIX) and owner.isdecimal() and not os.path.exists(f"/proc/{owner}")
        if stale and not os.path.islink(path) and (os.getuid() == 0 or os.stat(path).st_uid == os.getuid()):
            _remove_tree(path)


def _readable_by_others(path: str) -> bool:
    path = os.path.realpath(path)
    while path != "/":
        if os.stat(path).st_mode & 0o005 != 0o005:
            return False
        path = os.path.dirname(path)
    return True


def drop_rights(isolation: Isolation) -> None:
    """Become the program's user, for good."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(isolation.gid, isolation.gid, isolation.gid)
        os.setresuid(isolation.uid, isolation.uid, isolation.uid)  # Takes all capabilities.
    else:
        kernel.drop_capabilities()
    # Both after the change of user, which resets them.
    kernel.set_dumpable(True)
    if isolation.mode == "processes":
        kernel.die_with_parent(signal.SIGKILL)


def limit_resources(
    isolation: Isolation, cpu_s: float, memory_mb: int, processes: int, file_mb: int, stack: bool
) -> None:
    """Limits of the kernel's, of each process. What they cannot count (resident memory, all processes together) the worker watches."""
    seconds = int(cpu_s) + 1
    tasks = processes + isolation.own_pids
    if isolation.mode == "processes" and os.getuid() != 0:
        tasks += _tasks_of_user()
    _limit(resource.RLIMIT_CPU, seconds, seconds + 1)
    _limit(resource.RLIMIT_AS, (memory_mb + _ADDRESS_SPACE_MARGIN_MB) * _MB)
    _limit(resource.RLIMIT_NPROC, tasks)
    _limit(resource.RLIMIT_FSIZE, file_mb * _MB)
    if stack:
        _limit(resource.RLIMIT_STACK, min(memory_mb, _STACK_MB) * _MB)


def restrict_worker() -> None:
    """What holds for all programs alike and does not hinder the worker that they inherit it from."""
    kernel.no_new_privileges()
    # Where memory is short, programs go before anything else on the machine, the largest first. Where /proc cannot be written, not.
    with suppress(PermissionError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _limit(
        resource.RLIMIT_CORE, 1
    )  # Unlike 0, this keeps a core from a program that the kernel would pipe it to as well.
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    _limit(resource.RLIMIT_SIGPENDING, 128)


_HARD_LIMITS = {
    which: resource.getrlimit(which)[1]
    for which in (
        *(resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_STACK),
        *(
            resource.RLIMIT_NOFILE,
            resource.RLIMIT_CORE,
            resource.RLIMIT_MEMLOCK,
            resource.RLIMIT_MSGQUEUE,
            resource.RLIMIT_SIGPENDING,
        ),
    )
}


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """As asked, or as the host's own limit has it where that is lower."""
    hard = soft if hard is None else hard
    highest = _HARD_LIMITS[which]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))


def _tasks_of_user() -> int:
    """Processes and threads that the user has already, since the kernel counts them all."""
    tasks, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    tasks += len(os.listdir(f"/proc/{name}/task"))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return tasks


def fail(descriptor: int, error: BaseException) -> NoReturn:
    """Tell the worker that the program could not be started."""
    os.write(descriptor, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
    os._exit(1)
