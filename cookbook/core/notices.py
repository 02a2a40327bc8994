"""What components have to say of themselves when they are made, such as a sandbox of its isolation: the first lines of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_logger = logging.getLogger("cookbook.core.notices")
_logger.setLevel(logging.INFO)


def notice(line: str) -> None:
    """Say one line, once; shown by `cookbook.run`, and by logging where a program of one's own has it show INFO."""
    _logger.info("%s", line)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def collected() -> Iterator[list[str]]:
    """The notices given within the block."""
    handler = _Collector()
    _logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        _logger.removeHandler(handler)
