"""Starts a program in its own process: drops rights, sets limits, then runs Python source or executes a binary."""

from __future__ import annotations

import atexit
import gc
import marshal
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from cookbook.sandbox import kernel
from cookbook.sandbox.isolation import MOUNTED_DIRECTORY, Isolation, drop_rights, fail, limit_resources
from cookbook.sandbox.protocol import ARTIFACT, INTERPRETED_NAME

# The modules that programs import most, loaded once for all of them. Every module makes each fork a little slower, and
# those that act after a fork (random, threading, logging) much slower: programs import those themselves.
PREIMPORTED = (
    "__future__", "abc", "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "os", "re",
    "string", "struct", "sys", "time", "traceback", "types", "typing",
)  # fmt: skip
# Loaded as well if programs cannot read the files of Python.
PREIMPORTED_WHERE_HIDDEN = (
    "_strptime", "argparse", "ast", "asyncio", "base64", "binascii", "bz2", "calendar", "codecs", "collections.abc",
    "concurrent.futures.process", "concurrent.futures.thread", "configparser", "contextlib", "contextvars", "csv",
    "ctypes", "difflib", "dis", "encodings.ascii", "encodings.idna", "encodings.latin_1", "encodings.utf_16",
    "fileinput", "fnmatch", "getopt", "glob", "graphlib", "gzip", "hashlib", "hmac", "html", "inspect", "ipaddress",
    "keyword", "linecache", "locale", "logging", "lzma", "multiprocessing.managers", "multiprocessing.pool",
    "multiprocessing.popen_fork", "multiprocessing.queues", "multiprocessing.shared_memory",
    "multiprocessing.synchronize", "pathlib", "pickle", "pkgutil", "platform", "pprint", "queue", "random", "reprlib",
    "sched", "secrets", "select", "selectors", "shlex", "shutil", "signal", "socket", "stat", "statistics",
    "subprocess", "tempfile", "textwrap", "threading", "timeit", "tokenize", "tomllib", "unicodedata", "unittest.mock",
    "urllib.parse", "uuid", "warnings", "weakref", "xml.etree.ElementTree", "zipfile", "zlib", "zoneinfo",
)  # fmt: skip

# Descriptors that are kept until a program starts. A zygote uses none so high, and all others are closed before.
_FAILURES, _EXTRA = 64, 65


@dataclass
class Program:
    """A program that is ready to run in this process.

    Attributes:
        path, source: the Python file and its content; unused if a binary is executed.
        arguments: argv of the binary; empty for Python.
        executable: an open file to execute; None finds `arguments[0]` on the PATH.
        artifact: an open file that receives `ARTIFACT` if the program succeeds.
        failures: a pipe to report to the worker that the program could not be started.
        seccomp: the system-call filter; None if there is none for this machine.
    """

    path: str
    source: bytes
    arguments: tuple[str, ...]
    executable: int | None
    artifact: int | None
    failures: int
    seccomp: Any

    def run(self) -> NoReturn:
        """Become the program."""
        try:
            if self.seccomp is not None:
                kernel.install_seccomp(self.seccomp)
            if self.arguments:
                self._execute()
            main = _fresh_interpreter(self.path)
            os.close(self.failures)
        except BaseException as error:
            fail(self.failures, error)
        _interpret(self.path, self.source, main)

    def _execute(self) -> NoReturn:
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        compiler = 0 if self.artifact is None else os.fork()
        if compiler == 0:
            if self.executable is not None:
                os.execve(self.executable, self.arguments, os.environ)
            os.execvpe(self.arguments[0], self.arguments, os.environ)
        _, status = os.waitpid(compiler, 0)
        if status == 0 and self.artifact is not None:
            source = os.open(ARTIFACT, os.O_RDONLY)
            while os.sendfile(self.artifact, source, None, 1 << 24):
                pass
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 1)


def _interpret(path: str, source: bytes, main: ModuleType) -> NoReturn:
    status = 1
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
        status = 0
    except SystemExit as exit_request:
        status = _exit_status(exit_request)
    except BaseException as error:
        _report(error, path)
    _finish(status)


def prepare(
    isolation: Isolation, directory: str, order: Mapping[str, Any], descriptors: Sequence[int], failures: int
) -> Program:
    """Give this process the program's rights, directory, streams and limits, and read the request.

    Args:
        isolation: that of the worker.
        directory: the directory of the program.
        order: "limits", see `isolation.limit_resources`; "extra", the kind of the extra descriptor: "executable",
            "artifact" or None.
        descriptors: the request, stdin, stdout, stderr, and possibly the extra one. The request is marshalled:
            {"files": {name: content}, "arguments": (...)}; arguments are empty for Python.
        failures: a pipe to report to the worker that the program could not be started.
    """
    try:
        os.setsid()
        request, stdin, stdout, stderr, *extra = descriptors
        given = marshal.loads(os.pread(request, os.fstat(request).st_size, 0))
        for target, source in enumerate((stdin, stdout, stderr)):
            os.dup2(source, target)
        # Move the needed descriptors above all those that are closed next.
        os.dup2(failures, _FAILURES, inheritable=False)
        for descriptor in extra:
            os.dup2(descriptor, _EXTRA, inheritable=False)
        os.closerange(3, _FAILURES)
        failures = _FAILURES
        drop_rights(isolation)
        if isolation.mode == "processes":
            os.environ.update(HOME=directory, TMPDIR=directory)
        os.chdir(directory)
        for name, content in given["files"].items():
            if "/" in name:
                os.makedirs(os.path.dirname(name), exist_ok=True)
            write_file(name, content)
        arguments = given["arguments"]
        limit_resources(isolation, stack=bool(arguments), **order["limits"])
        executable = _EXTRA if order["extra"] == "executable" else None
        artifact = _EXTRA if order["extra"] == "artifact" else None
        source = given["files"].get(INTERPRETED_NAME, b"")
        seccomp = kernel.seccomp_filter(isolation.protected_pids)
        return Program(f"{directory}/{INTERPRETED_NAME}", source, arguments, executable, artifact, failures, seccomp)
    except BaseException as error:
        fail(failures, error)


def write_file(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.close(descriptor)


def clean_template() -> None:
    """Make this interpreter look newly started, as far as that can be done once for all programs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "cookbook"]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(
        PATH="/usr/local/bin:/usr/bin:/bin", HOME=MOUNTED_DIRECTORY, TMPDIR="/tmp", LANG="C.UTF-8", PYTHONHASHSEED="0"
    )


def _fresh_interpreter(path: str) -> ModuleType:
    """Make this interpreter look newly started on `path`; returns the module `__main__`."""
    sys.argv[:] = [path]
    sys.path.insert(0, os.path.dirname(path))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    gc.enable()
    return main


def _exit_status(request: SystemExit) -> int:
    """The exit status as the interpreter sets it: a number is the status, None is 0, anything else is printed."""
    code = request.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    try:
        print(code, file=sys.stderr)
    except BaseException:
        return 1
    return 1


def _report(error: BaseException, path: str) -> None:
    """Print the traceback, starting at the program's own code."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    try:
        sys.stdout.flush()
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        traceback.print_exception(error)


def _finish(status: int) -> NoReturn:
    """Do what an interpreter does at exit, except for its teardown."""
    try:
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        atexit._run_exitfuncs()  # pyright: ignore[reportAttributeAccessIssue]
    except BaseException:
        status = status or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:
            status = status or 120
    os._exit(status)
