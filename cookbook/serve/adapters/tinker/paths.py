"""The notation of checkpoints: `tinker://<model id>/weights|sampler_weights/<name>`."""

from __future__ import annotations

import re
from typing import get_args

from cookbook.serve.core.checkpoints import CheckpointKey, CheckpointKind
from cookbook.serve.core.errors import NotFound

SCHEME = "tinker://"

_PATH = re.compile(rf"{SCHEME}([^/]+)/({'|'.join(get_args(CheckpointKind))})/([^/]+)")


def format_path(key: CheckpointKey) -> str:
    return f"{SCHEME}{key}"


def parse_path(path: str) -> CheckpointKey:
    """Raises NotFound: it is not the path of a checkpoint."""
    match = _PATH.fullmatch(path)
    if match is None:
        raise NotFound(f"there is no checkpoint {path}; list the checkpoints to see which exist")
    model, kind, name = match.groups()
    return CheckpointKey(model, "weights" if kind == "weights" else "sampler_weights", name)
