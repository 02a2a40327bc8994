"""The console of a run: plain lines, and a progress bar below them if stdout is a terminal."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from cookbook.core.errors import CookbookError
from cookbook.tracking.records import redact_text, writing

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class OutputClosed(CookbookError):
    """The reader of stdout is gone, as after `| head`."""

    def __init__(self) -> None:
        super().__init__("stdout: its reader is gone (as after | head), so the run stopped; continue with resume=auto")


class RunConsole:
    """Prints lines and appends them to `path`. Text is never markup; control characters are escaped.

    Where the reader of stdout is gone, as after `| head`, `closed` is set, and lines go to `path` alone.
    """

    def __init__(self, path: Path, total_steps: int, next_step: int) -> None:
        self._path = path
        self.closed = False
        self._console = _Console(file=sys.stdout, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=next_step)

    def start_bar(self) -> None:
        self._progress.start()

    def stop_bar(self) -> None:
        self._progress.stop()

    def update_bar(self, steps_done: int, description: str) -> None:
        self._progress.update(self._task, completed=steps_done, description=description)

    def set_total_steps(self, total_steps: int) -> None:
        self._progress.update(self._task, total=total_steps)

    def say(self, text: str) -> None:
        line = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", redact_text(text))
        with writing(self._path), self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line + "\n")
        encoding = self._console.encoding
        shown = line.encode(encoding, "backslashreplace").decode(encoding)
        try:
            self._console.print(Text(shown), soft_wrap=True)
        except BrokenPipeError:
            self.closed = True
            discard_stdout()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process."""
        raise  # the BrokenPipeError that is being handled


def discard_stdout() -> None:
    """Let further output go nowhere, so that the interpreter can exit without complaint."""
    with suppress(OSError):  # a replaced stdout without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
