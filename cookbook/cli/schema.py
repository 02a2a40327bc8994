"""The schemas of the configuration, under the names by which conf/ refers to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from cookbook.core.clients import Capabilities
from cookbook.loops.algorithms.grpo import GRPOConfig
from cookbook.loops.algorithms.ppo import PPOConfig
from cookbook.loops.config import LoopConfig, RunConfig, require
from cookbook.loops.preference import PreferenceConfig
from cookbook.loops.sft import SFTConfig


@dataclass
class StageConfig:
    """A stage of a pipeline: a recipe, the options of groups that differ from it, and values that differ.

    `settings` are nested as in the configuration.
    """

    recipe: str = MISSING
    groups: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class PipelineConfig(LoopConfig):
    """Recipes in a row: see `cookbook.cli.pipeline`. Stages run in the order in which they are written."""

    _target_: str = "cookbook.cli.pipeline.run"
    stages: dict[str, StageConfig] = field(default_factory=dict)

    def check(self, config: RunConfig, capabilities: Capabilities) -> None:
        require(bool(self.stages), "loop.stages: is empty; a pipeline needs at least one stage")


def register_schemas() -> None:
    """Make the schemas known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    store.store(group="loop", name="grpo_schema", node=GRPOConfig)
    store.store(group="loop", name="ppo_schema", node=PPOConfig)
    store.store(group="loop", name="sft_schema", node=SFTConfig)
    store.store(group="loop", name="preference_schema", node=PreferenceConfig)
    store.store(group="loop", name="pipeline_schema", node=PipelineConfig)
