"""A worker process: isolates itself once and then forks for each run, so that programs start with Python initialised.

    host --socket--> launcher    (only waits; exists only with namespaces)
                       zygote    (this module; process 1 of the worker's namespaces; forks, watches and kills programs)
                         program (without rights; has only descriptors 0, 1 and 2)

The zygote reads only limits. The private data of a run (source, files) are first read in the program's own process, so
that later programs, which are forked from the zygote, find no trace of them in memory. All processes of a run are
killed and reaped before the next run begins.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from cookbook.sandbox.isolation import Isolation, enter, make_directory, remove_directory, restrict_worker
from cookbook.sandbox.monitor import Monitor, descendants
from cookbook.sandbox.program import PREIMPORTED, PREIMPORTED_WHERE_HIDDEN, Program, clean_template, prepare
from cookbook.sandbox.protocol import MAX_MESSAGE

_HOST_GONE = "host gone"


def serve(control_fd: int, host_fd: int, namespaces: bool, host_pids: tuple[int, ...]) -> Program:
    """Serve runs until the host closes the socket or dies. Returns only in a process that becomes a program.

    Args:
        control_fd: a SOCK_SEQPACKET socket to the host.
        host_fd: a pidfd of the host.
        namespaces: False uses none.
        host_pids: processes that programs must not signal.
    """
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    os.chdir("/")
    try:
        restrict_worker()
        isolation = enter(namespaces, host_pids)
        import site

        for set_up in (site.setquit, site.setcopyright, site.sethelper):
            set_up()
        for name in PREIMPORTED + (PREIMPORTED_WHERE_HIDDEN if isolation.interpreter_hidden else ()):
            importlib.import_module(name)
    except (OSError, ImportError, KeyError) as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        sys.exit(1)
    control.send(json.dumps({"missing": isolation.missing, "isolation": isolation.describe()}).encode())
    clean_template()
    # The objects made so far are never garbage: the collector would only copy their pages into every program.
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 8)
        if not message:
            sys.exit(0)
        outcome = _run(isolation, control_fd, host_fd, json.loads(message), descriptors)
        if isinstance(outcome, Program):
            control.detach()  # Closed in this process already; the program may reuse the number.
            return outcome
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(outcome).encode())


def _run(
    isolation: Isolation, control: int, host_fd: int, order: dict[str, Any], descriptors: list[int]
) -> dict[str, Any] | Program:
    """Start a program, watch it, and clean up. In the program's own process, returns the program."""
    failures, failures_write = os.pipe()
    before = _children_cpu_s()
    directory = make_directory(isolation, order["directory_mb"])
    started = time.monotonic()
    program = os.fork()
    if program == 0:
        os.close(failures)
        return prepare(isolation, directory, order, descriptors, failures_write)
    os.close(failures_write)
    monitor = Monitor(
        tree=isolation.mode == "processes",
        cpu_s=order["limits"]["cpu_s"],
        memory_mb=order["limits"]["memory_mb"],
        output=(descriptors[2], descriptors[3]),
        output_kb=order["output_kb"],
    )
    broken = _watch(monitor, program, control, host_fd, started + order["wall_s"])
    wall_s = time.monotonic() - started
    status, largest_mb = _end(isolation, program)
    cpu_s = max(_children_cpu_s() - before, monitor.cpu_s)
    remove_directory(isolation, directory)
    error = os.read(failures, 1000).decode(errors="replace")
    os.close(failures)
    if broken == _HOST_GONE:
        os._exit(0)
    return {
        "broken": broken or monitor.final(cpu_s, largest_mb),
        "exit": None if broken else os.waitstatus_to_exitcode(status),
        "error": error,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "memory_mb": monitor.peak_mb,
    }


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch(monitor: Monitor, program: int, control: int, host_fd: int, deadline: float) -> str | None:
    """Wait until a program exits (None) or exceeds a limit (its name)."""
    ended = os.pidfd_open(program)
    poller = select.poll()
    for descriptor in (ended, control, host_fd):
        poller.register(descriptor, select.POLLIN)
    try:
        while True:
            left = deadline - time.monotonic()
            ready = {descriptor for descriptor, _ in poller.poll(max(0.0, min(monitor.interval_s, left) * 1000))}
            if ended in ready:
                return None
            if ready:
                return _HOST_GONE
            if left <= 0:
                return "timeout"
            if broken := monitor.check():
                return broken
    finally:
        os.close(ended)


def _end(isolation: Isolation, program: int) -> tuple[int, float]:
    """Kill and reap all processes of a run. Returns the wait status of the program and the largest peak in MB."""
    _kill_all(isolation)
    _, status, usage = os.wait4(program, 0)
    # Processes that lost their parents have become children of this process.
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                _kill_all(isolation)
                os.waitpid(-1, 0)
        except ChildProcessError:
            return status, usage.ru_maxrss / 1024


def _kill_all(isolation: Isolation) -> None:
    if isolation.mode == "namespaces":
        # From process 1: kills everything else in the namespace at once, so that forking cannot outrun it.
        _signal(-1, signal.SIGKILL)
    elif os.getuid() == 0:
        _kill_user(isolation.uid)
    else:
        below = descendants(os.getpid())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in below:
                _signal(pid, number)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _kill_user(uid: int) -> None:
    """Kill all processes of the user, which only programs of this worker have, at once."""
    killer = os.fork()
    if killer == 0:
        os.setresuid(uid, uid, uid)
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def main(arguments: list[str]) -> Program:
    """Entry point for the host's bootstrap: the arguments of `serve` as text."""
    control_fd, host_fd, namespaces, *host_pids = (int(argument) for argument in arguments)
    return serve(control_fd, host_fd, bool(namespaces), tuple(host_pids))
