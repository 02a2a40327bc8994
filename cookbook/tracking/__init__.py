"""Tracking of a run: the files in its run directory, its lines on the console, and the loggers that were chosen.

A run directory holds:

    config.yaml                       the resolved configuration, written by `cookbook.cli`
    metrics.jsonl                     a line for each training step and each evaluation (`tracker`)
    rollouts.jsonl                    a line for each trajectory: prompt, completion, reward, status (`tracker`)
    checkpoints.jsonl, checkpoints/   a line for each checkpoint, and the saves of a local backend (`checkpoints`)
    console.log                       the lines of the console (`console`)
    summary.json                      how the run ended: status, evaluations, tokens, cost (`tracker`)
    reward.png, accuracy.png, ...     curves of the headline metrics (`plots`)
    report.html                       summary, curves, rollouts and configuration on one page (`report`)
    wandb/, tensorboard/              files of a logger (`loggers`)

`combined` makes one such record of several runs, `cost` counts tokens and checks the budget, and `records` reads and
writes the files.
"""

from cookbook.tracking.combined import combine_runs
from cookbook.tracking.loggers import Logger, NoLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from cookbook.tracking.records import redact, write_atomically
from cookbook.tracking.tracker import Tracker

__all__ = [
    "Logger",
    "NoLogger",
    "TensorBoardLogger",
    "Tracker",
    "TrackioLogger",
    "WandbLogger",
    "combine_runs",
    "redact",
    "write_atomically",
]
