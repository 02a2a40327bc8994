"""Recipes from within a program or a notebook: `load_config`, `train`."""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cookbook.cli import folders, job, run_dir
from cookbook.cli.compose import compose_run
from cookbook.cli.options import chosen
from cookbook.loops.config import RunConfig

T = TypeVar("T")


def load_config(recipe: str, *overrides: str, config_dir: str | Path | None = None) -> RunConfig:
    """The configuration of a recipe.

    Args:
        recipe: its name, with the size where it is not the laptop's: "gsm8k_grpo/gpu".
        overrides: as on the command line: "optim.learning_rate=1e-3", "dataset=gsm8k".
        config_dir: a folder with options of your own; `./conf` is found without it.

    Raises:
        ConfigError: it does not compose.
    """
    folders.use([config_dir] if config_dir is not None else [])
    return compose_run([f"recipe={recipe}", *overrides])


def train(recipe: str, *overrides: str, config_dir: str | Path | None = None) -> dict[str, Any]:
    """Run a recipe; see `cookbook.train`. Returns what its `summary.json` holds, and `run_dir`.

    Works where an event loop is running, as in a notebook: training then happens in another thread.

    Raises:
        CookbookError: what is wrong with the configuration, or what stopped the run.
    """
    config = load_config(recipe, *overrides, config_dir=config_dir)
    given, place = chosen(overrides, "run_dir") is not None, Path(config.run_dir)
    chosen_place = run_dir.choose(place, given, config.resume)
    with run_dir.held(chosen_place.absolute(), new=not given and chosen_place == place) as folder:
        config = load_config(recipe, *overrides, f"run_dir={json.dumps(str(folder))}", config_dir=config_dir)
        _outside_event_loop(lambda: job.execute(config))
        return {**run_dir.read_summary(folder), "run_dir": config.run_dir}


def _outside_event_loop(function: Callable[[], T]) -> T:
    """Call a function that starts an event loop of its own, which a thread with a running one does not allow."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work, name="cookbook-train")
    thread.start()
    while not done.is_set():
        try:
            done.wait()
        except KeyboardInterrupt:  # interrupts are the main thread's; training has to end too
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )
    if errors:
        raise errors[0]
    return results[0]
