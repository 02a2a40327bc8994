"""Programs that attack the sandbox that runs them, and the status each must end with.

Those that only try to reach something print `escaped: ...` for all that they reached, then `end`.
Every process of theirs is named `MARKER`, and so is every file that they make outside their directory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from cookbook.sandbox.base import ExecStatus, Language, Limits

LIMITS = Limits(wall_s=1.0, cpu_s=0.7, memory_mb=128, processes=8, file_mb=4, output_kb=64, compile_s=2.5)
PATIENT = replace(LIMITS, wall_s=10.0, cpu_s=5.0, compile_s=20.0)
"""For programs that must come to their own end, or to the end of another limit, on a busy machine too."""

MARKER = f"hostile{os.getpid()}"
"""Names the processes and files of this test run (15 bytes at most: the kernel's limit for a process)."""

NAME_PROCESS: dict[Language, str] = {
    "python": f"import ctypes; ctypes.CDLL(None).prctl(15, b'{MARKER}')  # PR_SET_NAME\n",
    "cpp": 'extern "C" int prctl(int, ...);\n'
    f'__attribute__((constructor)) static void name_process() {{ prctl(15, "{MARKER}"); }}\n',
}

ATTEMPT = """
def attempt(what, action, *arguments):
    try:
        action(*arguments)
    except Exception:
        return
    print("escaped:", what)
"""


@dataclass(frozen=True)
class Hostile:
    """One program. `stdout` is what it must have printed; None where that is all the same."""

    name: str
    status: ExecStatus
    code: str
    language: Language = "python"
    stdout: str | None = None
    stdin: str = ""
    exit: int | None = None
    """The exit status it must have; None where that is all the same."""
    leak: str | None = None
    """What neither stdout nor stderr may hold."""
    source: str = field(init=False)

    @property
    def limits(self) -> Limits:
        match self.status:
            case "compile_error":
                return LIMITS
            case "timeout":
                return replace(LIMITS, compile_s=PATIENT.compile_s)
            case _:
                return PATIENT

    def __post_init__(self) -> None:
        helper = ATTEMPT if "attempt(" in self.code else ""
        object.__setattr__(self, "source", NAME_PROCESS[self.language] + helper + self.code.replace("MARKER", MARKER))


def contained(name: str, code: str, stdin: str = "") -> Hostile:
    """A program that tries to reach something and must end well, having reached nothing."""
    return Hostile(name, "ok", code + "\nprint('end')\n", stdout="end\n", stdin=stdin)


TIME_AND_PROCESSES = (
    Hostile("infinite_loop", "timeout", "while True: pass"),
    Hostile("sleep_forever", "timeout", "import time; time.sleep(10**6)"),
    Hostile(
        "thread_that_never_ends",
        "timeout",
        "import threading, time; threading.Thread(target=time.sleep, args=(10**6,)).start()",
    ),
    Hostile(
        "fork_bomb",
        "timeout",
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    ),
    Hostile("fork_bomb_in_cpp", "timeout", 'extern "C" int fork();\nint main() { for (;;) fork(); }', "cpp"),
    contained(
        "more_processes_than_allowed",
        """
import os, time
children = 0
while children < 100:
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        time.sleep(10**6)
    children += 1
if children > 8:
    print("escaped:", children)
""",
    ),
    contained(
        "more_threads_than_allowed",
        """
import threading, time
threads = 0
while threads < 100:
    try:
        threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()
    except RuntimeError:
        break
    threads += 1
if threads > 8:
    print("escaped:", threads)
""",
    ),
    contained(
        "zombie_flood",
        """
import os
zombies = 0
while zombies < 3000:
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        break
    zombies += 1
if zombies == 3000:
    print("escaped:", zombies)
""",
    ),
    Hostile(
        "ignores_every_signal",
        "timeout",
        """
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: pass
""",
    ),
    Hostile(
        "stops_itself",
        "timeout",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    ),
    contained(
        "daemon",
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(3):
            os.close(descriptor)
        time.sleep(10**6)
    os._exit(0)
os.wait()
""",
    ),
    contained(
        "daemon_that_holds_stdout",
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(10**6)
    os._exit(0)
os.wait()
""",
    ),
    contained(
        "kills_every_process_it_sees",
        """
import os, signal
seen = {int(name) for name in os.listdir("/proc") if name.isdigit()} | set(range(1, 3000))
for process in seen - {os.getpid()}:
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(process, number)
        except OSError:
            pass
""",
    ),
    contained(
        "kills_its_parent",
        """
import os, signal
for number in (signal.SIGSTOP, signal.SIGKILL):
    if os.getppid() > 0:
        try:
            os.kill(os.getppid(), number)
        except OSError:
            pass
""",
    ),
    contained("kills_all", "import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError:\n    pass"),
    Hostile("kills_its_group", "runtime_error", "import os, signal; os.killpg(os.getpgrp(), signal.SIGKILL)", exit=-9),
)

MEMORY = (
    Hostile("ten_gigabytes", "memory", "blocks = [b'x' * 2**24 for _ in range(640)]"),
    Hostile(
        "memory_spread_over_children",
        "memory",
        """
import os, time
for _ in range(6):
    if os.fork() == 0:
        block = b"x" * (40 * 2**20)
        time.sleep(10**6)
time.sleep(10**6)
""",
    ),
    Hostile(
        "ten_gigabytes_shared",
        "memory",
        """
import mmap
shared = []
for _ in range(640):
    shared.append(mmap.mmap(-1, 2**24))
    shared[-1].write(b"x" * 2**24)
""",
    ),
    # Refused: such memory is in no process's resident set.
    Hostile(
        "ten_gigabytes_in_memory_files",
        "runtime_error",
        """
import os
for number in range(10 * 2**10):
    os.write(os.memfd_create("MARKER"), b"x" * 2**20)
""",
    ),
    Hostile(
        "ten_gigabytes_in_cpp",
        "memory",
        """
int main() {
    for (;;) {
        volatile char* block = new char[1 << 20];
        for (int i = 0; i < 1 << 20; i++) block[i] = 1;
    }
}
""",
        "cpp",
    ),
    Hostile("recursion", "runtime_error", "def f(): f()\nf()"),
    Hostile(
        "recursion_of_the_interpreter",
        "runtime_error",
        """
import sys
sys.setrecursionlimit(10**9)
class Endless:
    def __repr__(self): return repr(self)
repr(Endless())
""",
    ),
    # The stack may grow as large as the memory, so that is what it runs out of.
    Hostile(
        "stack_overflow",
        "memory",
        "int f(int n) { volatile char page[4096]; page[n % 4096] = 1; return f(n + 1) + page[0]; }\n"
        "int main() { return f(0); }",
        "cpp",
    ),
    Hostile("deeply_nested_source", "runtime_error", "(" * 20_000),
)

INPUT_AND_OUTPUT = (
    Hostile("infinite_output", "output", "while True: print('x' * 1000)"),
    Hostile("infinite_errors", "output", "import sys\nwhile True: print('x' * 1000, file=sys.stderr)"),
    Hostile(
        "infinite_output_of_a_child",
        "output",
        """
import os, time
if os.fork() == 0:
    while True: print("x" * 1000)
time.sleep(10**6)
""",
    ),
    Hostile(
        "null_and_invalid_bytes",
        "ok",
        r"import os; os.write(1, b'a\0b\xff\xfe\xc3(\xed\xa0\x80\n')",
        stdout=b"a\0b\xff\xfe\xc3(\xed\xa0\x80\n".decode("utf-8", "replace"),
    ),
    contained("closes_stdin_at_once", "import os; os.close(0)", stdin="x" * 4_000_000),
    contained("leaves_stdin_unread", "", stdin="x" * 4_000_000),
    Hostile("closes_its_outputs", "timeout", "import os, time; os.close(1); os.close(2); time.sleep(10**6)"),
    contained(
        "exhausts_file_descriptors",
        """
opened = []
while len(opened) < 100_000:
    try:
        opened.append(open("/dev/null"))
    except OSError:
        break
if len(opened) > 20_000:
    print("escaped:", len(opened))
opened.clear()
""",
    ),
    contained(
        "uses_inherited_file_descriptors",
        """
import os
for descriptor in range(3, 4096):
    attempt(descriptor, os.fstat, descriptor)
""",
    ),
    Hostile(
        "prints_a_passed_marker",
        "runtime_error",
        """print('passed', '{"status": "ok", "exit": 0}'); raise SystemExit(1)""",
        exit=1,
    ),
    Hostile("exits_before_the_tests", "ok", "import os; os._exit(0)", stdout="", exit=0),
    Hostile("unusual_exit_status", "runtime_error", "import os; os._exit(137)", exit=137),
)

COMPILE_BOMBS = (
    Hostile("endless_include", "compile_error", '#include "/dev/zero"\nint main() {}', "cpp"),
    Hostile("include_of_passwords", "compile_error", '#include "/etc/shadow"\nint main() {}', "cpp", leak="root:"),
    Hostile("include_of_itself", "compile_error", "#include __FILE__\n#include __FILE__\nint main() {}", "cpp"),
    Hostile(
        "endless_templates",
        "compile_error",
        "template <int A, int B> struct T { static const int v = T<A - 1, B * 2>::v + T<A - 1, B * 2 + 1>::v; };\n"
        "template <int B> struct T<0, B> { static const int v = B; };\nint main() { return T<25, 0>::v; }",
        "cpp",
    ),
    Hostile("huge_binary", "compile_error", "char block[1u << 31] = {1};\nint main() { return block[0]; }", "cpp"),
)
