"""LiveCodeBench (Jain et al. 2024, arXiv:2403.07974): contest problems with the dates on which they were published.

Columns, as LiveCodeBench's own `lcb_runner/benchmarks/code_generation.py` reads them: `question_content`, `platform`,
`contest_date` (ISO 8601), `difficulty`, `starter_code`, `metadata` (JSON, with `func_name`), `public_test_cases`
(JSON) and `private_test_cases`: JSON, or the base64 of the zlib compression of the pickle of the JSON text. The
pickle is never loaded: its instructions are read, and it must hold one text.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, ClassVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.data.bad_rows import BadRow
from cookbook.data.code.json_problems import make_prompt, parse_tests
from cookbook.data.code.rows import check_max_tests, column, decode_json, make_example, optional, text
from cookbook.data.files import Location, Row, read_file
from cookbook.data.source import Numbered, RowDataset
from cookbook.sandbox.problem import CodeProblem

LARGEST_PRIVATE_TESTS = 1 << 30
"""Bytes of a problem's private tests after decompression."""

_TEXT_OPCODES = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_OTHER_OPCODES = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


@dataclass(kw_only=True, eq=False, repr=False)
class LiveCodeBench(RowDataset[Example]):
    """Problems before a date to train on, and those since to be tested with.

    Args:
        path: A local folder with the hub's files (`test.jsonl`, `test2.jsonl`, ... or `test*.parquet`), or one file.
        hub_id: Dataset on the hub, read when `path` is None.
        hub_config: Its configuration, a release of the benchmark or a part of one.
        train_start: First contest date (YYYY-MM-DD) of the training problems; None: no bound.
        test_start: First contest date of the test problems; earlier ones are trained on.
        test_end: First contest date after the test problems; None: no bound.
        max_tests: Tests kept of each problem, chosen by `rows.choose_tests`; None keeps all.

    The other options and the errors are those of `RowDataset`.
    """

    kind: ClassVar[str] = "prompts"

    name: str = "livecodebench"
    hub_id: str | None = "lighteval/code_generation_lite"
    hub_config: str | None = "release_v5"
    train_start: str | None = None
    test_start: str = "2024-08-01"
    test_end: str | None = None
    max_tests: int | None = None

    def __post_init__(self) -> None:
        check_max_tests(self.max_tests)
        self._start = _date("train_start", self.train_start, date.min)
        self._middle = _date("test_start", self.test_start, date.max)
        self._end = _date("test_end", self.test_end, date.max)
        if not self._start < self._middle < self._end:
            raise DataError(
                f"dataset.test_start={self.test_start}: must be after train_start={self.train_start} "
                f"and before test_end={self.test_end}"
            )
        super().__post_init__()

    def load(self) -> None:
        problems = list(self.items(self._rows()))

        def is_test(problem: Numbered[Example]) -> bool:
            return problem[1].extra["contest_date"] >= self._middle.isoformat()

        train = (problem for problem in problems if not is_test(problem))
        self.train = self.take("train", train, self.train_size)
        self.test = self.take("test", filter(is_test, problems), self.test_size)

    def _rows(self) -> Iterator[Row]:
        folder = self.local
        files = [] if folder is None else sorted([*folder.glob("test*.jsonl"), *folder.glob("test*.parquet")])
        if files:
            return (row for file in files for row in read_file(file))
        return Location(folder, self.hub_id, self.hub_config).read("test")

    def parse(self, row: Mapping[str, Any], place: str) -> Example | None:
        day = contest_day(column(row, "contest_date"))
        return _parse(row, day, self.max_tests) if self._start <= day < self._end else None


def _parse(row: Mapping[str, Any], day: date, max_tests: int | None) -> Example:
    metadata = decode_json(row.get("metadata") or {}, "metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    public = decode_json(column(row, "public_test_cases"), "public_test_cases")
    private = private_tests(column(row, "private_test_cases"))
    if not isinstance(public, list) or not isinstance(private, list):
        raise BadRow("malformed tests", "public_test_cases and private_test_cases must be lists of tests")
    tests = parse_tests(public, private, name, max_tests)
    prompt = make_prompt(text(row, "question_content"), tests, row.get("starter_code"))
    extra = optional(row, difficulty="difficulty", source="platform") | {"contest_date": day.isoformat()}
    return make_example(prompt, CodeProblem(tests), extra)


def private_tests(value: Any) -> Any:
    """The decoded `private_test_cases`.

    Raises:
        BadRow: neither JSON nor the base64 of a compressed pickle of one text, or larger than `LARGEST_PRIVATE_TESTS`.
    """
    if not isinstance(value, str) or value.lstrip().startswith("["):
        return decode_json(value, "private_test_cases")
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(value, validate=True), LARGEST_PRIVATE_TESTS)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise BadRow("malformed private tests", f"{type(error).__name__}: {error}") from error
    if inflate.unconsumed_tail:
        raise BadRow("private tests too large", f"more than {LARGEST_PRIVATE_TESTS >> 20} MiB after decompression")
    if not inflate.eof:
        raise BadRow("malformed private tests", "the compressed data end too early")
    return decode_json(_pickled_text(data), "private_test_cases")


def _pickled_text(data: bytes) -> str:
    """The text that a pickle consists of. Its instructions are read, not run."""
    texts = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _TEXT_OPCODES:
                texts.append(argument)
            elif opcode.name not in _OTHER_OPCODES:
                raise BadRow(
                    "malformed private tests",
                    f"a pickle with the instruction {opcode.name}, which a text does not need",
                )
    except (ValueError, UnicodeError) as error:
        raise BadRow("malformed private tests", f"no pickle: {error}") from error
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise BadRow("malformed private tests", f"a pickle of {len(texts)} texts, not one")
    return texts[0]


def contest_day(value: Any) -> date:
    if isinstance(value, datetime):
        return value.date()
    try:
        return datetime.fromisoformat(value).date()
    except (TypeError, ValueError) as error:
        raise BadRow("malformed contest_date", f"{value!r:.60}") from error


def _date(name: str, value: str | None, default: date) -> date:
    try:
        return default if value is None else date.fromisoformat(str(value))
    except ValueError as error:
        raise DataError(f"dataset.{name}={value}: must be a date, YYYY-MM-DD") from error
