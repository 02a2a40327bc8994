"""The typed configuration of a run: what all loops share. A loop's own settings and their checks stand beside the loop.

Scalars are typed, so that a typo or a wrong type fails when the configuration is composed. Components (dataset, reward,
loss, ...) are `_target_` mappings that `cookbook.cli.build` turns into objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from omegaconf import MISSING

from cookbook.core.clients import Capabilities
from cookbook.core.errors import CapabilityError, ConfigError
from cookbook.core.suggest import did_you_mean
from cookbook.core.types import AdamParams, check_adam
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
class LoopConfig:
    """The settings of a loop. `_target_` is the loop, a function `run(config, components)`."""

    _target_: str = MISSING

    def check(self, config: RunConfig, capabilities: Capabilities) -> None:
        """Check these settings, and what they need of the backend. Raises ConfigError or CapabilityError."""


@dataclass
class RunConfig:
    """One run, whole."""

    recipe: str = MISSING
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
    """The option chosen in each group, for the record; filled in when the configuration is composed."""
    logger: Component = MISSING

    def check(self, capabilities: Capabilities) -> None:
        """Check the values of a run against each other and the backend's capabilities, before anything is provisioned.

        Raises:
            ConfigError: a value is out of range, or two values contradict each other.
            CapabilityError: the backend lacks something the run needs; the message says what to use instead.
        """
        require(self.seed >= 0, f"seed={self.seed}: must be 0 or more")
        require_at_least(1, "checkpoint", self.checkpoint, "keep")
        require_at_least(0, "checkpoint", self.checkpoint, "every")
        require_at_least(0, "eval", self.eval, "every", "examples", "temperature")
        for path, value in self._numbers():
            require(math.isfinite(value), f"{path}={value}: must be a finite number")
        check_adam(vars(self.optim), "optim.")
        require(self.optim.learning_rate > 0, f"optim.learning_rate={self.optim.learning_rate}: must be above 0")
        require(self.lora.alpha > 0, f"lora.alpha={self.lora.alpha}: must be above 0")
        require(
            self.lora.rank is None or self.lora.rank >= 1, f"lora.rank={self.lora.rank}: must be null or at least 1"
        )
        if self.lora.rank is None and not capabilities.full_parameter:
            raise CapabilityError(
                "lora.rank=null trains every weight, which this backend cannot; set lora.rank=32 or use backend=local"
            )
        has_price = any((self.prices.prefill, self.prices.sampled, self.prices.trained))
        require(
            self.budget.max_usd is None or has_price,
            f"budget.max_usd={self.budget.max_usd}: all of prices.* are 0, so nothing ever costs anything; "
            "set prices.* or budget.max_tokens",
        )
        if isinstance(self.loop, LoopConfig):
            self.loop.check(self, capabilities)

    def _numbers(self) -> Iterator[tuple[str, float]]:
        """The numbers of the sections that all loops share and of the loop's own, with their paths."""
        for section in ("lora", "optim", "loop", "eval", "checkpoint", "budget", "prices"):
            values = getattr(self, section)
            for name, value in vars(values).items() if is_dataclass(values) else ():
                if isinstance(value, float):
                    yield f"{section}.{name}", value


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_at_least(minimum: float, path: str, section: object, *names: str) -> None:
    """Raises ConfigError unless each named field of the section at `path` is at least `minimum`."""
    for name in names:
        value = getattr(section, name)
        require(value >= minimum, f"{path}.{name}={value}: must be at least {minimum}")


def require_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raises ConfigError unless `value`, found at `key`, is one of `choices`."""
    require(value in choices, f"{key}={value}: must be one of {', '.join(choices)}{did_you_mean(value, choices)}")
