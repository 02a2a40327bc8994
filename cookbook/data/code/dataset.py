"""What the datasets of programming problems share: where their rows come from, and how a row becomes an example or a bad row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from cookbook.core.errors import DataError
from cookbook.core.examples import Example, Message
from cookbook.data.bad_rows import BadRows
from cookbook.data.chat.rows import BadRow
from cookbook.data.files import Row, Split, read_file, read_folder, read_hub
from cookbook.sandbox.problem import CodeProblem

OnBadRow = Literal["skip", "fail"]


@dataclass(frozen=True)
class ParsedProblem:
    """A problem before it has its place in a split. `extra` goes into the example's, beside the problem itself."""

    prompt: str
    problem: CodeProblem
    extra: Mapping[str, Any] = field(default_factory=dict)


Parser = Callable[[Mapping[str, Any]], ParsedProblem | None]
"""From a row to its problem, or None for a good row to leave out. Raises BadRow."""

Numbered = tuple[int, ParsedProblem]
"""A problem and the number of its row, counted from 0 with the bad rows and those left out."""


class ProblemReader:
    """Turns rows into examples with the ids `<name>/<split>/<row>`; counts the bad rows, or stops at the first.

    Args:
        name: Prefix of the ids.
        path: What was given as `dataset.path`; places of bad rows are shown relative to it.
        on_bad_row: "skip" counts a row that is no problem in `bad_rows` and goes on; "fail" stops there.
    """

    def __init__(self, name: str, path: str | None, on_bad_row: OnBadRow) -> None:
        if on_bad_row not in ("skip", "fail"):
            raise DataError(f"dataset.on_bad_row={on_bad_row}: must be skip (leave the row out and count it) or fail")
        self.name, self._on_bad_row = name, on_bad_row
        self.path = Path(path).expanduser() if path is not None else None
        self.bad_rows = BadRows()
        self.left_out = 0
        """Good rows that a filter of the dataset left out."""

    def on_broken(self, where: str, error: DataError) -> None:
        """What to do about a line that is no JSON."""
        if self._on_bad_row == "fail":
            raise error
        self.bad_rows.add("broken JSON", self._place(where))

    def parse(self, rows: Iterable[Row], parser: Parser) -> Iterator[Numbered]:
        """The good rows, one by one."""
        for index, (where, row) in enumerate(rows):
            try:
                parsed = parser(row)
            except BadRow as error:
                if self._on_bad_row == "fail":
                    raise DataError(f"{where}: {error}; mend the row, or set dataset.on_bad_row=skip") from error
                self.bad_rows.add(error.problem, self._place(where))
                continue
            if parsed is None:
                self.left_out += 1
            else:
                yield index, parsed

    def each(self, split: str, problems: Iterable[Numbered]) -> Iterator[Example]:
        """Each problem as an example, one by one."""
        for index, parsed in problems:
            message = Message(role="user", content=parsed.prompt)
            yield Example(f"{self.name}/{split}/{index}", (message,), "", {"problem": parsed.problem, **parsed.extra})

    def examples(self, split: Split, problems: Iterable[Numbered], size: int | None) -> list[Example]:
        """The first `size` of them as examples; no further one is read.

        Raises:
            DataError: there is none, or there are fewer than `size`.
        """
        if size is not None and size < 1:
            raise DataError(f"dataset.{split}_size={size}: must be at least 1, or null for all problems")
        examples = list(islice(self.each(split, problems), size))
        if len(examples) < (size or 1):
            wanted = (
                "at least one is needed" if size is None else f"dataset.{split}_size={size} wants more; null takes all"
            )
            left_out = f", {self.left_out} left out by the dataset's filters" if self.left_out else ""
            raise DataError(
                f"dataset {self.name}: {len(examples)} usable problems in the {split} split ({self.bad_rows}{left_out}); {wanted}"
            )
        return examples

    def _place(self, where: str) -> str:
        return where if self.path is None else where.removeprefix(f"{self.path}/").removeprefix(f"{self.path.parent}/")


def split_rows(reader: ProblemReader, hub_id: str | None, split: str, configs: Sequence[str | None]) -> Iterator[Row]:
    """The rows of a split in each of the configurations, one after another.

    A local folder has the configurations as subfolders, or the split's files directly in it.

    Raises:
        DataError: nothing to read; while iterating, a file cannot be read.
    """
    if reader.path is not None:
        folders = [reader.path / config for config in configs if config and (reader.path / config).is_dir()] or [
            reader.path
        ]
        for folder in folders:
            yield from read_folder(folder, split, None, reader.on_broken)
    elif hub_id is not None:
        for config in configs:
            yield from read_hub(hub_id, config, split)
    else:
        raise DataError(f"dataset {reader.name}: neither dataset.path nor dataset.hub_id is set; set one of them")


def all_rows(
    reader: ProblemReader, hub_id: str | None, hub_config: str | None, splits: Sequence[str], file_name: str
) -> Iterator[Row]:
    """All rows of a dataset whose split does not follow from where a row stands.

    A local path is a file, or a folder with the file `file_name` or with the splits' files, of which not all need be there.
    """
    path = reader.path
    if path is not None and path.is_file():
        yield from read_file(path, reader.on_broken)
    elif path is not None and (path / file_name).is_file():
        yield from read_file(path / file_name, reader.on_broken)
    else:
        if path is not None:
            folders = [path, path / hub_config, path / "data"] if hub_config else [path, path / "data"]
            present = [
                split
                for split in splits
                if any([*folder.glob(f"{split}*.jsonl"), *folder.glob(f"{split}*.parquet")] for folder in folders)
            ]
            splits = present or splits[:1]  # none: the reading says what it looked for
        for split in splits:
            yield from split_rows(reader, hub_id, split, [hub_config])


def hold_out(problems: Iterable[Numbered], fraction: float) -> tuple[list[Numbered], list[Numbered]]:
    """The problems to learn from and those held out: the share `fraction` with the smallest hash of the prompt, at least one.

    The choice does not depend on the order of the rows, and equal prompts stay together.

    Raises:
        DataError: `fraction` is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise DataError(f"dataset.test_fraction={fraction}: must be above 0 and below 1")
    hashed = [
        (hashlib.blake2b(item[1].prompt.encode("utf-8", "surrogatepass"), digest_size=16).digest(), item)
        for item in problems
    ]
    if not hashed:
        return [], []
    largest = sorted(key for key, _ in hashed)[max(1, round(fraction * len(hashed))) - 1]
    return [item for key, item in hashed if key > largest], [item for key, item in hashed if key <= largest]
