"""python -m cookbook.run recipe=gsm8k_grpo [group=option ...] [key=value ...]: compose, validate, build, train."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cookbook.cli import run_dir, sweep
from cookbook.cli.build import build
from cookbook.cli.compose import (
    BASE_SCALE,
    CONF,
    check_groups,
    chosen,
    explain,
    scale_override,
    scales,
    to_object,
)
from cookbook.cli.help import usage
from cookbook.cli.sweep import Outcome
from cookbook.core import notices
from cookbook.core.errors import ConfigError, CookbookError
from cookbook.core.suggest import did_you_mean
from cookbook.loops.config import RunConfig, register_schemas


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status.

    0: all is done. 1: something went wrong; one line on stderr says what. 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = (
        "--debug" in arguments or chosen(arguments, "debug") == "true" or chosen(arguments, "hydra.verbose") == "true"
    )
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        if {"--help", "-h"} & {*arguments}:
            print(usage(), end="")
            return 0
        return _run_all(arguments, debug)
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{interrupt}", file=sys.stderr)
        return 130
    except Exception as error:  # the last line of defence: whatever it is, the user sees one line
        _report(error, debug)
        return 1


def _run_all(arguments: list[str], debug: bool) -> int:
    """Let Hydra compose one configuration, or each of a sweep, and run it."""
    flags, overrides = _split(arguments)
    check_groups(overrides)
    outcomes: list[Outcome] = []

    # Hydra writes down each sweep in a file of its own, which nobody needs beside the runs' own records.
    with tempfile.TemporaryDirectory(prefix="cookbook-sweep-") as scratch:
        command = [*flags, f"hydra.sweep.dir={scratch}", *overrides, *scale_override(overrides)]

        @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
        def job(config: DictConfig) -> None:
            outcomes.append(_run_job(config, len(outcomes), debug))

        register_schemas()
        try:
            with _hydra_process(command):
                job()
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise explain(error, command) from error

    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if len(outcomes) > 1:
        sweep.print_table(outcomes)
        for outcome in failed:
            print(f"failed: {' '.join(outcome.settings)}: {_one_line(outcome.error)}", file=sys.stderr)
    return 1 if failed else 0


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags, and the overrides, in whatever order they were given. Raises ConfigError for an unknown flag."""
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        known, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; --help lists the flags") from error
    for flag in rest:
        if flag.startswith("-"):
            flags = [name for action in parser._actions for name in action.option_strings]
            raise ConfigError(f"{flag}: there is no such flag{did_you_mean(flag, flags)}; --help lists them")
    overrides = [*known.overrides, *rest]
    return [argument for argument in arguments if argument not in overrides], overrides


def _run_job(config: DictConfig, index: int, debug: bool) -> Outcome:
    """Run one composed configuration. In a sweep a failing job does not stop the others, so errors are reported here."""
    info = HydraConfig.get()
    overrides: list[str] = OmegaConf.to_container(info.overrides.task, resolve=False)  # pyright: ignore[reportAssignmentType]
    in_sweep = info.mode == RunMode.MULTIRUN
    settings = sweep.job_settings(overrides)
    folder = None
    try:
        if in_sweep:
            print(f"job {index + 1}: {' '.join(settings)}", flush=True)
        folder = _choose_folder(config, overrides, in_sweep)
        config.run_dir = str(folder)
        run_config: RunConfig = to_object(config)
        run_config.choices = {
            group: option for group, option in info.runtime.choices.items() if option and "/" not in group
        }
        finished = _run(run_config, dict(info.runtime.choices))
        return Outcome(settings, folder, "skipped" if finished else "completed")
    except KeyboardInterrupt:
        again = (
            f"; to go on, repeat the command with run_dir={folder} resume=auto"
            if folder is not None and not in_sweep
            else ""
        )
        raise KeyboardInterrupt(again or "; repeat the command to go on") from None
    except Exception as error:
        _report(error, debug)
        return Outcome(settings, folder, "failed", error)


def _choose_folder(config: DictConfig, overrides: Sequence[str], in_sweep: bool) -> Path:
    given = chosen(overrides, "run_dir") is not None
    folder, resume = Path(config.run_dir), config.resume
    if in_sweep:
        parent = folder if given else folder.parent / "sweep"
        folder, given = parent / sweep.job_name(overrides), True
        resume = chosen(overrides, "resume") or "auto"
    return run_dir.choose(folder, given, resume).absolute()


def _run(config: RunConfig, choices: dict[str, str]) -> bool:
    """Train. Returns True where the run in `config.run_dir` had completed before, and nothing was left to do."""
    if config.scale != BASE_SCALE and choices.get(f"scale/{config.recipe}") != config.scale:
        raise ConfigError(
            f"scale={config.scale}: its values were not loaded; give recipe=NAME scale={config.scale} on the command line"
        )
    if run_dir.is_finished(config):
        print(f"{config.run_dir}: this run has completed; nothing to do")
        return True
    with notices.collected() as said:
        loop, parts = build(config)
    try:
        next_step = run_dir.claim(config)
        _announce(config, choices, next_step, said)
        loop(config, parts)
    finally:
        parts.service.stop()
    return False


def _announce(config: RunConfig, choices: dict[str, str], next_step: int, said: Sequence[str]) -> None:
    """The first lines of a run, on the console and in its log."""
    dataset = choices["dataset"] or "of each stage"
    others = [scale for scale in scales(config.recipe) if scale != config.scale]
    lines = [
        f"{config.recipe} at scale={config.scale}" + (f" (others: {', '.join(others)})" if others else ""),
        f"backend {choices['backend']}, model {config.model.base_model}, dataset {dataset}, seed {config.seed}",
        *said,
        f"{f'going on at step {next_step + 1}' if next_step else 'writing'} in {config.run_dir}",
    ]
    print("\n".join(lines), flush=True)
    with Path(config.run_dir, "console.log").open("a", encoding="utf-8") as log:
        log.writelines(f"{line}\n" for line in lines)


def _report(error: Exception, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    print(f"error: {_one_line(error)}", file=sys.stderr)


def _one_line(error: Exception | None) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, CookbookError):
        return text
    return f"unexpected {type(error).__name__}: {text} (rerun with debug=true for the traceback)"


@contextmanager
def _hydra_process(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads its command line from sys.argv, and prints errors itself unless it is told to raise them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


if __name__ == "__main__":
    sys.exit(main())
