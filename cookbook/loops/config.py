"""The typed schema of a run, and every rule that spans more than one of its fields.

Scalars live here, typed, so that a typo or a wrong type fails when the configuration is composed. Components (dataset,
reward, loss, ...) are `_target_` mappings that `cookbook.cli.build` turns into objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from cookbook.core.clients import Capabilities
from cookbook.core.datums import Truncation
from cookbook.core.errors import CapabilityError, ConfigError
from cookbook.core.schedules import SCHEDULES
from cookbook.core.suggest import did_you_mean
from cookbook.core.types import AdamParams
from cookbook.data.rendering import TrainOn
from cookbook.rl.importance import ImportanceLevel
from cookbook.tracking.cost import Budget, Prices

Component = dict[str, Any]
"""A `_target_` and its keyword arguments."""


@dataclass
class ModelConfig:
    """The base model. `name` is what the backend calls it; `path` is a local folder that replaces it."""

    name: str = MISSING
    path: str | None = None
    renderer: str = "auto"

    @property
    def base_model(self) -> str:
        return self.path or self.name


@dataclass
class LoraConfig:
    """The adapter. `rank` null trains every weight, where the backend can."""

    rank: int | None = 32
    alpha: float = 64.0


@dataclass
class EvalConfig:
    """Evaluation on held-out examples: always before and after, and in between every `every` steps (0: never)."""

    every: int = 0
    examples: int = 200
    max_tokens: int | None = None
    temperature: float = 0.0


@dataclass
class CheckpointConfig:
    """Save every `every` steps (0: only at the end) and keep the newest `keep` saves."""

    every: int = 5
    keep: int = 2


@dataclass
class RolloutConfig:
    """What loops that sample have in common."""

    steps: int = MISSING
    groups_per_batch: int = MISSING
    group_size: int = MISSING
    max_tokens: int = MISSING
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    loss_agg: str = "token_mean"
    kl_penalty_coef: float = 0.0
    importance_cap: float = 0.0
    importance_level: str = "token"
    max_reward_error_rate: float = 0.2
    reward_retries: int = 2


@dataclass
class GRPOConfig(RolloutConfig):
    """GRPO (Shao et al. 2024, arXiv:2402.03300): see `cookbook.loops.grpo`."""

    _target_: str = "cookbook.loops.grpo.run"
    num_substeps: int = 1
    max_refills: int = 0
    kl_estimator: str = "k1"
    kl_placement: str = "reward"


@dataclass
class PPOConfig(RolloutConfig):
    """PPO (Schulman et al. 2017, arXiv:1707.06347): see `cookbook.loops.ppo`. The KL penalty is k1, paid per token."""

    _target_: str = "cookbook.loops.ppo.run"
    num_epochs: int = 1
    num_minibatches: int = 1
    critic_learning_rate: float = MISSING
    value_clip_range: float = 0.2


@dataclass
class SupervisedConfig:
    """What loops over fixed data have in common. `steps` null means `epochs` passes over the training data."""

    batch_size: int = MISSING
    steps: int | None = None
    epochs: int = 1
    max_length: int = MISSING
    truncation: str = "drop"
    schedule: str = "linear"
    warmup_fraction: float = 0.0


@dataclass
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: see `cookbook.loops.sft`."""

    _target_: str = "cookbook.loops.sft.run"
    train_on: str = "all_assistant"


@dataclass
class PreferenceConfig(SupervisedConfig):
    """Training on preferences: see `cookbook.loops.preference`."""

    _target_: str = "cookbook.loops.preference.run"


@dataclass
class StageConfig:
    """A stage of a pipeline: a recipe, the options of groups that differ from it, and values that do, nested as in the configuration."""

    recipe: str = MISSING
    groups: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class PipelineConfig:
    """Recipes in a row: see `cookbook.cli.pipeline`. Stages run in the order in which they are written."""

    _target_: str = "cookbook.cli.pipeline.run"
    stages: dict[str, StageConfig] = field(default_factory=dict)


@dataclass
class RunConfig:
    """One run, whole."""

    recipe: str = MISSING
    scale: str = "laptop"
    seed: int = 0
    run_dir: str = MISSING
    resume: str = "never"
    debug: bool = False
    start_from: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: AdamParams = field(default_factory=AdamParams)
    loop: Any = MISSING
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    budget: Budget = field(default_factory=Budget)
    prices: Prices = field(default_factory=Prices)
    backend: Component = MISSING
    dataset: Component | None = None
    env: Component | None = None
    reward: Component | None = None
    sandbox: Component | None = None
    """Where rewards run programs; a reward that does refers to it as `${sandbox}`."""
    loss: Component | None = None
    advantage: Component | None = None
    curriculum: Component | None = None
    choices: dict[str, str] = field(default_factory=dict)
    """The option chosen in each group, for the record; filled in by `cookbook.run`."""
    logger: Component = MISSING


