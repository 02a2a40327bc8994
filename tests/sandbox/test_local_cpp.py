"""C++ programs in the local sandbox."""

import asyncio
import os
import signal

import pytest

from cookbook.sandbox import cpp
from cookbook.sandbox.base import ExecResult, Limits
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.worker import Outcome, Worker
from tests.sandbox.local_runs import (
    SMALL,
    needs_compiler,
    needs_linux,
    run,
)

pytestmark = needs_linux


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
