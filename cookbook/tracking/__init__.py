"""What a run leaves behind: files in its run directory, lines on the console, and metrics in the loggers of choice."""

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
