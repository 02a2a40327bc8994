"""Parsers of the parts of a problem: tests, limits, texts and prompts. A part that is wrong raises BadRow."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Example, Message
from cookbook.data.bad_rows import BadRow
from cookbook.sandbox.base import Language
from cookbook.sandbox.problem import CallTests, CodeProblem, StdinTests

T = TypeVar("T")

LARGEST_TESTS = 10_000
"""Tests of one problem, after `max_tests`."""

LARGEST_TEST_BYTES = 256 << 20
"""Characters of all tests of one problem together, after `max_tests`."""

LONGEST_TIME_S = 600.0
LARGEST_MEMORY_MB = 64 * 1024
"""Limits above these are faults of the data: no contest has them."""

LANGUAGES: dict[Language, str] = {
    "python": "Python 3",
    "cpp": "C++",
    "java": "Java",
    "go": "Go",
    "rust": "Rust",
    "javascript": "JavaScript",
}
"""Each language, as prompts call it."""


def check_max_tests(max_tests: int | None) -> None:
    if max_tests is not None and max_tests < 1:
        raise DataError(f"dataset.max_tests={max_tests}: must be at least 1, or null for all tests")


def check_language(language: str) -> None:
    if language not in LANGUAGES:
        raise DataError(f"dataset.language={language}: must be one of {', '.join(LANGUAGES)}")


def column(row: Mapping[str, Any], *names: str) -> Any:
    """The first of the columns that the row has a value in."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise BadRow(
        "missing columns", f"no {' or '.join(map(repr, names))}; the row has {', '.join(map(repr, row)) or 'none'}"
    )


def text(row: Mapping[str, Any], *names: str) -> str:
    value = column(row, *names)
    if not isinstance(value, str) or not value.strip():
        raise BadRow("no statement", f"column {names[0]!r} is {value!r:.60}; it must be text that is not empty")
    return _utf8(value, names[0])


def _utf8(value: str, what: str) -> str:
    """The text itself; JSON's escapes can make one that no file and no pipe takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow("not UTF-8", f"{what}: half of a surrogate pair at {error.start}") from error
    return value


def decode_json(value: Any, what: str) -> Any:
    """The value itself, or what its text is the JSON of."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow("broken JSON", f"{what}: {error} in {value!r:.60}") from error


