"""Post-training recipes: one loop, any compute. `train` and `load_config` run them from programs and notebooks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from cookbook.loops.config import RunConfig

__all__ = ["load_config", "train"]

# OpenMP's threads spin while they wait for one another, which on a busy machine takes the processor from the threads
# they wait for: a training step took 49 s instead of 4 s beside four other processes on two cores. Torch reads this
# when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def load_config(recipe: str, *overrides: str, config_dir: str | Path | None = None) -> RunConfig:
    """The typed configuration of a recipe.

    Args:
        recipe: its name, with its size where that is not the laptop's: "gsm8k_grpo", "gsm8k_grpo/gpu".
        overrides: as on the command line: "optim.learning_rate=1e-3", "dataset=gsm8k".
        config_dir: a folder with options of your own; `./conf` is used without being named.

    Raises:
        ConfigError: what is wrong with the configuration, in one line.
    """
    from cookbook.cli import programs  # loads Hydra

    return programs.load_config(recipe, *overrides, config_dir=config_dir)


def train(recipe: str, *overrides: str, config_dir: str | Path | None = None) -> dict[str, Any]:
    """Run a recipe, also where an event loop is running, as in a notebook. Arguments as those of `load_config`.

    Returns:
        What the run's `summary.json` holds, and `run_dir`: the folder with everything else.

    Raises:
        CookbookError: what is wrong with the configuration, or what stopped the run, in one line.
    """
    from cookbook.cli import programs  # loads Hydra

    return programs.train(recipe, *overrides, config_dir=config_dir)
