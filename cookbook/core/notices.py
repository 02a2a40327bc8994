"""Notices: lines that a component prints about itself when it is made, such as the isolation of a sandbox."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

VANISHING = "saves are in the temporary folder {}, which stop() deletes; to keep them, give the service a state_dir"
"""The warning of a backend that saves for a service without a folder."""

_logger = logging.getLogger("cookbook.core.notices")
_logger.setLevel(logging.INFO)


def notice(line: str) -> None:
    """Give one line. `cookbook.run` prints it; other programs see it as a log record of level INFO."""
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
