"""The fingerprint of a dataset: what a resumed run compares to tell whether its data changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from cookbook.core.errors import CheckpointError

SPLITS = ("train", "test")

ROWS_OF_LAZY_SPLITS = 100
"""How many rows are read of a split that makes its rows when they are asked for."""

Fingerprint = dict[str, dict[str, Any]]
"""Of each split the number of rows, and hashes of the rows' ids and of their content. Plain JSON."""


def fingerprint(dataset: object) -> Fingerprint:
    """The fingerprint of the splits that a dataset has.

    All rows of a list are hashed, and some, evenly spaced, of a split that makes its rows when they are asked for.
    """
    return {name: _split(rows) for name in SPLITS if isinstance(rows := getattr(dataset, name, None), Sequence)}


def compare(before: Fingerprint, now: Fingerprint) -> list[str]:
    """What changed in a way that leaves the order of the training rows as it was, one line for each split.

    Raises:
        CheckpointError: the training rows are others or in another order, so the run cannot go on as it would have.
    """
    warnings = []
    for name in SPLITS:
        old, new = before.get(name), now.get(name)
        if old == new or old is None or new is None:
            continue
        if name == "train" and (old["rows"], old["ids"]) != (new["rows"], new["ids"]):
            raise CheckpointError(
                f"dataset: its train split has changed since this run was saved ({old['rows']} rows then, "
                f"{new['rows']} now), so the order of the rows would be another; restore the data, or start a new run"
            )
        warnings.append(
            f"warning: the {name} split of the dataset has changed since this run was saved ({old['rows']} rows then, "
            f"{new['rows']} now); results are not those of an uninterrupted run"
        )
    return warnings


def _split(rows: Sequence[Any]) -> dict[str, Any]:
    step = 1 if isinstance(rows, list | tuple) else max(1, len(rows) // ROWS_OF_LAZY_SPLITS)
    ids, content = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for index in range(0, len(rows), step):
        row = rows[index]
        ids.update(f"{getattr(row, 'id', index)}\n".encode("utf-8", "surrogatepass"))
        content.update(json.dumps(row, default=_plain, skipkeys=True).encode("ascii") + b"\n")
    return {"rows": len(rows), "ids": ids.hexdigest(), "content": content.hexdigest()}


def _plain(value: object) -> object:
    """For `json.dumps`: what it does not know, without anything that differs between processes or places."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.name != "source"}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, bytes):
        return value.hex()
    return type(value).__qualname__
