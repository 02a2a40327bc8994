"""Base classes of the datasets that are read from files or the Hugging Face hub.

A dataset class is a dataclass: it inherits the options, adds its own as fields, and says in `parse` how a row becomes
an item. Reading, splits, sizes, bad rows and errors are here, once for all kinds of datasets.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Conversation, Example, LabelledCompletion, PreferencePair
from cookbook.data.bad_rows import BadRow, BadRows
from cookbook.data.files import Location, Row

T = TypeVar("T", bound=Example | Conversation | PreferencePair | LabelledCompletion)

Numbered = tuple[int, T]
"""An item without its id, and the number of its row, counted from 0 with the rows that are skipped or left out."""

OnBadRow = Literal["skip", "fail"]


@dataclass(kw_only=True, eq=False, repr=False)
class RowDataset(ABC, Generic[T]):
    """A dataset made from rows, all read when it is created.

    Args:
        name: Prefix of the items' ids: `<name>/<split>/<row>`.
        path: Local files to read; `~` is the home folder.
        on_bad_row: "skip" counts a row that cannot be used in `bad_rows`, "fail" stops at the first.
        train_size: Keep only the first items of `train`; None keeps all.
        test_size: The same for `test`.

    Attributes:
        train: The items to train on.
        test: The held-out items.
        bad_rows: The rows that were skipped, by reason, with their places.
        left_out: How many good rows a filter of the dataset left out.

    Raises:
        DataError: nothing to read, a file that cannot be read, a bad row where `on_bad_row` is "fail", or a split with
            no items or fewer than its size. The message names the file and line, or the option.
    """

    kind: ClassVar[str]
    """One of `cookbook.core.kinds.DATASET_KINDS`."""

    name: str
    path: str | None = None
    on_bad_row: OnBadRow = "skip"
    train_size: int | None = None
    test_size: int | None = None

    def __post_init__(self) -> None:
        if self.on_bad_row not in ("skip", "fail"):
            raise DataError(f"dataset.on_bad_row={self.on_bad_row}: must be skip (count the row and go on) or fail")
        for option, size in (("train_size", self.train_size), ("test_size", self.test_size)):
            if size is not None and size < 1:
                raise DataError(f"dataset.{option}={size}: must be at least 1, or null for all rows")
        self.bad_rows = BadRows()
        self.left_out = 0
        self.train: Sequence[T] = []
        self.test: Sequence[T] = []
        self.load()

    @abstractmethod
    def parse(self, row: Mapping[str, Any], place: str) -> T | None:
        """The item of a row, with an empty id; None leaves the row out.

        Args:
            row: its columns.
            place: where it is ("train.jsonl:3").

        Raises:
            BadRow: the row cannot be used.
        """

    @abstractmethod
    def load(self) -> None:
        """Set `train` and `test`, with the help of `items` and `take`."""

    @property
    def local(self) -> Path | None:
        return None if self.path is None else Path(self.path).expanduser()

    def items(self, rows: Iterable[Row], split: str = "train") -> Iterator[Numbered[T]]:
        """The items of the good rows, one by one. Bad rows are counted as rows of `split`, or stop the reading."""
        for index, (where, row) in enumerate(rows):
            place = self._short(where)
            try:
                if isinstance(row, BadRow):
                    raise row
                item = self.parse(row, place)
            except BadRow as error:
                if self.on_bad_row == "fail":
                    raise DataError(f"{where}: {error}; fix the row, or set dataset.on_bad_row=skip") from error
                self.bad_rows.add(error, place, split)
                continue
            if item is None:
                self.left_out += 1
            else:
                yield index, item if item.source else replace(item, source=place)

    def take(self, split: str, items: Iterable[Numbered[T]], size: int | None) -> list[T]:
        """The first `size` items, with their ids. No further row is read.

        Raises:
            DataError: there are none, or fewer than `size`.
        """
        taken = self.with_ids(split, islice(items, size))
        if len(taken) < (size or 1):
            option = f"dataset.{split}_size"
            wanted = "at least one is needed" if size is None else f"{option}={size} asks for more; null takes all"
            left_out = f", {self.left_out} left out by the dataset's filters" if self.left_out else ""
            raise DataError(
                f"dataset {self.name}: {len(taken)} usable rows in the {split} split "
                f"({self.bad_rows}{left_out}); {wanted}"
            )
        return taken

    def with_ids(self, split: str, items: Iterable[Numbered[T]]) -> list[T]:
        return [replace(item, id=f"{self.name}/{split}/{index}") for index, item in items]

    def _short(self, where: str) -> str:
        """A place relative to the dataset's path."""
        return where if self.local is None else _relative(where, self.local)


