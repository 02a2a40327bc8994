"""CodeContests (Li et al. 2022, arXiv:2203.07814): problems of Codeforces and other sites, with correct programs.

Columns, as DeepMind's `contest_problem.proto` and the card of deepmind/code_contests on the hub describe them:
`description`; `public_tests`, `private_tests` and `generated_tests`, each `{"input": [...], "output": [...]}`;
`solutions`, `{"language": [...], "solution": [...]}` with the languages 1 Python 2, 2 C++, 3 Python 3, 4 Java;
`time_limit`, `{"seconds", "nanos"}` or null; `memory_limit_bytes`, 0 where unknown; `input_file` and `output_file`, ""
for stdin and stdout; `source`, `difficulty` and `cf_rating`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook.core.examples import Example
from cookbook.data.bad_rows import BadRow
from cookbook.data.code.rows import (
    check_language,
    check_max_tests,
    column,
    make_example,
    memory_limit,
    optional,
    program_prompt,
    solution_extra,
    stdin_tests,
    text,
    time_limit,
)
from cookbook.data.source import Source
from cookbook.sandbox.base import Language
from cookbook.sandbox.problem import CodeProblem

_LANGUAGES: dict[int, Language] = {2: "cpp", 3: "python", 4: "java"}
"""Numbers of the languages of solutions. Python 2 is not supported."""


@dataclass(kw_only=True, eq=False, repr=False)
class CodeContests(Source[Example]):
    """Problems that are graded by stdin and stdout. Where several outputs are right, the tests know only one of them.

    Args:
        language: What the programs are to be written in; a gold program in it is preferred, then Python, C++, Java.
        generated_tests: Also take the tests that were made by changing others; without them wrong programs pass more
            often.
        max_tests: Tests kept of each problem, chosen by `rows.choose_tests`; None keeps all.

    The other options and the errors are those of `Source`. The held-out split is "test" or "valid".
    """

    kind: ClassVar[str] = "prompts"

    name: str = "code_contests"
    hub_id: str | None = "deepmind/code_contests"
    language: Language = "python"
    generated_tests: bool = True
    max_tests: int | None = 20

    def __post_init__(self) -> None:
        check_max_tests(self.max_tests)
        check_language(self.language)
        super().__post_init__()

    def parse(self, row: Mapping[str, Any], place: str) -> Example:
        if row.get("input_file") or row.get("output_file"):
            raise BadRow("reads or writes files", f"{row.get('input_file')!r:.40}, {row.get('output_file')!r:.40}")
        hidden = ("private_tests", "generated_tests") if self.generated_tests else ("private_tests",)
        tests = stdin_tests(
            _tests(row, "public_tests"), [test for name in hidden for test in _tests(row, name)], self.max_tests
        )
        seconds, size = row.get("time_limit"), row.get("memory_limit_bytes")
        problem = CodeProblem(
            tests,
            self.language,
            time_limit_s=None if seconds is None else time_limit(_seconds(seconds)),
            memory_limit_mb=memory_limit(_number(size, "memory_limit_bytes") / 1e6) if size else None,
        )
        extra = _gold(row.get("solutions"), self.language) | optional(row, source="source", difficulty="difficulty")
        rating = optional(row, rating="cf_rating")
        prompt = program_prompt(text(row, "description"), self.language)
        return make_example(prompt, problem, extra | (rating if rating.get("rating") else {}))


def _tests(row: Mapping[str, Any], name: str) -> list[tuple[Any, Any]]:
    inputs, outputs = _lists(column(row, name), name, "input", "output")
    if len(inputs) != len(outputs):
        raise BadRow("numbers of inputs and outputs differ", f"{name}: {len(inputs)} inputs, {len(outputs)} outputs")
    return list(zip(inputs, outputs, strict=True))


def _gold(value: Any, wanted: Language) -> dict[str, Any]:
    if value is None:
        return {}
    numbers, programs = _lists(value, "solutions", "language", "solution")
    first: dict[Language, str] = {}
    for number, program in zip(numbers, programs, strict=False):
        if (language := _LANGUAGES.get(number)) and isinstance(program, str):
            first.setdefault(language, program)
    languages: tuple[Language, ...] = (wanted, "python", "cpp", "java")
    return next((solution_extra(first[language], language) for language in languages if language in first), {})


def _lists(value: Any, name: str, *keys: str) -> list[list[Any]]:
    lists = [value.get(key) if isinstance(value, Mapping) else None for key in keys]
    if not all(isinstance(items, list) for items in lists):
        raise BadRow(
            "malformed tests" if "tests" in name else f"malformed {name}",
            f"{name} is {value!r:.60}, not lists of {' and '.join(keys)}",
        )
    return [list(items or ()) for items in lists]


def _seconds(duration: Any) -> float:
    if not isinstance(duration, Mapping):
        raise BadRow("malformed limit", f"time_limit is {duration!r:.60}, not seconds and nanos")
    return _number(duration.get("seconds", 0), "seconds") + _number(duration.get("nanos", 0), "nanos") / 1e9


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow("malformed limit", f"{name} is {value!r:.60}, not a number")
    return value
