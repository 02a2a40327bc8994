"""CodeContests (Li et al. 2022, arXiv:2203.07814): problems of Codeforces and other sites, with correct programs.

Columns, as DeepMind's `contest_problem.proto` and the card of deepmind/code_contests on the hub describe them: `description`;
`public_tests`, `private_tests` and `generated_tests`, each `{"input": [...], "output": [...]}`; `solutions`, `{"language": [...],
"solution": [...]}` with the languages 1 Python 2, 2 C++, 3 Python 3, 4 Java; `time_limit`, `{"seconds", "nanos"}` or null;
`memory_limit_bytes`, 0 where unknown; `input_file` and `output_file`, "" for stdin and stdout; `source`, `difficulty` and `cf_rating`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cookbook.core.examples import Example
from cookbook.data.chat.rows import BadRow
from cookbook.data.code.dataset import OnBadRow, ParsedProblem, ProblemReader, split_rows
from cookbook.data.code.rows import (
    check_language,
    check_max_tests,
    column,
    memory_limit,
    optional,
    program_prompt,
    solution_extra,
    stdin_tests,
    text,
    time_limit,
)
from cookbook.sandbox.base import Language
from cookbook.sandbox.problem import CodeProblem

_LANGUAGES: dict[int, Language] = {2: "cpp", 3: "python", 4: "java"}
"""Of a solution; Python 2 is none of ours."""


class CodeContests:
    """Problems that are graded by stdin and stdout. Where several outputs are right, the tests know only one of them.

    Args:
        path: A local folder to read instead of the hub: `train*` and `test*`, as JSONL or Parquet, in it or in its subfolder `data`.
        hub_id: Dataset on the hub, read when `path` is None.
        train_split: Split to learn from.
        test_split: Held-out split: "test" or "valid".
        language: What the programs are to be written in; a gold program in it is preferred, then Python, C++, Java.
        generated_tests: Also take the tests that were made by changing others; without them wrong programs pass more often.
        max_tests: Tests kept of each problem, chosen by `rows.choose_tests`; None keeps all.
        on_bad_row: "skip" counts a malformed row in `bad_rows`; "fail" stops at the first.
        train_size: Keep only the first problems of `train`; None keeps all.
        test_size: The same for `test`.

    Raises:
        DataError: nothing to read, a bad row where `on_bad_row` is "fail", or a split without enough problems.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        hub_id: str | None = "deepmind/code_contests",
        train_split: str = "train",
        test_split: str = "test",
        language: Language = "python",
        generated_tests: bool = True,
        max_tests: int | None = 20,
        on_bad_row: OnBadRow = "skip",
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        check_max_tests(max_tests)
        check_language(language)
        reader = ProblemReader("code_contests", path, on_bad_row)
        self.bad_rows = reader.bad_rows
        hidden = ("private_tests", "generated_tests") if generated_tests else ("private_tests",)

        def parse(row: Mapping[str, Any]) -> ParsedProblem:
            if row.get("input_file") or row.get("output_file"):
                raise BadRow("reads or writes files", f"{row.get('input_file')!r:.40}, {row.get('output_file')!r:.40}")
            public = _tests(row, "public_tests")
            tests = stdin_tests(public, [test for name in hidden for test in _tests(row, name)], max_tests)
            seconds, size = row.get("time_limit"), row.get("memory_limit_bytes")
            problem = CodeProblem(
                tests,
                language,
                time_limit_s=None if seconds is None else time_limit(_seconds(seconds)),
                memory_limit_mb=memory_limit(_number(size, "memory_limit_bytes") / 1e6) if size else None,
            )
            extra = _gold(row.get("solutions"), language) | optional(row, source="source", difficulty="difficulty")
            rating = optional(row, rating="cf_rating")
            return ParsedProblem(
                program_prompt(text(row, "description"), language),
                problem,
                extra | (rating if rating.get("rating") else {}),
            )

        train = reader.parse(split_rows(reader, hub_id, train_split, [None]), parse)
        self.train: Sequence[Example] = reader.examples("train", train, train_size)
        test = reader.parse(split_rows(reader, hub_id, test_split, [None]), parse)
        self.test: Sequence[Example] = reader.examples("test", test, test_size)


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
