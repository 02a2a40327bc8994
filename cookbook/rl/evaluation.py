"""Evaluation of a set of weights on held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cookbook.core.clients import SamplingClient
from cookbook.core.examples import Example
from cookbook.core.rollouts import Metrics
from cookbook.core.types import SamplingParams
from cookbook.envs.base import EnvFactory
from cookbook.rl.batch import rollout_metrics
from cookbook.rl.rollouts import Rollouts, collect, logger


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one evaluation and the rollouts behind it."""

    metrics: Metrics
    rollouts: Rollouts


def evaluate_reward(
    sampler: SamplingClient,
    examples: Sequence[Example],
    make_env: EnvFactory,
    sampling_params: SamplingParams,
    seed: int,
    say: Callable[[str], None] = logger.warning,
) -> Evaluation:
    """Sample one completion per example. `accuracy` is the share of correct ones (pass@1) among those that were
    graded. `say` is that of `collect`."""
    rollouts = collect(sampler, examples, make_env, 1, sampling_params, (seed, "evaluation"), say)
    trajectories = rollouts.trajectories
    graded = [trajectory for trajectory in trajectories if trajectory.status != "error"]
    correct = sum(trajectory.status == "correct" for trajectory in graded)
    metrics = rollout_metrics(trajectories)
    metrics["accuracy"] = correct / len(graded) if graded else float("nan")
    metrics["examples"] = float(len(examples))
    return Evaluation(metrics, rollouts)