def choose_tests(public: Sequence[T], hidden: Sequence[T], max_tests: int | None) -> list[T]:
    """At most `max_tests` of the tests, always the same: first public ones, then hidden ones at even distances.

    Public tests (samples) fill at most half the places as long as there are hidden ones for the rest; where none is
    public, the first test counts as such. Hidden tests tend to grow from first to last, so even distances keep some of
    every size.
    """
    if not public:
        public, hidden = hidden[:1], hidden[1:]
    if max_tests is None or len(public) + len(hidden) <= max_tests:
        return [*public, *hidden]
    first = public[: max_tests - min(len(hidden), max_tests // 2)]
    room = max_tests - len(first)
    return [*first, *(hidden[(position + 1) * len(hidden) // room - 1] for position in range(room))]


def stdin_tests(
    public: Sequence[tuple[Any, Any]], hidden: Sequence[tuple[Any, Any]], max_tests: int | None
) -> StdinTests:
    """From (input, output) pairs. Each is a text or, as in some rows of APPS and TACO, the list of its lines."""
    chosen = choose_tests(public, hidden, max_tests)
    cases = tuple(
        (_stdin_text(given, number), _stdin_text(expected, number))
        for number, (given, expected) in enumerate(chosen, start=1)
    )
    _check_size(len(cases), sum(len(given) + len(expected) for given, expected in cases))
    return StdinTests(cases)


def call_tests(
    name: str, public: Sequence[tuple[Any, Any]], hidden: Sequence[tuple[Any, Any]], max_tests: int | None
) -> CallTests:
    """Tests from pairs of arguments and value, both JSON values.

    The arguments are a list or, as in LiveCodeBench, a text with one JSON value a line.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise BadRow("malformed function name", repr(name)[:60])
    cases = []
    for number, (given, expected) in enumerate(choose_tests(public, hidden, max_tests), start=1):
        if isinstance(given, str):
            given = [
                decode_json(line, f"argument of test {number}") for line in given.strip().splitlines() if line.strip()
            ]
        if not isinstance(given, list):
            raise BadRow("malformed test", f"test {number}: the arguments are {given!r:.60}, not a list")
        cases.append((tuple(given), expected))
    _check_size(len(cases), sum(len(repr(case)) for case in cases))
    return CallTests(name, tuple(cases))


def _stdin_text(value: Any, number: int) -> str:
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) and not isinstance(line, bool) for line in lines):
        raise BadRow("malformed test", f"test {number}: {value!r:.60} is neither a text nor a list of lines")
    whole = value if isinstance(value, str) else "".join(f"{str(line).removesuffix(chr(10))}\n" for line in lines)
    return _utf8(whole, f"test {number}")


def _check_size(count: int, size: int) -> None:
    if not count:
        raise BadRow("no tests")
    if count > LARGEST_TESTS:
        raise BadRow("too many tests", f"{count}, more than {LARGEST_TESTS}; set dataset.max_tests")
    if size > LARGEST_TEST_BYTES:
        raise BadRow(
            "tests too large", f"{size >> 20} MiB, more than {LARGEST_TEST_BYTES >> 20} MiB; set dataset.max_tests"
        )


def time_limit(seconds: float) -> float:
    if not 0 < seconds <= LONGEST_TIME_S:  # which also refuses NaN
        raise BadRow(
            "absurd limit", f"a time limit of {seconds:g} s; it must be above 0 and at most {LONGEST_TIME_S:g} s"
        )
    return float(seconds)


def memory_limit(megabytes: float) -> int:
    if not 1 <= megabytes <= LARGEST_MEMORY_MB:
        raise BadRow("absurd limit", f"a memory limit of {megabytes:g} MB; it must be from 1 to {LARGEST_MEMORY_MB} MB")
    return int(megabytes)


_UNITS = {
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "ms": 1e-3,
    "b": 1e-6,
    "kb": 1e-3,
    "mb": 1.0,
    "gb": 1e3,
    "kib": 1.024e-3,
    "mib": 1.048576,
    "gib": 1073.741824,
}
_UNITS |= {
    f"{name}{end}": _UNITS[short]
    for name, short in {"second": "s", "sec": "s", "millisecond": "ms"}.items()
    for end in ("", "s")
}
_UNITS |= {
    f"{prefix}byte{end}": _UNITS[f"{prefix[:1]}b"] for prefix in ("", "kilo", "mega", "giga") for end in ("", "s")
}
"""In seconds and megabytes. A number without a unit is in one of these."""


def quantity(value: Any, what: str) -> float | None:
    """Seconds or megabytes from a number or a text such as "2.0 seconds" or "256.0 megabytes".

    None for nothing ("", "None", null).
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null")):
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(r"\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*([a-z]*)\s*", str(value).lower())
    try:
        return float(match[1]) * _UNITS[match[2]] if match else float("")
    except (ValueError, KeyError) as error:
        raise BadRow("malformed limit", f"the {what} limit is {value!r:.60}") from error


def program_prompt(statement: str, language: Language = "python") -> str:
    """The statement, and to answer with a program that reads stdin."""
    name, fence = LANGUAGES[language], language
    instruction = f"Write a {name} program that reads the input from stdin and writes the answer to stdout."
    return f"{statement.strip()}\n\n{instruction} Put the whole program in one ```{fence} block."


def function_prompt(statement: str, function_name: str, starter_code: str = "") -> str:
    """The statement, and to answer with a Python function, or with the class of the starter code."""
    if starter_code.strip():
        instruction = f"Complete this Python code:\n\n```python\n{starter_code.strip()}\n```\n\n"
    else:
        instruction = f"Write a Python function named `{function_name}`. "
    return f"{statement.strip()}\n\n{instruction}Put the whole program in one ```python block."


def make_example(prompt: str, problem: CodeProblem, extra: Mapping[str, Any]) -> Example:
    """An example, still without its id, whose `extra` has the problem under that name."""
    return Example("", (Message(role="user", content=prompt),), "", {"problem": problem, **extra})


def optional(row: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Those of the columns that have a text or a number, renamed: `optional(row, rating="cf_rating")`."""
    values = {key: row.get(name) for key, name in names.items()}
    return {key: value for key, value in values.items() if isinstance(value, str | int | float) and value != ""}


def solution_extra(program: str | None, language: Language = "python") -> dict[str, Any]:
    """The entries of `extra` for a gold program. Line ends become those of Unix; a fence around it is taken off."""
    if not program or not program.strip():
        return {}
    program = program.replace("\r\n", "\n")
    if fenced := re.fullmatch(r"\s*```[^\n`]*\n(.*?)```\s*", program, re.DOTALL):
        program = fenced[1]
    return {"solution": program, "solution_language": language}


def parse_python(code: str, what: str) -> ast.Module:
    """The syntax tree of a program of the data.

    Raises:
        BadRow: it is not valid Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as those about "\\d" in a text, which old programs have
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadRow("not Python", f"{what}: {type(error).__name__}: {error}") from error
