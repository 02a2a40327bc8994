"""Several recipes in a row, each starting from the weights that the last one ended with.

The stages are YAML: a recipe, and what is different about it here. Model, adapter, backend, seed, logger, prices and budget
are those of the pipeline. Every stage is a run of its own in a folder of its own, so each can be resumed; a finished one is
not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cookbook.cli.build import build
from cookbook.cli.compose import compose_recipe
from cookbook.core.errors import CheckpointError
from cookbook.loops.common import CommonParts
from cookbook.loops.config import PipelineConfig, RunConfig, StageConfig
from cookbook.tracking import combine_runs
from cookbook.tracking.checkpoints import CheckpointLog


class Parts(CommonParts):
    """What this loop is built from: the service that all stages share, and a logger for each."""


def run(config: RunConfig, parts: Parts) -> None:
    """Run every stage that has not finished, then write one summary, one `metrics.jsonl` and one report over all of them.

    Raises:
        CookbookError: whatever a stage raises; what the finished ones left stays, and resuming goes on with the stage that failed.
    """
    pipeline: PipelineConfig = config.loop
    started = time.monotonic()
    summaries: dict[str, Mapping[str, Any]] = {}
    folders: list[Path] = []
    start_from = config.start_from

    for number, (name, stage) in enumerate(pipeline.stages.items(), start=1):
        folder = Path(config.run_dir) / f"{number}-{name}"
        # 1. The stage's recipe, with what the pipeline shares, beginning where the last stage ended.
        stage_config = _configure(config, stage, folder, start_from)

        # 2. Train, unless an earlier attempt has finished this stage.
        if _summary(folder).get("status") != "completed":
            folder.mkdir(parents=True, exist_ok=True)
            print(f"stage {number}/{len(pipeline.stages)}: {name} ({stage.recipe})", flush=True)
            loop, stage_parts = build(stage_config, parts.service)
            loop(stage_config, stage_parts)

        # 3. Hand on the weights.
        summaries[name] = _summary(folder)
        folders.append(folder)
        start_from = _final_weights(folder)

    combine_runs(
        Path(config.run_dir), folders, _combined(config, summaries, time.monotonic() - started), asdict(config)
    )


def _configure(config: RunConfig, stage: StageConfig, folder: Path, start_from: str | None) -> RunConfig:
    composed = compose_recipe(stage.recipe, config.scale, stage.groups, stage.settings)
    return replace(
        composed,
        recipe=stage.recipe,
        choices={**config.choices, **stage.groups},
        scale=config.scale,
        seed=config.seed,
        run_dir=str(folder),
        start_from=start_from,
        model=config.model,
        lora=config.lora,
        backend=config.backend,
        logger=config.logger,
        prices=config.prices,
        budget=config.budget,
    )


def _summary(folder: Path) -> dict[str, Any]:
    file = folder / "summary.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _final_weights(folder: Path) -> str:
    checkpoint = CheckpointLog(folder).latest()
    if checkpoint is None:
        raise CheckpointError(
            f"{folder}: this stage has finished but left no checkpoint; delete the folder to run it again"
        )
    return checkpoint.states["policy"]


def _combined(config: RunConfig, summaries: Mapping[str, Mapping[str, Any]], wall_s: float) -> dict[str, Any]:
    """The evaluations of the first stage before and the last one after, tokens and cost added up, and every stage's own."""
    stages: Sequence[Mapping[str, Any]] = list(summaries.values())
    tokens = {kind: sum(stage["tokens"][kind] for stage in stages) for kind in ("prefill", "sampled", "trained")}
    return {
        "status": "completed",
        "recipe": config.recipe,
        "scale": config.scale,
        "seed": config.seed,
        "backend": config.choices.get("backend", config.backend["_target_"]),
        "model": config.model.base_model,
        "steps": sum(stage["steps"] for stage in stages),
        "eval": {"before": stages[0]["eval"].get("before", {}), "after": stages[-1]["eval"].get("after", {})},
        "stages": {
            name: {"recipe": stage["recipe"], "steps": stage["steps"], "eval": stage["eval"]}
            for name, stage in summaries.items()
        },
        "tokens": tokens,
        "cost_usd": sum(stage["cost_usd"] for stage in stages),
        "wall_s": max(wall_s, sum(stage["wall_s"] for stage in stages)),
    }