def register_schemas() -> None:
    """Make the schemas known to Hydra under the names that conf/ refers to."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    store.store(group="loop", name="grpo_schema", node=GRPOConfig)
    store.store(group="loop", name="ppo_schema", node=PPOConfig)
    store.store(group="loop", name="sft_schema", node=SFTConfig)
    store.store(group="loop", name="pipeline_schema", node=PipelineConfig)
    store.store(group="loop", name="preference_schema", node=PreferenceConfig)


GAE_TARGET = "cookbook.rl.gae.GAE"
"""The advantage that needs a critic."""

LOSS_AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

KL_COMBINATIONS = {("k1", "reward"), ("k2", "loss"), ("k3", "loss")}
"""Estimator and placement of the KL penalty whose gradient is that of a KL divergence (see docs/losses.md).

k1 in the loss has an expected gradient of zero; k2 and k3 in the reward differentiate something that is no divergence.
"""


def validate(config: RunConfig, capabilities: Capabilities) -> None:
    """Hold a run against its own rules and against what the backend can do, before anything is provisioned.

    Raises:
        ConfigError: a value is out of range, or two values contradict one another.
        CapabilityError: the backend lacks something the run needs; the message says what to use instead.
    """
    _require(
        config.lora.rank is None or config.lora.rank >= 1, f"lora.rank={config.lora.rank}: must be null or at least 1"
    )
    _require(config.optim.learning_rate > 0, f"optim.learning_rate={config.optim.learning_rate}: must be above 0")
    for name in ("beta1", "beta2"):
        _require(0 <= getattr(config.optim, name) < 1, f"optim.{name}={getattr(config.optim, name)}: must be in [0, 1)")
    for name in ("eps", "weight_decay", "grad_clip_norm"):
        _require(getattr(config.optim, name) >= 0, f"optim.{name}={getattr(config.optim, name)}: must be 0 or more")
    _require(config.eval.every >= 0, f"eval.every={config.eval.every}: must be 0 (never) or more")
    _require(config.eval.examples >= 0, f"eval.examples={config.eval.examples}: must be 0 (no evaluation) or more")
    _require(config.eval.temperature >= 0, f"eval.temperature={config.eval.temperature}: must be 0 (greedy) or more")
    _require(
        config.checkpoint.every >= 0, f"checkpoint.every={config.checkpoint.every}: must be 0 (only at the end) or more"
    )
    _require(config.checkpoint.keep >= 1, f"checkpoint.keep={config.checkpoint.keep}: must be at least 1")
    if config.lora.rank is None and not capabilities.full_parameter:
        raise CapabilityError(
            "lora.rank=null trains every weight, which this backend cannot; set lora.rank=32 or use backend=local"
        )
    _require(config.seed >= 0, f"seed={config.seed}: must be 0 or more")
    _require(
        config.budget.max_usd is None or any((config.prices.prefill, config.prices.sampled, config.prices.trained)),
        f"budget.max_usd={config.budget.max_usd}: all of prices.* are 0, so nothing ever costs anything; set prices.* or budget.max_tokens",
    )
    if isinstance(config.loop, RolloutConfig):
        _validate_rollouts(config, config.loop, capabilities)
    if isinstance(config.loop, GRPOConfig):
        _validate_grpo(config.loop)
    if isinstance(config.loop, PPOConfig):
        _validate_ppo(config, config.loop, capabilities)
    if isinstance(config.loop, PipelineConfig):
        _require(bool(config.loop.stages), "loop.stages: is empty; a pipeline needs at least one stage")
    if isinstance(config.loop, SupervisedConfig):
        _validate_supervised(config.loop)
    if isinstance(config.loop, SFTConfig):
        _require_choice("loop.train_on", config.loop.train_on, get_args(TrainOn))


def _validate_rollouts(config: RunConfig, loop: RolloutConfig, capabilities: Capabilities) -> None:
    for name in ("steps", "groups_per_batch", "group_size", "max_tokens"):
        _require(getattr(loop, name) >= 1, f"loop.{name}={getattr(loop, name)}: must be at least 1")
    _require(
        loop.temperature > 0,
        f"loop.temperature={loop.temperature}: must be above 0; greedy rollouts of a group are all the same",
    )
    _require(0 < loop.top_p <= 1, f"loop.top_p={loop.top_p}: must be in (0, 1]")
    _require(loop.top_k == -1 or loop.top_k >= 1, f"loop.top_k={loop.top_k}: must be -1 (off) or at least 1")
    _require(
        0 <= loop.max_reward_error_rate <= 1,
        f"loop.max_reward_error_rate={loop.max_reward_error_rate}: must be in [0, 1]",
    )
    _require(loop.reward_retries >= 0, f"loop.reward_retries={loop.reward_retries}: must be 0 or more")
    _require_choice("loop.loss_agg", loop.loss_agg, LOSS_AGGREGATIONS)
    _require_choice("loop.importance_level", loop.importance_level, get_args(ImportanceLevel))
    _require(
        loop.importance_cap == 0 or loop.importance_cap >= 1,
        f"loop.importance_cap={loop.importance_cap}: must be 0 (off) or at least 1",
    )
    if loop.importance_cap and loop.temperature != 1 and not capabilities.loss_temperature:
        raise CapabilityError(
            f"loop.importance_cap={loop.importance_cap} with loop.temperature={loop.temperature}: this backend's forward knows no "
            "temperature, so its logprobs are not comparable with the sampler's; set loop.importance_cap=0 or loop.temperature=1"
        )
    _require(loop.kl_penalty_coef >= 0, f"loop.kl_penalty_coef={loop.kl_penalty_coef}: must be 0 or more")
    _require(
        loop.kl_penalty_coef == 0 or loop.temperature == 1,
        f"loop.kl_penalty_coef={loop.kl_penalty_coef} with loop.temperature={loop.temperature}: the reference's logprobs are those of "
        "temperature 1, so the penalty would compare two different distributions; set loop.temperature=1 or loop.kl_penalty_coef=0",
    )
    name = config.loss.get("name") if config.loss else None
    if name is not None and name not in capabilities.losses:
        raise CapabilityError(
            f"loss={name}: this backend has {', '.join(sorted(capabilities.losses))}; choose one of those"
        )


def _validate_grpo(loop: GRPOConfig) -> None:
    _require(loop.num_substeps >= 1, f"loop.num_substeps={loop.num_substeps}: must be at least 1")
    _require(
        loop.max_refills >= 0,
        f"loop.max_refills={loop.max_refills}: must be 0 (groups without signal are not replaced) or more",
    )
    _require(
        loop.max_refills == 0 or loop.group_size > 1,
        f"loop.max_refills={loop.max_refills} with loop.group_size={loop.group_size}: a group of one never has a signal, so every "
        "replacement would be in vain; set loop.group_size=2 or more, or loop.max_refills=0",
    )
    if loop.kl_penalty_coef > 0:
        choices = ", ".join(f"{estimator} in the {placement}" for estimator, placement in sorted(KL_COMBINATIONS))
        _require(
            (loop.kl_estimator, loop.kl_placement) in KL_COMBINATIONS,
            f"loop.kl_estimator={loop.kl_estimator} with loop.kl_placement={loop.kl_placement}: its gradient is not that of a KL "
            f"divergence; choose {choices}",
        )


def _validate_ppo(config: RunConfig, loop: PPOConfig, capabilities: Capabilities) -> None:
    for name in ("num_epochs", "num_minibatches"):
        _require(getattr(loop, name) >= 1, f"loop.{name}={getattr(loop, name)}: must be at least 1")
    _require(loop.critic_learning_rate > 0, f"loop.critic_learning_rate={loop.critic_learning_rate}: must be above 0")
    _require(loop.value_clip_range >= 0, f"loop.value_clip_range={loop.value_clip_range}: must be 0 (off) or more")
    if config.advantage and config.advantage["_target_"] == GAE_TARGET and not capabilities.critic:
        raise CapabilityError(
            "advantage=gae needs a critic, which this backend lacks; choose advantage=reinforce_pp, rloo or mean_centered, or backend=local"
        )


def _validate_supervised(loop: SupervisedConfig) -> None:
    for name in ("batch_size", "epochs"):
        _require(getattr(loop, name) >= 1, f"loop.{name}={getattr(loop, name)}: must be at least 1")
    _require(
        loop.steps is None or loop.steps >= 1, f"loop.steps={loop.steps}: must be null (use loop.epochs) or at least 1"
    )
    _require(
        loop.max_length >= 2, f"loop.max_length={loop.max_length}: must be at least 2, an input token and its target"
    )
    _require(0 <= loop.warmup_fraction <= 1, f"loop.warmup_fraction={loop.warmup_fraction}: must be in [0, 1]")
    _require_choice("loop.truncation", loop.truncation, get_args(Truncation))
    _require_choice("loop.schedule", loop.schedule, SCHEDULES)


def _require_choice(key: str, value: str, choices: Sequence[str]) -> None:
    _require(value in choices, f"{key}={value}: must be one of {', '.join(choices)}{did_you_mean(value, choices)}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
