"""The console of a run: plain lines, and a progress bar below them if stdout is a terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from cookbook.tracking.records import redact_text

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class RunConsole:
    """Prints lines and appends them to `path`. Text is never markup; control characters are escaped."""

    def __init__(self, path: Path, total_steps: int, next_step: int) -> None:
        self._path = path
        self._console = Console(file=sys.stdout, highlight=False)
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

    def say(self, text: str) -> None:
        line = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", redact_text(text))
        encoding = self._console.encoding
        shown = line.encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(Text(shown), soft_wrap=True)
        with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line + "\n")
