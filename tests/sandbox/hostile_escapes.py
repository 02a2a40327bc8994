"""Hostile programs, continued: those that reach for files, other processes, privileges and the next program."""

from tests.sandbox.hostile_programs import (
    COMPILE_BOMBS,
    INPUT_AND_OUTPUT,
    MEMORY,
    TIME_AND_PROCESSES,
    Hostile,
    contained,
)

FILES = (
    contained(
        "reads_passwords",
        """
def read(path):
    with open(path) as file:
        file.read(1)
import os
os.symlink("/etc/shadow", "link")
for path in ("/etc/shadow", "link", "/proc/1/root/etc/shadow", "/proc/self/root/etc/shadow", "/etc/gshadow"):
    attempt(path, read, path)
""",
    ),
    Hostile(
        "writes_until_refused",
        "ok",
        """
import os
total = 0
try:
    with open("big", "wb", buffering=0) as file:
        while total < 2**30:
            total += file.write(b"x" * 2**16)
except OSError:
    pass
print(total // 2**20)
""",
        stdout="4\n",
    ),
    Hostile(
        "fills_the_disk_with_files",
        "runtime_error",
        """
for number in range(10_000):
    with open(f"file{number}", "wb", buffering=0) as file:
        if file.write(b"x" * 2**19) < 2**19:
            raise OSError("refused")
""",
    ),
    Hostile(
        "fills_the_disk_with_names",
        "runtime_error",
        """
for number in range(10**6):
    open(f"file{number}", "w").close()
""",
    ),
    contained(
        "removes_its_directory",
        """
import os
here = os.getcwd()
open("file", "w").close()
for action in (
    lambda: os.rename(here, here + "-MARKER"),
    lambda: os.unlink("file"),
    lambda: os.rmdir(here),
    lambda: os.symlink("/etc", here),
):
    try:
        action()
    except OSError:
        pass
""",
    ),
    contained(
        "makes_directories_that_are_hard_to_remove",
        """
import os
os.makedirs("closed/inner")
open("closed/inner/file", "w").close()
os.chmod("closed/inner/file", 0)
os.chmod("closed/inner", 0)
os.chmod("closed", 0)
os.mkfifo("pipe")
open(b"\\xff\\n", "w").close()
for _ in range(1500):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
""",
    ),
)

PRIVILEGES = (
    contained(
        "reads_the_memory_of_others",
        """
import ctypes, os, re
def attach(process):
    if ctypes.CDLL(None, use_errno=True).ptrace(16, process, None, None):
        raise OSError
others = ({int(name) for name in os.listdir("/proc") if name.isdigit()} | {1}) - {os.getpid()}
for process in others:
    attempt(f"mem of {process}", os.open, f"/proc/{process}/mem", os.O_RDWR)
    attempt(f"ptrace of {process}", attach, process)
""",
    ),
    contained(
        "changes_the_machine",
        """
import glob, os, resource, signal, socket
def write(path):
    os.close(os.open(path, os.O_WRONLY))
paths = ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/etc/passwd"]
paths += ["/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/nvme0n1"]
paths += glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True)[:500]
for path in paths:
    attempt(path, write, path)
attempt("hostname", socket.sethostname, "MARKER")
attempt("device", os.mknod, "device", 0o60666, os.makedev(254, 0))
attempt("nice", os.nice, -10)
attempt("real time", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
for name in ("NOFILE", "AS", "FSIZE", "CPU", "NPROC"):
    limit = getattr(resource, f"RLIMIT_{name}")
    if resource.getrlimit(limit)[1] != resource.RLIM_INFINITY:
        attempt(name, resource.setrlimit, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
def spare_me():
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
attempt("oom_score_adj", spare_me)
""",
    ),
    contained(
        "becomes_root",
        """
import ctypes, glob, os, subprocess
library = ctypes.CDLL(None, use_errno=True)
def mount():
    if library.mount(b"none", b"/mnt", b"tmpfs", 0, None):
        raise OSError
def su(program):
    subprocess.run([program, "-c", "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=1, check=True)
attempt("mount", mount)
attempt("chroot", os.chroot, "/")
for program in ("/bin/su", "/usr/bin/sudo"):
    attempt(program, su, program)
with open("/proc/self/status") as file:
    if "NoNewPrivs:\\t1" not in file.read():
        print("escaped: may gain privileges from a setuid program")
""",
    ),
)

PATCHES_EVERYTHING = Hostile(
    "patches_everything",
    "ok",
    """
import atexit, builtins, gc, json, os, random, signal, sys, types
random.seed(0)
os.environ["MARKER"] = "1"
os.umask(0o777)
sys.path.insert(0, os.getcwd())
sys.setrecursionlimit(60)
sys.setswitchinterval(100)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
gc.disable()
for module in list(sys.modules.values()):
    for name, value in list(vars(module).items()):
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and module is not builtins:
            try:
                setattr(module, name, lambda *a, **k: None)
            except Exception:
                pass
sys.modules["json"] = sys.modules["math"] = types.ModuleType("poison")
builtins.open = builtins.int = builtins.sum = builtins.len = builtins.input = builtins.print = lambda *a, **k: "passed"
""",
)

HOSTILE = (*TIME_AND_PROCESSES, *MEMORY, *INPUT_AND_OUTPUT, *FILES, *PRIVILEGES, PATCHES_EVERYTHING, *COMPILE_BOMBS)