@dataclass(kw_only=True, eq=False, repr=False)
class Source(RowDataset[T]):
    """A dataset whose rows are in splits: on the hub, in local files, or in one place from which a part is held out.

    A local folder has `train.jsonl` and `test.jsonl`, or `train*` and `test*` files (.jsonl, .jsonl.gz, .csv,
    .parquet), in itself or, as on the hub, in its subfolder `<hub_config>` or `data`; or `save_to_disk` wrote it. A
    file, or a saved dataset without splits, is split by `test_fraction`.

    Args:
        hub_id: Dataset on the Hugging Face hub, read when `path` is None.
        hub_config: Its configuration, where it has several.
        train_split: Name of the split to train on, on the hub or as the beginning of the files' names.
        test_split: Name of the held-out split. None: there is none, and `test_fraction` of `train_split` is held out.
        test_fraction: Share of the rows to hold out where there is no held-out split, at least one. A hash of the
            content decides, so the order of the rows does not matter, and rows with equal content (or equal prompts)
            stay together.
        test_path: Local files to read the held-out split from, instead of the place of the training split.
        test_hub_id: The same on the hub.
        test_hub_config: The configuration of `test_hub_id`.

    The other options and the errors are those of `RowDataset`.
    """

    hub_id: str | None = None
    hub_config: str | None = None
    train_split: str = "train"
    test_split: str | None = "test"
    test_fraction: float = 0.05
    test_path: str | None = None
    test_hub_id: str | None = None
    test_hub_config: str | None = None

    def load(self) -> None:
        train, test = self.splits()
        self.train = self.take("train", train, self.train_size)
        self.test = self.take("test", test, self.test_size)

    def splits(self) -> tuple[Iterable[Numbered[T]], Iterable[Numbered[T]]]:
        """The items to train on and the held-out ones."""
        check_fraction(self.test_fraction)
        train = test = Location(self.local, self.hub_id, self.hub_config)
        separate = self.test_path is not None or self.test_hub_id is not None
        if separate:
            path = None if self.test_path is None else Path(self.test_path).expanduser()
            test = Location(path, self.test_hub_id, self.test_hub_config, "dataset.test_path")
            if self.test_split is None:
                raise DataError("dataset.test_split=null: name the split of the separate evaluation set")
        elif self.test_split is None or train.has_no_splits:
            return hold_out(self.items(train.read(self.train_split)), self.test_fraction)
        return self.items(train.read(self.train_split)), self.items(test.read(self.test_split or ""), "test")

    def _short(self, where: str) -> str:
        place = super()._short(where)
        return place if self.test_path is None else _relative(place, Path(self.test_path).expanduser())


def _relative(where: str, path: Path) -> str:
    return where.removeprefix(f"{path}/").removeprefix(f"{path.parent}/")


def check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise DataError(f"dataset.test_fraction={fraction}: must be above 0 and below 1")


def hold_out(items: Iterable[Numbered[T]], fraction: float) -> tuple[list[Numbered[T]], list[Numbered[T]]]:
    """The items to train on and those held out: the share `fraction` with the smallest hashes, at least one."""
    hashed = [(_content_hash(item), (index, item)) for index, item in items]
    if not hashed:
        return [], []
    largest = sorted(key for key, _ in hashed)[max(1, round(fraction * len(hashed))) - 1]
    return [item for key, item in hashed if key > largest], [item for key, item in hashed if key <= largest]


def _content_hash(item: Example | Conversation | PreferencePair | LabelledCompletion) -> bytes:
    """Of the prompt, or of the whole conversation: items with the same one belong to the same split."""
    if isinstance(item, Example):
        content = "\n".join(message["content"] for message in item.messages)
    else:
        messages = item.messages if isinstance(item, Conversation) else item.prompt
        content = json.dumps(messages, sort_keys=True, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()
