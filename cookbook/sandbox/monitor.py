"""Watches limits that the kernel does not enforce: memory and CPU time of all processes of a run, and its output."""

from __future__ import annotations

import os

_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/<pid>/stat after the name, see proc_pid_stat(5).
# Times are four fields: user, system, user of children that were waited for, system of those.
_PARENT, _USER_TIME, _CHILDREN_SYSTEM_TIME, _RESIDENT = 1, 11, 14, 21


class Monitor:
    """Checks the limits of one run. `check` is to be called every `interval_s`.

    Args:
        tree: /proc shows other processes too; those of the run are the descendants of this process.
        cpu_s: limit of the user and system time of all processes, including those that have ended.
        memory_mb: limit of the resident memory of all processes; shared pages count once.
        output: descriptors of stdout and stderr.
        output_kb: largest size of each output.
    """

    def __init__(self, *, tree: bool, cpu_s: float, memory_mb: int, output: tuple[int, ...], output_kb: int) -> None:
        self._tree = tree
        self._cpu_limit_s = cpu_s
        self._memory_mb = memory_mb
        self._output = output
        self._output_bytes = output_kb * 1024
        self.interval_s = 0.02 if tree else 0.01
        self.peak_mb = 0.0
        self.cpu_s = 0.0

    def check(self) -> str | None:
        """The limit that is exceeded now, as a status."""
        if self._output_too_large():
            return "output"
        own = os.getpid()
        processes = _processes(below=own if self._tree else None)
        processes.pop(own, None)
        resident = {pid: int(fields[_RESIDENT]) * _PAGE_MB for pid, fields in processes.items()}
        cpu_s = (
            sum(sum(map(int, fields[_USER_TIME : _CHILDREN_SYSTEM_TIME + 1])) for fields in processes.values()) / _TICKS
        )
        resident_mb = sum(resident.values())
        if len(resident) > 1 and resident_mb > self._memory_mb:
            resident_mb = sum(_proportional_mb(pid, mb) for pid, mb in resident.items())
        self.peak_mb = max(self.peak_mb, resident_mb)
        if resident_mb > self._memory_mb:
            return "memory"
        self.cpu_s = max(self.cpu_s, cpu_s)
        return "timeout" if cpu_s > self._cpu_limit_s else None

    def final(self, cpu_s: float, largest_mb: float) -> str | None:
        """The limit exceeded between the last check and the end. `largest_mb` is the peak of the largest process."""
        self.peak_mb = max(self.peak_mb, largest_mb)
        if self._output_too_large():
            return "output"
        if largest_mb > self._memory_mb:
            return "memory"
        return "timeout" if cpu_s > self._cpu_limit_s + 0.05 else None

    def _output_too_large(self) -> bool:
        return any(os.fstat(file).st_size > self._output_bytes for file in self._output)


def descendants(root: int) -> list[int]:
    """The descendants of process `root`."""
    return list(_processes(below=root))


def _processes(below: int | None) -> dict[int, list[bytes]]:
    """The fields of `stat` after the name by process id, for the descendants of `below`, or for all processes."""
    found: dict[int, list[bytes]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                descriptor = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                found[int(name)] = os.read(descriptor, 1024).rpartition(b") ")[2].split()
            except ProcessLookupError:
                continue
            finally:
                os.close(descriptor)
    if below is None:
        return found
    parents = {pid: int(fields[_PARENT]) for pid, fields in found.items()}
    inside = {below}
    grew = True
    while grew:
        added = {pid for pid, parent in parents.items() if parent in inside} - inside
        inside |= added
        grew = bool(added)
    return {pid: found[pid] for pid in inside if pid != below}


def _proportional_mb(pid: int, resident_mb: float) -> float:
    """Resident memory with each shared page divided among its users; `resident_mb` if the process cannot be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as lines:
            return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(b"Pss:")), 0.0)
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    except PermissionError:
        return resident_mb
