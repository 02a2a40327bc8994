"""Steps that GRPO and PPO share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from cookbook.core.clients import APIFuture, ServiceClient, TrainingClient
from cookbook.core.datums import only_inputs, policy_datums, with_inputs
from cookbook.core.errors import RewardError
from cookbook.core.rollouts import Metrics, Trajectory, TrajectoryGroup
from cookbook.core.seeds import derive_seed
from cookbook.core.types import Datum, ForwardBackwardOutput, OptimStepResponse
from cookbook.loops.common import Session
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.batch import mismatch_metrics
from cookbook.rl.importance import ImportanceLevel, truncate_importance
from cookbook.rl.rollouts import Rollouts

T = TypeVar("T")

MISMATCH_PROBES = 4
"""Trajectories that are enough to see whether sampler and trainer agree."""

Update = tuple[APIFuture[ForwardBackwardOutput], APIFuture[OptimStepResponse]]
"""A gradient and the optimizer step that follows it, both enqueued."""


def shares(data: Sequence[T], count: int, *seed_path: int | str) -> list[list[T]]:
    """The data, shuffled, in `count` nearly equal shares (fewer where there are fewer data)."""
    order = np.random.default_rng(derive_seed(*seed_path)).permutation(len(data))
    return [[data[index] for index in share] for share in np.array_split(order, min(count, len(data)))]


def graded_rewards(groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
    """Of each group, the rewards of the trajectories whose grader did not fail."""
    return [
        [trajectory.reward for trajectory in group.trajectories if trajectory.status != "error"] for group in groups
    ]


def merged(rounds: Sequence[Rollouts]) -> Rollouts:
    """Several rounds of sampling, one after the other, as one."""
    groups = [group for rollouts in rounds for group in rollouts.groups]
    return Rollouts(
        groups, sum(rollouts.sample_s for rollouts in rounds), sum(rollouts.reward_wait_s for rollouts in rounds)
    )


def loss_config(loss: BuiltinLoss, service: ServiceClient, temperature: float) -> dict[str, float]:
    """The loss's settings, with the rollouts' temperature where the backend's losses know one."""
    known = {"temperature": temperature} if service.capabilities.loss_temperature else {}
    return {**loss.config, **known}


def like_for_like(data: list[Datum], policy: TrainingClient, service: ServiceClient, temperature: float) -> list[Datum]:
    """Datums whose `logprobs` are of the same distribution as the trainer's, so that the first sub-step's ratios are 1.

    The sampler's are those after temperature. Where the backend's losses know no temperature, the old logprobs are taken
    from a forward pass of the same weights instead.
    """
    if temperature == 1 or service.capabilities.loss_temperature:
        return data
    inputs = [only_inputs(datum, ("target_tokens", "weights")) for datum in data]
    outputs = policy.forward(inputs, "cross_entropy").result().loss_fn_outputs
    return [with_inputs(datum, logprobs=output["logprobs"]) for datum, output in zip(data, outputs, strict=True)]


def correct_sampler(data: list[Datum], session: Session, service: ServiceClient) -> tuple[list[Datum], Metrics]:
    """Where `loop.importance_cap` is set, take ratios against the trainer's own old logprobs and weigh tokens by how far the sampler's are
    from them, up to the cap: one more forward pass."""
    loop = session.config.loop
    if not loop.importance_cap:
        return data, {}
    config = loss_config(BuiltinLoss("cross_entropy"), service, loop.temperature)
    inputs = [only_inputs(datum, ("target_tokens", "weights")) for datum in data]
    output = session.policy.forward(inputs, "cross_entropy", config).result()
    session.ledger.add(trained=sum(datum.model_input.length for datum in data))
    training_logprobs = [outputs["logprobs"] for outputs in output.loss_fn_outputs]
    level = cast(ImportanceLevel, loop.importance_level)
    corrected, metrics = truncate_importance(data, training_logprobs, loop.importance_cap, level)
    return corrected, metrics | mismatch_metrics(data, output)


def mismatch_without_training(session: Session, trajectories: Sequence[Trajectory], service: ServiceClient) -> Metrics:
    """`mismatch_metrics` of a step that trains on nothing, from a forward pass of a few of its trajectories.

    Nothing where the backend's forward knows no temperature and the rollouts had one: the two are not comparable.
    """
    temperature = session.config.loop.temperature
    if temperature != 1 and not service.capabilities.loss_temperature:
        return {}
    data = [datum for trajectory in trajectories[:MISMATCH_PROBES] for datum in policy_datums(trajectory, 0.0)]
    config = loss_config(BuiltinLoss("cross_entropy"), service, temperature)
    output = session.policy.forward(
        [only_inputs(datum, ("target_tokens", "weights")) for datum in data], "cross_entropy", config
    )
    session.ledger.add(trained=sum(datum.model_input.length for datum in data))
    return mismatch_metrics(data, output.result())


def update_metrics(updates: Sequence[Update], prefix: str = "train") -> Metrics:
    """Wait for the updates of a step. Sums are added up over them, everything else is averaged."""
    gradients = [gradient.result().metrics for gradient, _ in updates]
    steps = [step.result().metrics for _, step in updates]
    metrics: Metrics = {}
    for key in gradients[0]:
        name, reduction = key.split(":")
        metrics[f"{prefix}/{name}_{reduction}"] = _over(gradients, key, reduction == "sum")
    optim = "optim" if prefix == "train" else f"optim/{prefix}"
    return metrics | {f"{optim}/{key}": _over(steps, key, False) for key in steps[0]}


def _over(values: Sequence[Mapping[str, float]], key: str, add_up: bool) -> float:
    numbers = [each[key] for each in values]
    return float(np.sum(numbers) if add_up else np.mean(numbers))


def stop_if_grading_fails(session: Session, step: int, error_rate: float) -> None:
    """Raises RewardError, after a checkpoint, where more than `loop.max_reward_error_rate` of a step could not be graded."""
    limit = session.config.loop.max_reward_error_rate
    if error_rate > limit:
        session.save(step)
        raise RewardError(
            f"step {step}: {error_rate:.0%} of the completions could not be graded, more than loop.max_reward_error_rate={limit}; "
            "the causes are in rollouts.jsonl; mend the grader and go on from the checkpoint with resume=auto"
        )


def warn_if_stuck(session: Session, metrics: Metrics) -> None:
    """Say so when a step could not teach anything, or nearly every completion was cut off."""
    if metrics["reward/std"] == 0:
        session.tracker.say("warning: all rewards of this step are the same; is the task too easy or too hard?")
    elif metrics["groups/without_signal"] == metrics["groups/total"]:
        session.tracker.say(
            "warning: no group had two different rewards, so this step taught nothing; raise loop.group_size"
        )
    if metrics["rollout/truncated"] > 0.9:
        limit = session.config.loop.max_tokens
        session.tracker.say(
            f"warning: {metrics['rollout/truncated']:.0%} of the completions were cut off at loop.max_tokens={limit}; raise it"
        )
