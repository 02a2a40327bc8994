"""A command line, from composition to the exit status: one run, a sweep, or what a flag asks to see."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from cookbook.cli import environment, folders, hydra_api, optuna_sweeper, sweep
from cookbook.cli.explain import COMPOSITION_ERRORS, check_groups, explain
from cookbook.cli.flags import Command
from cookbook.cli.job import Job, JobFailed
from cookbook.cli.report import print_error
from cookbook.cli.saved import with_saved_recipe
from cookbook.cli.schema import register_schemas


def launch(command: Command) -> int:
    """Let Hydra compose one configuration, or each of a sweep, and run it. Returns the exit status.

    Raises:
        ConfigError: the command line does not compose.
    """
    check_groups(command.overrides)
    register_schemas()
    environment.remember(command.arguments)
    overrides = with_saved_recipe(command.overrides)
    optuna_sweeper.register()
    failure = None
    # Hydra gives each job of a sweep a folder. Only the outcomes in it matter, because a run has a folder of its own.
    with tempfile.TemporaryDirectory(prefix="cookbook-sweep-") as scratch:
        arguments = [f"hydra.sweep.dir={scratch}", *folders.search_override(), *overrides]
        try:
            job = Job(Path.cwd(), tuple(folders.own()))
            hydra_api.run_command_line(job, [*command.hydra_flags(), *arguments])
        except COMPOSITION_ERRORS as error:
            raise explain(error, overrides) from error
        except JobFailed as error:
            failure = error
        except SystemExit as done:  # after printing what a flag asked for
            return done.code if isinstance(done.code, int) else 0
        outcomes = sweep.read_outcomes(Path(scratch))

    if len(outcomes) > 1:
        sweep.print_table(outcomes)
    failures = [
        f"failed: {settings}: {outcome.error}"
        for settings, outcome in zip(sweep.differing_settings(outcomes), outcomes, strict=True)
        if outcome.status == "failed"
    ]
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    if failure is not None and not failures:
        print_error(failure)
    return 1 if failure or failures else 0
