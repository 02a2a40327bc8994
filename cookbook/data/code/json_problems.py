"""Problems whose tests are JSON: APPS, TACO, DeepCoder, PrimeIntellect's verifiable coding problems.

The layouts of `parse_tests`, and where they are described:

* `{"inputs": [...], "outputs": [...], "fn_name": ...}`: column `input_output` of APPS (Hendrycks et al. 2021,
  arXiv:2105.09938) and TACO (Li et al. 2023, arXiv:2312.14852; dataset card of BAAI/TACO), column `tests` of the
  configuration `taco` of DeepCoder;
* a list of `{"input", "output", "type": "stdin_stdout" | "function_call", "fn_name"}`: `test_cases` in
  `verification_info` of PrimeIntellect/verifiable-coding-problems (typed in the card of its copy
  open-r1/verifiable-coding-problems-python), and `tests` of the configuration `primeintellect` of DeepCoder;
* a list of `{"input", "output", "testtype": "stdin" | "functional", "metadata": {"func_name"}}`: LiveCodeBench, and
  `tests` of the configurations `lcbv5` and `codeforces` of DeepCoder (as tinker-cookbook's recipes/code_rl reads them).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.data.bad_rows import BadRow
from cookbook.data.code.rows import (
    call_tests,
    check_language,
    check_max_tests,
    column,
    decode_json,
    function_prompt,
    make_example,
    memory_limit,
    optional,
    program_prompt,
    quantity,
    solution_extra,
    stdin_tests,
    text,
    time_limit,
)
from cookbook.data.files import Location, Row
from cookbook.data.source import Numbered, RowDataset, Source
from cookbook.sandbox.base import Language
from cookbook.sandbox.problem import CallTests, CodeProblem, StdinTests

Pair = tuple[Any, Any]

_STDIN_TYPES = (None, "stdin", "stdin_stdout")
_CALL_TYPES = ("functional", "function_call")


def parse_tests(public: Any, hidden: Any, function_name: str | None, max_tests: int | None) -> StdinTests | CallTests:
    """Tests in the layouts above, or the JSON texts of them; None where there are none of a kind.

    `function_name` is used where the tests name none. In call tests of the first two layouts each output may stand in a
    list of its own, `[[5], [7]]` for the values 5 and 7: APPS' and TACO's own graders accept a value that equals the
    output or its first item. Here the lists are taken off if every output of the problem is a list of one item, so that
    one value is right.

    Raises:
        BadRow: broken JSON, no tests, inputs and outputs of different numbers, tests of two kinds, a malformed test.
    """
    first, name = _pairs(public, function_name)
    rest, other_name = _pairs(hidden, function_name)
    if not first and not rest:
        raise BadRow("no tests")
    if first and rest and name != other_name:
        raise BadRow("tests of two kinds", f"{name}, {other_name}"[:80])
    name = name if first else other_name
    if name is None:
        return stdin_tests(first, rest, max_tests)
    wrapped = all(
        isinstance(given, list) and isinstance(expected, list) and len(expected) == 1
        for given, expected in [*first, *rest]
    )

    def value(given: Any, expected: Any) -> Any:
        return expected[0] if wrapped else decode_json(expected, "output") if isinstance(given, str) else expected

    first, rest = ([(given, value(given, expected)) for given, expected in pairs] for pairs in (first, rest))
    return call_tests(name, first, rest, max_tests)


def _pairs(tests: Any, function_name: str | None) -> tuple[list[Pair], str | None]:
    tests = decode_json(tests, "tests")
    if tests is None:
        return [], None
    if isinstance(tests, Mapping):
        return _columns(tests)
    if isinstance(tests, list):
        return _cases(tests, function_name)
    raise BadRow("malformed tests", f"{tests!r:.60} is neither a list of tests nor inputs and outputs")


def _columns(tests: Mapping[str, Any]) -> tuple[list[Pair], str | None]:
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadRow("no tests", f"inputs are {inputs!r:.40}, outputs {outputs!r:.40}; both must be lists")
    if len(inputs) != len(outputs):
        raise BadRow("numbers of inputs and outputs differ", f"{len(inputs)} inputs, {len(outputs)} outputs")
    return list(zip(inputs, outputs, strict=True)), _name(name)


def _cases(tests: Sequence[Any], function_name: str | None) -> tuple[list[Pair], str | None]:
    pairs: list[Pair] = []
    names: set[str | None] = set()
    for number, test in enumerate(tests, start=1):
        if not isinstance(test, Mapping) or test.get("input") is None or test.get("output") is None:
            raise BadRow("malformed test", f"test {number} is {test!r:.60}; it needs input and output")
        kind = test.get("testtype", test.get("type"))
        if kind in _CALL_TYPES:
            metadata = decode_json(test.get("metadata") or {}, f"metadata of test {number}")
            own = metadata.get("func_name") if isinstance(metadata, Mapping) else None
            name = _name(test.get("fn_name") or own or function_name)
            if name is None:
                raise BadRow("no function name", f"test {number} calls a function, but none is named")
        elif kind in _STDIN_TYPES:
            name = None
        else:
            raise BadRow("unknown kind of test", f"test {number}: {kind!r:.40}")
        names.add(name)
        pairs.append((test["input"], test["output"]))
    if len(names) > 1:
        raise BadRow("tests of two kinds", f"{', '.join(sorted(map(str, names)))}"[:80])
    return pairs, next(iter(names), None)


def _name(value: Any) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BadRow("malformed function name", f"{value!r:.60}")
    return value


def make_prompt(
    statement: str, tests: StdinTests | CallTests, starter_code: Any = "", language: Language = "python"
) -> str:
    if isinstance(tests, StdinTests):
        return program_prompt(statement, language)
    return function_prompt(statement, tests.function_name, starter_code if isinstance(starter_code, str) else "")


def first_solution(value: Any) -> str | None:
    """The first of a list of programs, or of the JSON text of one; None where there is none."""
    programs = decode_json(value, "solutions") if isinstance(value, str) and value.lstrip().startswith("[") else value
    programs = programs if isinstance(programs, list) else [programs]
    return next((program for program in programs if isinstance(program, str) and program.strip()), None)


@dataclass(kw_only=True, eq=False, repr=False)
class DeepCoder(RowDataset[Example]):
    """DeepCoder-Preview (agentica-org, 2025): contest problems of several sources.

    Training problems are those of TACO, PrimeIntellect and LiveCodeBench, test problems those of Codeforces and later
    LiveCodeBench. Columns: `problem`, `tests`, `starter_code`, `solutions`, `metadata`.

    Args:
        path: A local folder to read instead of the hub, with the configurations as subfolders, or `train*` and `test*`
            files.
        hub_id: Dataset on the hub.
        train_configs: Configurations whose split `train` is trained on.
        test_configs: Configurations whose split `test` is held out.
        max_tests: Tests kept of each problem, chosen by `rows.choose_tests`; None keeps all.

    The other options and the errors are those of `RowDataset`.
    """

    kind: ClassVar[str] = "prompts"

    name: str = "deepcoder"
    hub_id: str | None = "agentica-org/DeepCoder-Preview-Dataset"
    train_configs: Sequence[str] = ("primeintellect", "taco", "lcbv5")
    test_configs: Sequence[str] = ("codeforces", "lcbv5")
    max_tests: int | None = 20

    def __post_init__(self) -> None:
        check_max_tests(self.max_tests)
        super().__post_init__()

    def load(self) -> None:
        self.train = self.take("train", self.items(self._rows("train", self.train_configs)), self.train_size)
        self.test = self.take("test", self.items(self._rows("test", self.test_configs), "test"), self.test_size)

    def _rows(self, split: str, configs: Sequence[str]) -> Iterator[Row]:
        """Those of each configuration, one after another."""
        if self.local is None:
            locations = [Location(None, self.hub_id, config) for config in configs]
        else:
            folders = [self.local / config for config in configs if (self.local / config).is_dir()]
            locations = [Location(folder, None) for folder in folders or [self.local]]
        return (row for location in locations for row in location.read(split))

    def parse(self, row: Mapping[str, Any], place: str) -> Example:
        metadata = decode_json(row.get("metadata") or {}, "metadata")
        name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
        tests = parse_tests(None, column(row, "tests"), _name(name), self.max_tests)
        prompt = make_prompt(text(row, "problem"), tests, row.get("starter_code"))
        return make_example(prompt, CodeProblem(tests), solution_extra(first_solution(row.get("solutions"))))


@dataclass(kw_only=True, eq=False, repr=False)
class TACO(Source[Example]):
    """TACO (Li et al. 2023): 25,443 and 1,000 problems of programming sites; and APPS (Hendrycks et al. 2021).

    APPS' columns are among TACO's: `question`, `input_output`, `solutions`, `starter_code`, `difficulty`, and in TACO
    `source`, `time_limit`, `memory_limit`.

    Args:
        difficulties: Keep only problems of these, and leave the others out; None keeps all.
        max_tests: Tests kept of each problem, chosen by `rows.choose_tests`; None keeps all.

    The other options and the errors are those of `Source`. `hub_config` is "ALL" or, in TACO, a difficulty.
    """

    kind: ClassVar[str] = "prompts"

    name: str = "taco"
    hub_id: str | None = "BAAI/TACO"
    hub_config: str | None = "ALL"
    difficulties: Sequence[str] | None = None
    max_tests: int | None = 20

    def __post_init__(self) -> None:
        check_max_tests(self.max_tests)
        super().__post_init__()

    def parse(self, row: Mapping[str, Any], place: str) -> Example | None:
        if self.difficulties is not None and row.get("difficulty") not in self.difficulties:
            return None
        tests = parse_tests(None, column(row, "input_output"), None, self.max_tests)
        prompt = make_prompt(text(row, "question"), tests, row.get("starter_code"))
        about = optional(row, difficulty="difficulty", source="source")
        solution = solution_extra(first_solution(row.get("solutions")))
        return make_example(prompt, CodeProblem(tests, **text_limits(row)), solution | about)


@dataclass(kw_only=True, eq=False, repr=False)
class PrimeIntellectCode(Source[Example]):
    """PrimeIntellect/verifiable-coding-problems (2025, part of SYNTHETIC-1): 144,169 problems, one split.

    Columns: `prompt` (or `problem_statement`), `verification_info` (with `language` and `test_cases`),
    `gold_standard_solution`, `source`, `metadata` (with `difficulty`, `time_limit`, `memory_limit`). Texts of
    structures are JSON or, in some rows, Python literals.

    Args:
        languages: Keep only problems to be solved in these, and leave the others out.
        max_tests: Tests kept of each problem, chosen by `rows.choose_tests`; None keeps all.
        max_rows: Read only this many rows of the 21 GB; None reads all.

    The other options and the errors are those of `Source`.
    """

    kind: ClassVar[str] = "prompts"

    name: str = "primeintellect_code"
    hub_id: str | None = "PrimeIntellect/verifiable-coding-problems"
    test_split: str | None = None
    test_fraction: float = 0.01
    languages: Sequence[Language] = ("python",)
    max_tests: int | None = 20
    max_rows: int | None = None

    def __post_init__(self) -> None:
        check_max_tests(self.max_tests)
        for language in self.languages:
            check_language(language)
        if self.max_rows is not None and self.max_rows < 2:
            raise DataError(
                f"dataset.max_rows={self.max_rows}: must be at least 2, one to train on and one to hold out, "
                "or null for all"
            )
        super().__post_init__()

    def items(self, rows: Iterable[Row], split: str = "train") -> Iterator[Numbered[Example]]:
        return super().items(islice(rows, self.max_rows), split)

    def parse(self, row: Mapping[str, Any], place: str) -> Example | None:
        info = _structure(column(row, "verification_info"), "verification_info")
        metadata = _structure(row.get("metadata") or {}, "metadata")
        language = info.get("language") or "python"
        if language not in self.languages:
            return None
        tests = parse_tests(None, column(info, "test_cases"), None, self.max_tests)
        if isinstance(tests, CallTests) and language != "python":
            raise BadRow("calls of a function in another language than Python", language)
        prompt = make_prompt(text(row, "prompt", "problem_statement"), tests, "", language)
        solution = solution_extra(first_solution(row.get("gold_standard_solution")), language)
        about = optional(row, source="source") | optional(metadata, difficulty="difficulty")
        return make_example(prompt, CodeProblem(tests, language, **text_limits(metadata)), solution | about)


def text_limits(columns: Mapping[str, Any]) -> dict[str, Any]:
    """`time_limit_s` and `memory_limit_mb` of a problem from `time_limit` ("2.0 seconds") and `memory_limit` ("256.0
    megabytes").
    """
    seconds, megabytes = quantity(columns.get("time_limit"), "time"), quantity(columns.get("memory_limit"), "memory")
    return {
        "time_limit_s": None if seconds is None else time_limit(seconds),
        "memory_limit_mb": None if megabytes is None else memory_limit(megabytes),
    }


def _structure(value: Any, what: str) -> Mapping[str, Any]:
    """An object, from its JSON text or from the text of the Python literal."""
    if isinstance(value, str):
        try:
            value = decode_json(value, what)
        except BadRow as broken:
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                raise broken from None
    if not isinstance(value, Mapping):
        raise BadRow("broken JSON", f"{what} is {value!r:.60}, not an object")
    return value
