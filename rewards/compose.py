"""Rewards that combine other rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from cookbook.core.errors import ConfigError
from cookbook.core.examples import Example
from cookbook.core.judging import check_gold
from cookbook.core.rollouts import Completion, Metrics, Reward, RewardResult
from cookbook.core.scoring import as_result, call
from cookbook.core.suggest import did_you_mean
from rewards.validation import Validated


class Weighted:
    """The weighted sum of named rewards.

    `metrics[name]` is the unweighted value of each component; its own metrics are `name/key`, its details
    `details[name]`. The status is that of the component `status_from` (default: the first), or "error" if any
    component has that status.

    Raises:
        ConfigError: a weight without a component, a component without a weight, a weight that is not finite, or an
            unknown `status_from`.
    """

    def __init__(
        self, components: Mapping[str, Reward], weights: Mapping[str, float], status_from: str | None = None
    ) -> None:
        self._components = {str(name): component for name, component in components.items()}
        if not self._components:
            raise ConfigError("rewards.compose.Weighted: components is empty; name at least one reward")
        self._weights = {self._known(name, "weights"): float(weight) for name, weight in weights.items()}
        for name in self._components:
            if name not in self._weights:
                raise ConfigError(f"rewards.compose.Weighted: component {name!r} has no weight; add weights.{name}")
            if not math.isfinite(self._weights[name]):
                raise ConfigError(
                    f"rewards.compose.Weighted: weights.{name}={self._weights[name]}: must be a finite number"
                )
        self._status_from = (
            next(iter(self._components)) if status_from is None else self._known(status_from, "status_from")
        )

    def _known(self, name: str, field: str) -> str:
        if name in self._components:
            return name
        hint = did_you_mean(name, self._components)
        raise ConfigError(
            f"rewards.compose.Weighted: {field} names {name}{hint}; the components are {', '.join(self._components)}"
        )

    async def __call__(self, completion: Completion, example: Example) -> RewardResult:
        results = {
            name: as_result(await call(reward, completion, example), name) for name, reward in self._components.items()
        }
        metrics: Metrics = {}
        for name, result in results.items():
            metrics[name] = result.value
            metrics |= {f"{name}/{key}": value for key, value in result.metrics.items()}
        details = {name: result.details for name, result in results.items() if result.details}
        if any(result.status == "error" for result in results.values()):
            return RewardResult(0.0, "error", metrics, details)
        value = sum(self._weights[name] * result.value for name, result in results.items())
        return RewardResult(value, results[self._status_from].status, metrics, details)

    def check_gold(self, example: Example) -> None:
        """Have all components that can check the gold answer. Raises DataError."""
        for component in self._components.values():
            check_gold(component, example)

    def validate(self, examples: Iterable[Example]) -> None:
        """Validate all components that have `validate`. Raises DataError."""
        examples = list(examples)
        for component in self._components.values():
            if isinstance(component, Validated):
                component.validate(examples)
