"""Readers of dataset files (JSONL, CSV, Parquet, saved datasets) and of the Hugging Face hub, row by row."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cookbook.core.errors import DataError
from cookbook.data.bad_rows import BadRow

Split = Literal["train", "test"]

Row = tuple[str, Mapping[str, Any] | BadRow]
"""Where a row is ("train.jsonl:3"), and its columns, or why it has none."""

EXTENSIONS = (".jsonl", ".jsonl.gz", ".csv", ".parquet")
"""File names that can be read. Where a folder has a split in several formats, the first of these is read."""

LARGEST_LINE = 1 << 30
"""Bytes of a line, after decompression. A longer one is refused instead of filling the memory."""


@dataclass(frozen=True)
class Location:
    """A local path or, where that is None, a dataset on the hub.

    Args:
        path: a file, or a folder with files of each split or of a saved dataset.
        hub_id: a dataset on the Hugging Face hub.
        hub_config: its configuration, where it has several.
        option: the option that `path` came from, for messages.

    Raises:
        DataError: both `path` and `hub_id` are None.
    """

    path: Path | None
    hub_id: str | None
    hub_config: str | None = None
    option: str = "dataset.path"

    def __post_init__(self) -> None:
        if self.path is None and self.hub_id is None:
            raise DataError("neither dataset.path nor dataset.hub_id is set; set one of them")

    @property
    def has_no_splits(self) -> bool:
        """Whether all rows are in one place: a file, or a `Dataset` that was saved without splits."""
        return self.path is not None and (self.path.is_file() or _is_saved_dataset(self.path))

    def read(self, split: str) -> Iterator[Row]:
        """The rows of a split, or all rows where there are no splits.

        Raises:
            DataError: no such path or split; while iterating, a file that cannot be read.
        """
        if self.path is None:
            assert self.hub_id is not None
            return read_hub(self.hub_id, self.hub_config, split)
        if self.path.is_file():
            return read_file(self.path, self.option)
        if not self.path.is_dir():
            raise DataError(f"{self.option}={self.path} does not exist; give a file or a folder of a dataset")
        if _is_saved_dataset(self.path):
            return read_saved(self.path)
        if (self.path / "dataset_dict.json").is_file():
            if not _is_saved_dataset(self.path / split):
                known = ", ".join(sorted(folder.name for folder in self.path.iterdir() if _is_saved_dataset(folder)))
                raise DataError(f"{self.option}={self.path} holds no {split} split; it has {known or 'none'}")
            return read_saved(self.path / split)
        return self._read_folder(self.path, split)

    def _read_folder(self, folder: Path, split: str) -> Iterator[Row]:
        places = [folder, *(folder / name for name in (self.hub_config, "data") if name)]
        for place in places:
            if files := split_files(place, split):
                return (row for file in files for row in read_file(file, self.option))
        raise DataError(
            f"{self.option}={folder} holds no {split} split: looked for "
            f"{', '.join(f'{split}*{extension}' for extension in EXTENSIONS)} "
            f"there and in {' and '.join(f'{place.name}/' for place in places[1:])}; "
            "name the files' splits in dataset.train_split and dataset.test_split, "
            "or set dataset.test_split=null to hold out rows of the training split"
        )


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of a split: `<split>.<extension>` or, where that is missing, all `<split>*.<extension>` by name."""
    for extension in EXTENSIONS:
        if (folder / f"{split}{extension}").is_file():
            return [folder / f"{split}{extension}"]
        if files := sorted(folder.glob(f"{split}*{extension}")):
            return files
    return []


def named_file(path: Path | None, name: str) -> Path | None:
    """The file `name` in the folder `path`, or `path` itself where there is no such file."""
    return path / name if path is not None and (path / name).is_file() else path


def read_file(file: Path, option: str = "dataset.path") -> Iterator[Row]:
    """The rows of one file. Its name says the format.

    Raises:
        DataError: another extension than one of `EXTENSIONS`; while iterating, a file that cannot be read.
    """
    if file.name.endswith((".jsonl", ".jsonl.gz")):
        return read_jsonl(file)
    if file.suffix == ".csv":
        return read_csv(file)
    if file.suffix == ".parquet":
        return read_parquet(file)
    raise DataError(f"{option}={file}: the file's name must end in {', '.join(EXTENSIONS)}")


def read_jsonl(file: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield f"{file}:{number}", _columns(line)


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LARGEST_LINE), b""), start=1):
                if len(line) == LARGEST_LINE:
                    raise DataError(
                        f"{file}:{number}: longer than {LARGEST_LINE >> 20} MiB; write one JSON object per line"
                    )
                yield line
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{file}: not readable: {type(error).__name__}: {error}") from error


def _columns(line: bytes) -> Mapping[str, Any] | BadRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow("broken JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of too many digits, nested too deeply
        return BadRow("broken JSON", f"{type(error).__name__}: {error}")
    return row if isinstance(row, dict) else BadRow("not a JSON object", f"a {type(row).__name__}")


def read_csv(file: Path) -> Iterator[Row]:
    """The rows below the header. All values are texts. A row of several lines is named by its last one."""
    csv.field_size_limit(LARGEST_LINE)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                fits = None not in row and None not in row.values()
                header = ", ".join(reader.fieldnames or ())
                yield f"{file}:{reader.line_num}", row if fits else BadRow("wrong number of columns", f"not {header}")
    except (csv.Error, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not readable as CSV: {type(error).__name__}: {error}") from error


def read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{file} row {number}", without_padding(row)


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def read_saved(folder: Path) -> Iterator[Row]:
    """The rows of a `Dataset` that `save_to_disk` wrote."""
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = " ".join(str(error).split())[:200]
        raise DataError(f"{folder}: not a readable saved dataset: {type(error).__name__}: {cause}") from error
    for number, row in enumerate(dataset, start=1):
        yield f"{folder} row {number}", without_padding(dict(row))


def read_hub(hub_id: str, hub_config: str | None, split: str) -> Iterator[Row]:
    """The rows of a dataset on the Hugging Face hub, or in its local cache.

    Raises:
        DataError: it cannot be loaded, or has no such split.
    """
    # Imported here: it takes a second, and local files do not need it.
    from datasets import load_dataset

    try:
        dataset = load_dataset(hub_id, hub_config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        cause = " ".join(str(error).split())[:200]
        raise DataError(
            f"dataset {hub_id} ({split}) could not be loaded from the Hugging Face hub: "
            f"{type(error).__name__}: {cause}; "
            "check the network and dataset.hub_id, or set dataset.path to a local copy"
        ) from error
    for number, row in enumerate(dataset, start=1):
        yield f"{hub_id} {split} row {number}", without_padding(dict(row))


def without_padding(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of an Arrow table without the nulls inside its columns.

    Arrow gives every object in a column the fields of all others and fills them with null: the field is missing.
    """
    return {column: _unpadded(value) for column, value in row.items()}


def _unpadded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unpadded(inner) for key, inner in value.items() if inner is not None}
    return [_unpadded(inner) for inner in value] if isinstance(value, list) else value
