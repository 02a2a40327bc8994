"""The built-in losses: pure torch functions of per-token tensors, summed over tokens and datums.

A new one is a function and a row of `LOSSES`.
"""

from __future__ import annotations

from collections.abc import Mapping

from cookbook.core.errors import ConfigError
from cookbook.core.suggest import did_you_mean
from cookbook.losses.base import LossFunction, complete_config
from cookbook.losses.cross_entropy import cross_entropy
from cookbook.losses.policy import cispo, dro, gspo, gspo_token, importance_sampling, ppo

_POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")
_POLICY_GATES = ("weights", "advantages")
_GSPO_CLIPS = {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}  # the paper's, section 5.1

LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(cross_entropy, ("target_tokens",), ("weights",), soft_targets=True),
    "importance_sampling": LossFunction(importance_sampling, _POLICY_INPUTS, _POLICY_GATES),
    "ppo": LossFunction(
        ppo, _POLICY_INPUTS, _POLICY_GATES, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 0.0}
    ),
    "cispo": LossFunction(
        cispo, _POLICY_INPUTS, _POLICY_GATES, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    ),
    # A token with advantage zero still feels the quadratic term of dro, and still counts in the sequence ratio of gspo.
    "dro": LossFunction(dro, _POLICY_INPUTS, ("weights",), {"beta": 0.05}),
    "gspo": LossFunction(gspo, _POLICY_INPUTS, ("weights",), _GSPO_CLIPS),
    "gspo_token": LossFunction(gspo_token, _POLICY_INPUTS, ("weights",), _GSPO_CLIPS),
}

KNOWN_INPUTS = frozenset({"weights"}.union(*(loss.required for loss in LOSSES.values())))
"""Every per-token array that some built-in loss reads."""


def resolve_loss(
    name: str, config: Mapping[str, float] | None = None, losses: Mapping[str, LossFunction] = LOSSES
) -> tuple[LossFunction, dict[str, float]]:
    """The loss of that name among `losses` and its complete settings, `temperature` among them.

    Raises:
        ConfigError: no such loss, or a setting it does not have.
    """
    if name not in losses:
        raise ConfigError(f"loss_fn {name!r} is unknown{did_you_mean(name, losses)}; built in are {', '.join(losses)}")
    return losses[name], complete_config(name, losses[name], config)
