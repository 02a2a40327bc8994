"""Calls of Hydra that both the command line and programs make: compose a configuration, run a command line."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import TaskFunction
from omegaconf import DictConfig

from cookbook.cli import folders

VERSION_BASE = "1.3"


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration that `overrides` make, with Hydra's own part under `hydra`. Works within a Hydra program too.

    Raises:
        HydraException, OmegaConfBaseException, YAMLError: what is wrong with them; see `cookbook.cli.explain`.
    """
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(folders.CONF), version_base=VERSION_BASE):
            return hydra.compose("config", [*folders.search_override(), *overrides], return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = outer


def run_command_line(job: TaskFunction, arguments: Sequence[str]) -> None:
    """Have Hydra run `job` with what a command line composes, or print what it asks to see.

    Raises:
        Exception: what composing raised, or `job`; in a sweep that of the first job that failed.
    """
    with _process(arguments), redirect_stderr(_Stderr(sys.stderr)):
        hydra.main(version_base=VERSION_BASE, config_path=str(folders.CONF), config_name="config")(job)()


@contextmanager
def _process(arguments: Sequence[str]) -> Iterator[None]:
    """`hydra.main` reads sys.argv and nothing else, and exits with a message of its own unless told to raise errors.

    It also configures the root logger. All of that is as before at the end.
    """
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    handlers, level = list(logging.root.handlers), logging.root.level
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


class _Stderr(io.TextIOBase):
    """stderr without the line with which Hydra announces that a job failed: its error follows in a line of ours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if text.startswith("Error executing job with overrides:"):
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
