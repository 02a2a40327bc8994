"""Updates of a policy: minibatches, the configured loss on any backend, old logprobs, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from cookbook.core.clients import APIFuture, CustomLoss, ServiceClient
from cookbook.core.datums import only_inputs, policy_datums, with_inputs
from cookbook.core.rollouts import Metrics, Trajectory
from cookbook.core.seeds import derive_seed
from cookbook.core.types import Datum, ForwardBackwardOutput, OptimStepResponse
from cookbook.loops.common import forward_backward_custom
from cookbook.loops.run import Run
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.batch import mismatch_metrics
from cookbook.rl.importance import ImportanceLevel, truncated_importance_sampling

T = TypeVar("T")

MISMATCH_PROBES = 4
"""Trajectories that are enough to see whether sampler and trainer agree."""

Update = tuple[APIFuture[ForwardBackwardOutput], APIFuture[OptimStepResponse]]
"""A gradient and the optimizer step that follows it, both enqueued."""


def split_into_minibatches(data: Sequence[T], count: int, *seed_path: int | str) -> list[list[T]]:
    """The data, shuffled, in `count` minibatches of nearly equal size (fewer where there are fewer data)."""
    order = np.random.default_rng(derive_seed(*seed_path)).permutation(len(data))
    return [[data[index] for index in indices] for indices in np.array_split(order, min(count, len(data)))]


def policy_gradient(run: Run, data: list[Datum], loss: BuiltinLoss | CustomLoss) -> APIFuture[ForwardBackwardOutput]:
    """Enqueue the gradient of the run's loss, built in or custom."""
    if isinstance(loss, BuiltinLoss):
        config = with_temperature(loss, run.service, run.config.loop.temperature)
        return run.policy.forward_backward(data, loss.name, config)
    return forward_backward_custom(run.policy, run.service, data, loss)


def with_temperature(loss: BuiltinLoss, service: ServiceClient, temperature: float) -> dict[str, float]:
    """The loss's settings, with the rollouts' temperature where the backend's losses know one."""
    known = {"temperature": temperature} if service.capabilities.loss_temperature else {}
    return {**loss.config, **known}


def recompute_old_logprobs(run: Run, data: list[Datum], loss: BuiltinLoss | CustomLoss) -> list[Datum]:
    """Datums whose `logprobs` are of the trainer's own distribution, so that the first sub-step's ratios are 1.

    The sampler's are those after temperature. Where the loss knows no temperature (a custom one, or any loss of a
    backend without that setting), the old logprobs are taken from a forward pass of the same weights instead.
    """
    knows_temperature = isinstance(loss, BuiltinLoss) and run.service.capabilities.loss_temperature
    if run.config.loop.temperature == 1 or knows_temperature:
        return data
    inputs = [only_inputs(datum, ("target_tokens", "weights")) for datum in data]
    outputs = run.policy.forward(inputs, "cross_entropy").result().loss_fn_outputs
    return [with_inputs(datum, logprobs=output["logprobs"]) for datum, output in zip(data, outputs, strict=True)]


def apply_truncated_importance(run: Run, data: list[Datum]) -> tuple[list[Datum], Metrics]:
    """Truncated importance sampling where `loop.importance_cap` is set: one more forward pass.

    Ratios are then taken against the trainer's own old logprobs, and tokens are weighted by how far the sampler's are
    from those, up to the cap.
    """
    loop = run.config.loop
    if not loop.importance_cap:
        return data, {}
    output = _forward(run, data)
    training_logprobs = [outputs["logprobs"] for outputs in output.loss_fn_outputs]
    level = cast(ImportanceLevel, loop.importance_level)
    corrected, metrics = truncated_importance_sampling(data, training_logprobs, loop.importance_cap, level)
    return corrected, metrics | mismatch_metrics(data, output)


def mismatch_without_training(run: Run, trajectories: Sequence[Trajectory]) -> Metrics:
    """`mismatch_metrics` of a step that trains on nothing, from a forward pass of a few of its trajectories.

    Nothing where the backend's forward knows no temperature and the rollouts had one: the two are not comparable.
    """
    if run.config.loop.temperature != 1 and not run.service.capabilities.loss_temperature:
        return {}
    probes = [datum for trajectory in trajectories[:MISMATCH_PROBES] for datum in policy_datums(trajectory, 0.0)]
    data = [only_inputs(datum, ("target_tokens", "logprobs", "weights")) for datum in probes]
    return mismatch_metrics(data, _forward(run, data))


def _forward(run: Run, data: Sequence[Datum]) -> ForwardBackwardOutput:
    """The policy's logprobs of the datums at the rollouts' temperature, counted as trained tokens."""
    config = with_temperature(BuiltinLoss("cross_entropy"), run.service, run.config.loop.temperature)
    inputs = [only_inputs(datum, ("target_tokens", "weights")) for datum in data]
    output = run.policy.forward(inputs, "cross_entropy", config).result()
    run.ledger.add(trained=sum(datum.model_input.length for datum in data))
    return output


def update_metrics(updates: Sequence[Update], prefix: str = "train") -> Metrics:
    """Wait for the updates of a step. Sums are added up over them, everything else is averaged."""
    gradients = [gradient.result().metrics for gradient, _ in updates]
    steps = [step.result().metrics for _, step in updates]
    metrics: Metrics = {}
    for key in gradients[0]:
        name, reduction = key.split(":")
        metrics[f"{prefix}/{name}_{reduction}"] = _over(gradients, key, reduction == "sum")
    optim = "optim" if prefix == "train" else f"optim/{prefix}"
    return metrics | {f"{optim}/{key}": _over(steps, key, key == "skipped_steps") for key in steps[0]}


def _over(values: Sequence[Mapping[str, float]], key: str, add_up: bool) -> float:
    numbers = [each[key] for each in values]
    return float(np.sum(numbers) if add_up else np.mean(numbers))
