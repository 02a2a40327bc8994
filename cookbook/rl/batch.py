"""Datums of the groups of one step, and metrics of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cookbook.core.clients import SamplingClient
from cookbook.core.datums import policy_datums
from cookbook.core.rollouts import Metrics, Trajectory, TrajectoryGroup
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.rl.advantages import GroupAdvantage, has_signal
from cookbook.rl.reference import full_sequence

REWARD_STATUSES = ("correct", "partial", "wrong", "malformed", "error")


def group_datums(
    groups: Sequence[TrajectoryGroup], advantage: GroupAdvantage, penalties: Sequence[Sequence[float]] | None = None
) -> tuple[list[Datum], Metrics]:
    """The datums of all graded trajectories of the groups that carry a signal.

    A trajectory whose grader failed is in neither its group's baseline nor the batch. A group whose rewards are all the
    same has no signal: it is left out and counted. In a group with signal a trajectory whose advantage is 0 stays: it
    is one of those that a mean is over, and some losses have a gradient there. `penalties[g][i]`, if given, is
    subtracted from the reward of trajectory i of group g.
    """
    data: list[Datum] = []
    without_signal = 0
    for g, group in enumerate(groups):
        graded = [i for i, trajectory in enumerate(group.trajectories) if trajectory.status != "error"]
        rewards = [group.trajectories[i].reward - (penalties[g][i] if penalties is not None else 0.0) for i in graded]
        if not rewards or not has_signal(rewards):
            without_signal += 1
            continue
        for i, value in zip(graded, advantage(rewards), strict=True):
            data.extend(policy_datums(group.trajectories[i], value))
    return data, {
        "groups/total": float(len(groups)),
        "groups/without_signal": float(without_signal),
        "datums/total": float(len(data)),
    }


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Mean reward, its parts and statuses, and how completions ended. Trajectories whose grader failed only count as
    errors."""
    graded = [trajectory for trajectory in trajectories if trajectory.status != "error"]
    statuses = Counter(trajectory.status for trajectory in trajectories)
    metrics = {f"reward/{status}": statuses[status] / len(trajectories) for status in REWARD_STATUSES}
    metrics["rollout/truncated"] = float(np.mean([trajectory.truncated for trajectory in trajectories]))
    metrics["rollout/tokens_per_trajectory"] = float(
        np.mean([trajectory.num_sampled_tokens for trajectory in trajectories])
    )
    metrics["rollout/turns_per_trajectory"] = float(
        np.mean([len(trajectory.transitions) for trajectory in trajectories])
    )
    if graded:
        rewards = [trajectory.reward for trajectory in graded]
        metrics["reward/mean"] = float(np.mean(rewards))
        metrics["reward/std"] = float(np.std(rewards))
        parts: dict[str, list[float]] = {}
        for trajectory in graded:
            for name, value in trajectory.metrics.items():
                parts.setdefault(name, []).append(value)
        metrics |= {f"reward/part/{name}": float(np.mean(values)) for name, values in parts.items()}
    return metrics


def grading_failures(trajectories: Sequence[Trajectory]) -> tuple[float, str]:
    """The share of trajectories whose grader failed, and the first reason.

    A trajectory whose example cannot be judged by any grader says nothing about this one: it is in neither number,
    unless there are no others.
    """
    failed = [turn for each in trajectories for turn in each.transitions if turn.reward.status == "error"]
    reason = str(failed[0].reward.details.get("error", "no reason was recorded")) if failed else ""
    counted = [
        each
        for each in trajectories
        if not any(turn.reward.details.get("unjudgeable") for turn in each.transitions if turn.reward.status == "error")
    ]
    counted = counted or trajectories
    return sum(trajectory.status == "error" for trajectory in counted) / len(counted), reason


def reference_logprobs(data: Sequence[Datum], reference: SamplingClient) -> list[np.ndarray]:
    """Per datum the reference's logprob (temperature 1) of each target token, shape `[length]`."""
    futures = [reference.compute_logprobs(full_sequence(datum)) for datum in data]
    return [np.asarray(future.result()[1:], dtype=np.float32) for future in futures]


def kl_per_trajectory(groups: Sequence[TrajectoryGroup], reference: SamplingClient) -> list[list[float]]:
    """Per trajectory the sum over its sampled tokens of log p - log p_ref, the k1 estimate of the KL divergence."""
    data_GT = [[policy_datums(trajectory, 1.0) for trajectory in group.trajectories] for group in groups]
    flat = [datum for group in data_GT for data in group for datum in data]
    gaps = iter(
        float(np.sum((datum.loss_fn_inputs["logprobs"] - reference) * datum.loss_fn_inputs["weights"]))
        for datum, reference in zip(flat, reference_logprobs(flat, reference), strict=True)
    )
    return [[sum(next(gaps) for _ in data) for data in group] for group in data_GT]


def mismatch_metrics(data: Sequence[Datum], output: ForwardBackwardOutput) -> Metrics:
    """How far the trainer's logprobs are from the sampler's on the tokens that are trained on.

    Compared are the positions that every backend evaluates: where the weight and, if the datum has one, the advantage
    is not 0. At the others a backend may return anything. Empty if there is none.

    `kl/sample_train` is the mean over tokens of exp(d) - 1 - d with d = training - sampling logprob (the k3 estimate of
    KL(sampler || trainer), Schulman 2020, "Approximating KL divergence"): 0 when the two agree, never negative.

    Args:
        data: the datums as they were given to the operation, with the sampler's `logprobs`.
    """
    gaps = []
    for datum, outputs in zip(data, output.loss_fn_outputs, strict=True):
        inputs = datum.loss_fn_inputs
        evaluated = np.all([inputs[key] != 0 for key in ("weights", "advantages") if key in inputs], axis=0)
        gaps.append((outputs["logprobs"] - inputs["logprobs"])[evaluated].astype(np.float64))
    gap = np.concatenate(gaps)
    if not len(gap):
        return {}
    return {
        "kl/sample_train": float(np.mean(np.expm1(gap) - gap)),
        "kl/sample_train_max_gap": float(np.max(np.abs(gap))),
    }
