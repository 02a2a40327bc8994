"""The command `cookbook`: its subcommands. Each is imported when it is called, so that the others answer at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from cookbook.core.suggest import did_you_mean


@dataclass(frozen=True)
class Command:
    """A subcommand: `module` has `main(arguments) -> exit status`."""

    module: str
    summary: str


COMMANDS = {
    "run": Command("cookbook.run", "train: cookbook run recipe=NAME [group=option ...] [key=value ...]"),
    "serve": Command("cookbook.serve.__main__", "serve base models and their adapters over HTTP"),
    "help": Command("cookbook.cli.help", "what a command, a recipe or a group of options does: cookbook help [NAME]"),
    "completion": Command("cookbook.cli.completion", 'completion for the shell: eval "$(cookbook completion bash)"'),
}


def usage() -> str:
    """The commands, one a line."""
    lines = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: cookbook COMMAND ...", "", *lines, "", "cookbook COMMAND --help says more; cookbook --version"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status.

    That of the subcommand; 2 where there is no such subcommand, with one line on stderr.
    """
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name == "--version":
        print(f"cookbook {version('post-training-cookbook')}")
        return 0
    if name not in COMMANDS:
        print(_unknown(name, arguments) if name else usage(), file=sys.stderr)
        return 2
    try:
        status = importlib.import_module(COMMANDS[name].module).main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output wants no more of it, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _unknown(name: str, arguments: Sequence[str]) -> str:
    if "=" in name or name == "-m":
        return f"error: {name}: is not a command; to train, use cookbook run {' '.join([name, *arguments])}"
    return f"error: {name}: there is no such command{did_you_mean(name, COMMANDS)}; there are {', '.join(COMMANDS)}"
