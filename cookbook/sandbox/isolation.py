"""Isolation of the programs of a worker: namespaces, a separate file system, dropped privileges, resource limits.

Imported only by workers, which run on the standard library alone.
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
"""The directory of a program with namespaces: each worker has its own /tmp, and each program gets a new one."""
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
    """How a worker isolates its programs, which run as `uid` and `gid`.

    `own_pids` is the number of processes of the worker with the same uid. `missing` says why there are no namespaces;
    it is "" if there are.
    """

    mode: Mode
    uid: int
    gid: int
    own_pids: int
    missing: str
    protected_pids: tuple[int, ...] = ()
    """Processes of that uid which programs can see but must not signal; a process group is a negative number."""
    interpreter_hidden: bool = False
    """Programs cannot read Python's files, so they can import only modules that were loaded before."""

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
                "namespaces: each program has its own processes, a read-only view of the system without home "
                f"directories, a private /tmp and no network; it runs as {user} under {filtered} and resource limits"
            )
        hidden = (
            "; it can import only modules that are loaded already: Python's files are not readable by others"
            if self.interpreter_hidden
            else ""
        )
        return (
            f"NO namespaces ({self.missing}): a program sees the machine's files and processes and may write where "
            f"{user} may; it has its own session and directory, {filtered} (only Unix sockets) and resource limits, "
            f"but no limit on the total size of its files{hidden}"
        )


def enter(namespaces: bool, host_pids: tuple[int, ...]) -> Isolation:
    """Isolate this single-threaded process, which becomes a worker. With a PID namespace, returns in a child process.

    Args:
        namespaces: False uses none, as on a machine that allows none.
        host_pids: processes that a program with the same uid must not signal (a process group is negative).
    """
    uid, gid = (_unprivileged_id("uid"), _unprivileged_id("gid")) if os.getuid() == 0 else (os.getuid(), os.getgid())
    missing = "switched off"
    if namespaces:
        missing = _try_in_child()
        if not missing:
            _enter_namespaces(uid, gid)
            own_pids, protected = (
                (0, ()) if os.getuid() == 0 else (2, (1,))
            )  # own: launcher and worker; protected: worker
            kernel.set_dumpable(False)
            return Isolation("namespaces", uid, gid, own_pids, "", protected)
    kernel.become_subreaper()
    kernel.set_dumpable(False)
    _remove_stale_directories()
    protected = () if os.getuid() == 0 else (-1, os.getpid(), *host_pids)
    hidden = os.getuid() == 0 and not _readable_by_others(sys.base_prefix)
    return Isolation("processes", uid, gid, 0, missing, protected, interpreter_hidden=hidden)


def _unprivileged_id(kind: Literal["uid", "gid"]) -> int:
    """An unused id: high in the range of this user namespace, and different for each worker."""
    with open(f"/proc/self/{kind}_map") as lines:
        end = max(int(first) + int(count) for first, _, count in (line.split() for line in lines))
    top = min(end, 1 << 31) - 2
    return top - os.getpid() % min(top // 2, 1 << 22)


def _try_in_child() -> str:
    """Try to enter namespaces in a child process, since a process cannot leave them. Returns what is missing, or ""."""
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
    """Return in a child that is process 1 of new namespaces and has its own file system; this process waits for it."""
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
    """Make a read-only root directory with only what programs, compilers and Python need."""
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
    # Before the old root is unmounted: without global privileges, /proc can be mounted only while one is visible.
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
    """Make the directory of one program. With namespaces its files take at most `size_mb` in total."""
    if isolation.mode == "namespaces":
        options = f"size={size_mb}m,nr_inodes={_INODES},mode=1777"
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        directory = MOUNTED_DIRECTORY
        os.mkdir(directory, 0o700)
    else:
        import tempfile  # Local, here and below: it imports `random`, which makes every fork slower.

        directory = tempfile.mkdtemp(prefix=f"{WORK_PREFIX}{os.getpid()}-")
    if os.getuid() == 0:
        os.chown(directory, isolation.uid, isolation.gid)
    return directory


def remove_directory(isolation: Isolation, directory: str) -> None:
    """Remove the directory, and what the program left in other world-writable places."""
    if isolation.mode == "namespaces":
        kernel.unmount("/tmp")
        return
    _remove_tree(directory)
    if os.getuid() == 0:  # Then programs run as a separate user, whose files can be told apart.
        for parent in _WRITABLE_BY_ALL:
            for name in os.listdir(parent):
                path = os.path.join(parent, name)
                with suppress(FileNotFoundError):  # Other processes remove files there.
                    facts = os.lstat(path)
                    if facts.st_uid == isolation.uid:
                        _remove_tree(path) if stat.S_ISDIR(facts.st_mode) else os.unlink(path)


def _remove_tree(directory: str) -> None:
    import shutil
    import subprocess

    with suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if os.path.exists(directory):  # Nested too deeply for Python, or without permissions.
        subprocess.run(
            ["/bin/chmod", "-R", "u+rwX", directory], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        subprocess.run(
            ["/bin/rm", "-rf", "--", directory], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def _remove_stale_directories() -> None:
    """Remove directories of workers that were killed."""
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
    """Become the program's user, permanently."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(isolation.gid, isolation.gid, isolation.gid)
        os.setresuid(isolation.uid, isolation.uid, isolation.uid)  # drops all capabilities
    else:
        kernel.drop_capabilities()
    # Both must follow the change of user, which resets them.
    kernel.set_dumpable(True)
    if isolation.mode == "processes":
        kernel.die_with_parent(signal.SIGKILL)


def limit_resources(
    isolation: Isolation, cpu_s: float, memory_mb: int, processes: int, file_mb: int, stack: bool
) -> None:
    """Set the kernel's limits, which hold per process. The worker watches resident memory and sums over processes."""
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
    """Set restrictions of the worker that all its programs inherit."""
    kernel.no_new_privileges()
    # If memory runs out, the kernel kills programs before anything else, where /proc may be written.
    with suppress(PermissionError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 1)  # Unlike 0, this also prevents piping a core dump to a handler.
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    _limit(resource.RLIMIT_SIGPENDING, 128)


_LIMITED = (
    *(resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_STACK),
    *(resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK),
    *(resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING),
)
_HARD_LIMITS = {which: resource.getrlimit(which)[1] for which in _LIMITED}


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """Set a limit, or the host's own hard limit if that is lower."""
    hard = soft if hard is None else hard
    highest = _HARD_LIMITS[which]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))


def _tasks_of_user() -> int:
    """Number of processes and threads of the user, since the kernel counts them all."""
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
    """Report to the worker that the program could not be started, and exit."""
    os.write(descriptor, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
    os._exit(1)
