"""Reading and writing of the files in a run directory, safe against kill -9, and redaction of secrets."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, SupportsFloat

from cookbook.core.errors import CheckpointError

REDACTED = "***"

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of a used-up quota."""

SECRET_KEY = re.compile(
    r"(api|access|private|secret|signing|account)[_-]?key|secret|passw|passphrase|credential|authorization|bearer|cookie"
    r"|^(auth|token)$|(access|auth|refresh|api)token$|(?<!eos)(?<!bos)(?<!pad)(?<!unk)(?<!sep)(?<!mask)(?<!stop)[_-]token$",
    re.IGNORECASE,
)
URL_SECRET = re.compile(
    r"(?<=://)[^/\s@]+(?=@)|(?<=[?&])([^=&\s]*(?:key|token|secret|passw|signature)[^=&\s]*=)[^&\s]+", re.IGNORECASE
)
SHORTEST_SECRET = 8
"""Shorter values of secret environment variables are not redacted in text: they would match ordinary words."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block, such as a full disk, into one line about the file.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        advice = "free some space" if error.errno in FULL else "make it writable"
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}); {advice}, then continue with resume=auto, "
            "or choose another run_dir"
        ) from error


def write_atomically(path: Path, data: bytes | bytearray) -> None:
    """Write a file so that readers see either all of the old content or all of the new, even after a crash.

    Raises:
        CheckpointError: it cannot be written; the old content stays.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with writing(path):
            with unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a jsonl file and wait until they are on disk, so that no checkpoint precedes its metrics.

    Raises:
        CheckpointError: they cannot be written.
    """
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    with writing(path), path.open("ab") as file:
        file.write(lines.encode("ascii"))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a jsonl file; none if it does not exist. Skips an incomplete last line.

    Raises:
        CheckpointError: a line is not a JSON object with an integer `step`.
    """
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield parse_line(path, number, line)


def cut(path: Path, next_step: int) -> None:
    """Keep the lines of steps before `next_step` unchanged; drop later ones and an incomplete last line. Atomic.

    Raises:
        CheckpointError: see `read_lines`.
    """
    if next_step == 0:
        path.unlink(missing_ok=True)
    elif path.exists():
        kept = bytearray()
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n") and parse_line(path, number, line)["step"] < next_step:
                    kept += line
        write_atomically(path, kept)


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: line {number} is not JSON ({error}); fix or delete the line, then resume"
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise CheckpointError(f"{path}: line {number} has no integer `step`; fix or delete the line, then resume")
    return record


def plain_number(value: SupportsFloat) -> int | float | None:
    """A number that JSON can hold, without rounding: numpy scalars are unwrapped, NaN and infinities become None."""
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def plain(value: Any) -> int | float | str | None:
    """For `json.dumps(default=...)`: numpy scalars as numbers, everything else, such as a path, as text."""
    return plain_number(value) if isinstance(value, Real) else str(value)


def redact(value: Any) -> Any:
    """A copy of a configuration as plain dicts and lists, with `***` in place of secrets.

    Secrets are values under keys such as `api_key`, `password` or `hf_token` (but not `max_tokens` or `pad_token`),
    credentials in URLs, and the values of environment variables with such names, wherever they appear.
    """
    if isinstance(value, Mapping):
        return {
            str(key): REDACTED if inner is not None and SECRET_KEY.search(str(key)) else redact(inner)
            for key, inner in value.items()
        }
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [redact(inner) for inner in value]
    return value


def redact_text(text: str) -> str:
    """`text` without credentials in URLs and without the values of secret environment variables."""
    text = URL_SECRET.sub(lambda match: (match[1] or "") + REDACTED, text)
    for name, secret in os.environ.items():
        if len(secret) >= SHORTEST_SECRET and SECRET_KEY.search(name):
            text = text.replace(secret, REDACTED)
    return text
