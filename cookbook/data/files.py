"""Rows of JSONL and Parquet files and of Hugging Face datasets, each with the place where it stands."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from cookbook.core.errors import DataError

Split = Literal["train", "test"]

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands ("train.jsonl:3"), and its columns."""

OnBroken = Callable[[str, DataError], None]
"""What to do about a line that is no JSON object: called with its place and the error, after which the reading goes on."""

LARGEST_LINE = 1 << 30
"""Bytes of a line, after decompression. More is taken for a fault (or a trap), not for data."""


def read_folder(folder: Path, split: str, hub_config: str | None, on_broken: OnBroken | None = None) -> Iterator[Row]:
    """The rows of `<split>.jsonl` or `<split>*.parquet`, in the folder itself or in its subfolder `<hub_config>` or `data`.

    A line that is no JSON object ends the reading with an error, or goes to `on_broken` where that is given.

    Raises:
        DataError: no such folder, or no such split in it; while iterating, a file or a line that cannot be read.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(
            f"dataset.path={folder} {what}; give a folder with train.jsonl and test.jsonl, or Parquet files"
        )
    places = [folder, *(folder / name for name in (hub_config, "data") if name)]
    for place in places:
        if (place / f"{split}.jsonl").is_file():
            return read_jsonl(place / f"{split}.jsonl", on_broken)
        if files := sorted(place.glob(f"{split}*.parquet")):
            return (row for file in files for row in read_parquet(file))
    raise DataError(
        f"dataset.path={folder} holds no {split} split: looked for {split}.jsonl and {split}*.parquet "
        f"there and in {' and '.join(f'{place.name}/' for place in places[1:])}"
    )


def read_file(file: Path, on_broken: OnBroken | None = None) -> Iterator[Row]:
    """The rows of one file, which its name says to be JSONL, JSONL compressed by gzip, or Parquet. `on_broken` as in `read_folder`.

    Raises:
        DataError: neither `.jsonl`, `.jsonl.gz` nor `.parquet`; while iterating, a line or the file cannot be read.
    """
    if file.name.endswith((".jsonl", ".jsonl.gz")):
        return read_jsonl(file, on_broken)
    if file.suffix == ".parquet":
        return read_parquet(file)
    raise DataError(f"dataset.path={file}: the file's name must end in .jsonl or .parquet (or .jsonl.gz)")


def read_jsonl(file: Path, on_broken: OnBroken | None = None) -> Iterator[Row]:
    for number, line in enumerate(_lines(file), start=1):
        where = f"{file}:{number}"
        if not line.strip():
            continue
        try:
            yield where, _row(where, line)
        except DataError as error:
            if on_broken is None:
                raise
            on_broken(where, error)


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LARGEST_LINE), b""), start=1):
                if len(line) == LARGEST_LINE:
                    raise DataError(
                        f"{file}:{number}: longer than {LARGEST_LINE >> 20} MiB; split the file into one JSON object per line"
                    )
                yield line
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{file}: not readable: {type(error).__name__}: {error}") from error


def _row(where: str, line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise DataError(
            f"{where}: not valid JSON: {problem} at column {error.colno}; mend or delete the line"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, an endless number, nested too deeply
        raise DataError(
            f"{where}: not readable as JSON ({type(error).__name__}: {error}); mend or delete the line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__} where an object with the row's columns belongs")
    return row


def read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{file} row {number}", row


def read_hub(hub_id: str, hub_config: str | None, split: str) -> Iterator[Row]:
    """The rows of a dataset on the Hugging Face hub, or in its local cache.

    Raises:
        DataError: it cannot be loaded, or has no such split.
    """
    # Imported here: it takes a second, and a local folder of JSONL needs nothing of it.
    from datasets import load_dataset

    try:
        dataset = load_dataset(hub_id, hub_config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"dataset {hub_id} ({split}) could not be loaded from the Hugging Face hub: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; check the network and dataset.hub_id, or set dataset.path to a local folder"
        ) from error
    for number, row in enumerate(dataset, start=1):
        yield f"{hub_id} {split} row {number}", dict(row)
