"""A missing compiler or interpreter is the sandbox's failure; a program that exits with 127 has failed itself."""

import asyncio

import pytest

from cookbook.core.rollouts import Completion
from cookbook.sandbox import cpp
from cookbook.sandbox.fusion import ECHO, HELLO, FusionSandbox
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.problem import CodeProblem, StdinTests
from rewards.code import CodeReward
from tests.rewards.code_cases import example
from tests.sandbox.fusion_stand_in import StandIn, finished, response
from tests.sandbox.local_runs import needs_compiler, needs_linux, run

NOT_FOUND = finished(stderr="bash: line 1: g++: command not found\n", return_code=127)


@needs_linux
@needs_compiler
@pytest.mark.parametrize(
    "command",
    [
        ("no-such-compiler",),
        ("sh", "-c", "exit 127"),
        ("sh", "-c", "exit 126"),
        ("sh", "-c", "printf \"g++: fatal error: cannot execute 'cc1plus': execvp: No such file or directory\\n"
         "compilation terminated.\\n\" >&2; exit 1"),
    ],
    ids=["none", "127", "126", "no cc1plus"],
)  # fmt: skip
def test_a_missing_compiler_is_an_infrastructure_error(
    command: tuple[str, ...], sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpp, "_ARGUMENTS", command)
    code = f"int main() {{ return 1 + {sum(map(ord, command[-1]))} % 100; }}"  # not one that is compiled already
    assert run(sandbox, code, language="cpp").status == "infrastructure_error"
    reward = CodeReward(sandbox=sandbox)
    problem = CodeProblem(StdinTests((("1", "2"),)), language="cpp")
    result = asyncio.run(reward(Completion(f"```cpp\n{code}\n```", "eos", 1), example(problem)))
    assert (result.status, result.details["tests"]) == ("error", ["infrastructure_error"])
    monkeypatch.undo()
    assert run(sandbox, code, language="cpp").status == "runtime_error"


@needs_linux
@needs_compiler
def test_a_source_cannot_pretend_that_the_compiler_is_missing(sandbox: LocalSandbox):
    forged = "g++: fatal error: cannot execute 'cc1plus': execvp: No such file or directory"
    for code in (
        f'#line 1 "{forged}"\n#include "missing.h"\n',
        f'#line 1 "{forged}\\ncompilation terminated.\\n"\n#include "missing.h"\n',
        f"#error {forged}\n",
    ):
        assert run(sandbox, code, language="cpp").status == "compile_error"


@needs_linux
def test_a_program_that_exits_with_127_has_failed(sandbox: LocalSandbox):
    for status in (126, 127):
        assert run(sandbox, f"raise SystemExit({status})").status == "runtime_error"
        if "cpp" in sandbox.languages:
            assert run(sandbox, f"int main() {{ return {status}; }}", language="cpp").status == "runtime_error"


def fusion_run(sandbox: FusionSandbox, language: str):
    return asyncio.run(sandbox.run("program", language, "5\n"))  # pyright: ignore[reportArgumentType]


def test_a_compiler_that_a_server_lacks_is_an_infrastructure_error():
    with StandIn() as server:
        sandbox = FusionSandbox(base_url=server.url, backoff_s=0.001, retries=1)
        server.forget()
        server.answers["program"] = response(None, NOT_FOUND)
        result = fusion_run(sandbox, "cpp")
        assert (result.status, len(server.requests)) == ("infrastructure_error", 1)
        assert "command not found" in result.stderr
        sandbox.close()


@pytest.mark.parametrize("language", ["python", "javascript", "java"])
def test_exit_status_127_of_a_server_is_the_programs_if_the_language_runs(language: str):
    with StandIn() as server:
        sandbox = FusionSandbox(base_url=server.url, backoff_s=0.001, retries=1)
        compiled = finished() if language == "java" else None
        server.answers["program"] = response(finished(return_code=127), compiled)
        result = fusion_run(sandbox, language)
        assert (result.status, result.exit) == ("runtime_error", 127)

        server.answers[HELLO.get(language, ECHO)] = response(NOT_FOUND, compiled)  # pyright: ignore[reportCallIssue]
        assert fusion_run(sandbox, language).status == "infrastructure_error"
        sandbox.close()
