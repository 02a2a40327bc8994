"""Linux system calls that Python's `os` lacks, and the system-call filter. Numbers are from the tables of Linux."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP, CLONE_NEWTIME = 0x02000000, 0x00000080
ALL_NAMESPACES = (
    CLONE_NEWNS
    | CLONE_NEWUTS
    | CLONE_NEWIPC
    | CLONE_NEWUSER
    | CLONE_NEWPID
    | CLONE_NEWNET
    | CLONE_NEWCGROUP
    | CLONE_NEWTIME
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2

_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SYS_ADMIN = 21
_NR_MOUNT_SETATTR = 442  # On all architectures, since Linux 5.12.

_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# Calls that programs do not need and that hide memory from the accounting or expose more of the kernel:
# name, number on x86_64, number on aarch64 (None: it does not exist there).
_DENIED: tuple[tuple[str, int | None, int | None], ...] = (
    # Memory that outlives its process or is in no process's resident set.
    ("memfd_create", 319, 279), ("memfd_secret", 447, 447),
    ("shmget", 29, 194), ("msgget", 68, 186), ("semget", 64, 190), ("mq_open", 240, 180),
    # Other processes.
    ("ptrace", 101, 117), ("process_vm_readv", 310, 270), ("process_vm_writev", 311, 271),
    ("process_madvise", 440, 440), ("kcmp", 312, 272), ("pidfd_getfd", 438, 438), ("migrate_pages", 256, 238),
    ("move_pages", 279, 239),
    # Namespaces and mounts.
    ("unshare", 272, 97), ("setns", 308, 268), ("chroot", 161, 51), ("mount", 165, 40), ("umount2", 166, 39),
    ("pivot_root", 155, 41), ("open_tree", 428, 428), ("move_mount", 429, 429), ("fsopen", 430, 430),
    ("fsconfig", 431, 431), ("fsmount", 432, 432), ("fspick", 433, 433), ("mount_setattr", 442, 442),
    ("name_to_handle_at", 303, 264), ("open_by_handle_at", 304, 265),
    # Parts of the kernel that have had more vulnerabilities than others.
    ("io_uring_setup", 425, 425), ("io_uring_enter", 426, 426), ("io_uring_register", 427, 427),
    ("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219),
    ("bpf", 321, 280), ("perf_event_open", 298, 241), ("userfaultfd", 323, 282), ("fanotify_init", 300, 262),
    ("modify_ldt", 154, None), ("kexec_load", 246, 104), ("syslog", 103, 116), ("vhangup", 153, 58),
    ("quotactl", 179, 60),
)  # fmt: skip
_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
# Calls whose first argument is a process: kill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open, prlimit64,
# sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr.
_AIMED_AT_PROCESSES = (
    (62, 129), (234, 131), (129, 138), (297, 240), (434, 434),
    (302, 261), (203, 122), (144, 119), (142, 118), (314, 274),
)  # fmt: skip
# tkill (of a thread), setpriority and ioprio_set (of a process, a group or a user): refused altogether.
_AIMED_OTHERWISE = ((200, 130), (141, 140), (251, 30))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


class _FilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class SeccompProgram:
    """A filter in memory, built once, so that starting a program only has to install it."""

    def __init__(self, instructions: bytes) -> None:
        self._instructions = ctypes.create_string_buffer(instructions, len(instructions))
        self._program = _FilterProgram(len(instructions) // 8, ctypes.addressof(self._instructions))
        self.address = ctypes.addressof(self._program)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode() or None), "mount " + target
    )


def bind_read_only(source: str, target: str, *, devices: bool = False) -> None:
    """Show `source` and its submounts at `target`: read-only, without set-user-id, without devices unless `devices`."""
    mount(source, target, "", MS_BIND | MS_REC)
    attributes = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | (0 if devices else _MOUNT_ATTR_NODEV)
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd.
    argument = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0), 32)
    result = _libc.syscall(_NR_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, argument, ctypes.c_size_t(32))
    _check(result, f"mount_setattr {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    _check(_libc.syscall(_NR_PIVOT_ROOT[os.uname().machine], new_root.encode(), put_old.encode()), "pivot_root")


def _prctl(option: int, argument: int = 0) -> None:
    _check(_libc.prctl(option, argument, 0, 0, 0), "prctl")


def die_with_parent(signal_number: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def set_dumpable(dumpable: bool) -> None:
    """A process that is not dumpable cannot be traced or read through /proc by others of the same user."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def become_subreaper() -> None:
    """Descendants whose parent dies become children of this process, so that it can find and kill them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def has_sys_admin() -> bool:
    with open("/proc/self/status") as lines:
        effective = next(line for line in lines if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_ADMIN & 1)


def drop_capabilities() -> None:
    """Drop all capabilities permanently: with `no_new_privileges`, executed programs do not regain them."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0), 8)
    _check(_libc.capset(header, ctypes.create_string_buffer(24)), "capset")


@functools.cache
def seccomp_filter(protected_pids: tuple[int, ...] = ()) -> SeccompProgram | None:
    """A filter (classic BPF) that refuses the calls above, sockets other than Unix sockets, and new namespaces.

    It also refuses signals to `protected_pids`: processes of the same user that no PID namespace hides; a process group
    is a negative number. None on a machine whose system-call numbers are unknown.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        return None
    column = _MACHINES.index(machine)
    load, equal, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, JEQ, JGE, JSET, RET
    allow, kill = 0x7FFF0000, 0x80000000
    refuse, missing = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    number_at, architecture_at, argument_at = 0, 4, 16
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, architecture_at),
        (equal, 1, 0, _AUDIT_ARCH[machine]),
        (answer, 0, 0, kill),
        (load, 0, 0, number_at),
    ]
    if machine == "x86_64":  # The x32 calls are the same calls under other numbers.
        program += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]
    numbers = [numbers[1 + column] for numbers in _DENIED]
    for number in numbers:
        if number is not None:
            program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    # On ENOSYS, glibc falls back to clone, whose flags a filter can check.
    program += [(equal, 0, 1, _CLONE3[column]), (answer, 0, 0, missing)]
    program += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, argument_at)]
    program += [(has_bits, 0, 1, ALL_NAMESPACES & ~CLONE_NEWTIME), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    unix_domain = 1
    program += [(equal, 0, 4, _SOCKET[column]), (load, 0, 0, argument_at)]
    program += [(equal, 0, 1, unix_domain), (answer, 0, 0, allow), (answer, 0, 0, refuse)]
    protected = [pid & 0xFFFFFFFF for pid in protected_pids]
    if protected:
        for call in _AIMED_OTHERWISE:
            program += [(equal, 0, 1, call[column]), (answer, 0, 0, refuse)]
        targets = [instruction for pid in protected for instruction in ((equal, 0, 1, pid), (answer, 0, 0, refuse))]
        for call in _AIMED_AT_PROCESSES:
            program += [
                (equal, 0, len(targets) + 2, call[column]),
                (load, 0, 0, argument_at),
                *targets,
                (answer, 0, 0, allow),
            ]
    program.append((answer, 0, 0, allow))
    return SeccompProgram(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))


def install_seccomp(program: SeccompProgram) -> None:
    """Install the filter for this process and its descendants. Needs `no_new_privileges`."""
    mode_filter = 2
    _check(_libc.prctl(_PR_SET_SECCOMP, mode_filter, program.address, 0, 0), "seccomp")
