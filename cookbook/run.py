"""python -m cookbook.run recipe=gsm8k_grpo [group=option ...] [key=value ...]: compose, check, build, train."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

from cookbook.cli import flags, folders
from cookbook.cli.help import usage
from cookbook.cli.report import print_error
from cookbook.core import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status.

    0: all is done. 1: something went wrong; one line on stderr says what. 130: interrupted by Ctrl-C. 143: by SIGTERM.
    """
    with interrupts.handled():
        return _run(sys.argv[1:] if argv is None else argv)


def _run(argv: Sequence[str]) -> int:
    debug = False
    try:
        command = flags.parse(argv)
        debug = command.debug
        folders.use(command.config_dirs)
        if "--help" in command.flags:
            print(usage(), end="")
            return 0
        if "--version" in command.flags:
            print(f"cookbook {version('post-training-cookbook')}, Hydra {version('hydra-core')}")
            return 0
        from cookbook.cli.launch import launch  # imported here because --help needs none of it

        return launch(command)
    except KeyboardInterrupt as error:
        interrupted = interrupts.as_interrupted(error)
        print(f"interrupted{interrupted.advice}", file=sys.stderr)
        return interrupted.status
    except BrokenPipeError:
        from cookbook.tracking.console import OutputClosed, discard_stdout

        discard_stdout()
        print_error(OutputClosed())
        return 1
    except Exception as error:  # whatever it is, the user sees one line
        print_error(error, debug)
        return 1


if __name__ == "__main__":
    sys.exit(main())
