"""Several recipes in a row, each starting from the weights that the last one ended with.

The stages are YAML: a recipe, and what is different about it here. Model, adapter, backend, seed, logger, prices and
budget are those of the pipeline. Every stage is a run of its own in a folder of its own, so each can be resumed; a
finished one is not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cookbook.cli.build import build, check
from cookbook.cli.compose import compose_run
from cookbook.cli.run_dir import read_summary
from cookbook.cli.schema import PipelineConfig, StageConfig
from cookbook.core.errors import CheckpointError
from cookbook.loops.common import CommonComponents
from cookbook.loops.config import RunConfig
from cookbook.tracking import combine_runs
from cookbook.tracking.checkpoints import CheckpointLog

SHARED_GROUPS = ("model", "backend", "logger")
"""Groups whose option is that of the pipeline in every stage."""


class Components(CommonComponents):
    """What this loop is built from: the service that all stages share, and a logger for each."""


def run(config: RunConfig, components: Components) -> float | None:
    """Run every stage that has not finished, then write one summary, one `metrics.jsonl` and one report over all.

    Returns the headline metric of the last stage; None where an earlier call has finished it.

    Raises:
        CookbookError: whatever a stage raises; the record says so, what the finished ones left stays, and resuming
            continues with the stage that failed.
    """
    pipeline: PipelineConfig = config.loop
    started = time.monotonic()
    summaries: dict[str, Mapping[str, Any]] = {}
    folders: list[Path] = []
    start_from, metric = config.start_from, None

    # 1. The recipe of every stage, with what the pipeline shares. All of them are checked before the first one runs.
    stages = {
        name: _configure(config, stage, Path(config.run_dir) / f"{number}-{name}")
        for number, (name, stage) in enumerate(pipeline.stages.items(), start=1)
    }
    for stage in stages.values():
        check(stage, components.service.capabilities)

    for number, (name, stage) in enumerate(stages.items(), start=1):
        folder = Path(stage.run_dir)
        # 2. Train from where the last stage ended, unless an earlier attempt has finished this one.
        if read_summary(folder).get("status") != "completed":
            folder.mkdir(parents=True, exist_ok=True)
            print(f"stage {number}/{len(stages)}: {name} ({stage.recipe})", flush=True)
            stage = replace(stage, start_from=start_from)
            loop, stage_components = build(stage, components.service)
            try:
                metric = loop(stage, stage_components)
            except BaseException:
                summaries[name] = read_summary(folder)
                if summaries[name]:  # the stage has ended, with a record of how
                    _combine(config, summaries, [*folders, folder], started)
                raise

        # 3. Hand on the weights.
        summaries[name] = read_summary(folder)
        folders.append(folder)
        start_from = _final_weights(folder)

    _combine(config, summaries, folders, started)
    return metric


def _combine(
    config: RunConfig, summaries: Mapping[str, Mapping[str, Any]], folders: Sequence[Path], started: float
) -> None:
    """One record over the stages so far."""
    summary = _combined(config, summaries, time.monotonic() - started)
    combine_runs(Path(config.run_dir), folders, summary, asdict(config))


def _configure(config: RunConfig, stage: StageConfig, folder: Path) -> RunConfig:
    groups = [f"{group}={option}" for group, option in stage.groups.items()]
    settings = [f"{key}={json.dumps(value)}" for key, value in _leaves(stage.settings)]
    composed = compose_run([f"recipe={stage.recipe}", *groups, *settings, f"run_dir={json.dumps(str(folder))}"])
    shared = {group: config.choices[group] for group in SHARED_GROUPS if group in config.choices}
    return replace(
        composed,
        choices={**composed.choices, **shared},
        seed=config.seed,
        model=config.model,
        lora=config.lora,
        backend=config.backend,
        logger=config.logger,
        prices=config.prices,
        budget=config.budget,
    )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _final_weights(folder: Path) -> str:
    checkpoint, warnings = CheckpointLog(folder).latest_intact()
    if checkpoint is None or warnings:
        problem = "; ".join(warnings) or "it left no checkpoint"
        raise CheckpointError(
            f"{folder}: this stage has finished but its weights are not there ({problem}); delete the folder to run it "
            "again"
        )
    return checkpoint.states["policy"]


def _combined(config: RunConfig, summaries: Mapping[str, Mapping[str, Any]], wall_s: float) -> dict[str, Any]:
    """The evaluations before the first stage and after the last one, sums of tokens and cost, and each stage's own.

    The status is that of the last stage.
    """
    stages: Sequence[Mapping[str, Any]] = list(summaries.values())
    tokens = {kind: sum(stage["tokens"][kind] for stage in stages) for kind in ("prefill", "sampled", "trained")}
    return {
        "status": stages[-1]["status"],
        "recipe": config.recipe,
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
