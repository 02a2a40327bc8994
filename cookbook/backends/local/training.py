"""Training sessions: forward, backward and optimizer steps, on the engine's thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cookbook.backends.local.model import (
    BaseModel,
    hidden_states,
    microbatches,
    right_padded,
    token_logprobs,
)
from cookbook.backends.local.weights import TrainableWeights, ValueHead
from cookbook.core.clients import CustomLoss
from cookbook.core.errors import BackendError, CapabilityError, DataError
from cookbook.core.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    OptimStepResponse,
    check_soft_targets,
)
from cookbook.losses.base import LossFunction, MetricSums, TokenBatch, check_inputs
from cookbook.losses.builtin import KNOWN_INPUTS, LOSSES, resolve_loss
from cookbook.losses.custom import differentiate
from cookbook.losses.value import VALUE

Entries = tuple[np.ndarray, ...]
"""Places in a per-token array, one index array per dimension, in the order of the array's elements."""


@dataclass(frozen=True)
class Microbatch:
    """Some datums, each cut after its last computed position, padded into one block.

    `entries[k]` indexes what is computed of datum `datums[k]`: positions, or of soft targets `[T, K]` positions and
    columns. `targets` and `segments` `[N]` run over the entries datum by datum, `flat_positions` `[P]` over the
    positions they are at; `position_of_target` `[N]` says which of those, None where each has one.
    """

    datums: list[int]
    entries: list[Entries]
    input_ids: torch.Tensor
    flat_positions: torch.Tensor
    targets: torch.Tensor
    segments: torch.Tensor
    position_of_target: torch.Tensor | None = None

    def gather(self, data: Sequence[Datum], key: str) -> torch.Tensor:
        """The per-token input `key` at the entries, 1 where a datum has none."""
        rows = []
        for index, entries in zip(self.datums, self.entries, strict=True):
            values = data[index].loss_fn_inputs.get(key)
            rows.append(np.ones(len(entries[0]), np.float32) if values is None else values[entries])
        return torch.from_numpy(np.concatenate(rows)).to(self.input_ids.device)

    def scatter(self, logprobs: torch.Tensor, outputs: list[np.ndarray]) -> None:
        """Write the logprobs of the entries into the datums' arrays."""
        values = logprobs.detach().cpu().numpy()
        start = 0
        for index, entries in zip(self.datums, self.entries, strict=True):
            outputs[index][entries] = values[start : start + len(entries[0])]
            start += len(entries[0])


class TrainingSession:
    """Weights, accumulated gradient and AdamW state. An operation that fails changes none of the three, except for an
    `optim_step` whose result is not finite."""

    losses: Mapping[str, LossFunction] = LOSSES
    known_inputs: frozenset[str] = KNOWN_INPUTS
    prediction = "logprobs"
    """The name of what is computed at every position and returned."""

    def __init__(self, weights: TrainableWeights, token_budget: int) -> None:
        self.weights = weights
        self._token_budget = token_budget
        self._parameters = list(weights.parameters.values())
        self._gradient: list[torch.Tensor] | None = None
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget the AdamW moments and the accumulated gradient."""
        self.optimizer = torch.optim.AdamW(self._parameters, fused=True)
        self._gradient = None

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None, backward: bool
    ) -> ForwardBackwardOutput:
        """A built-in loss, and its gradient if `backward`.

        Positions whose weight is zero are not computed; `backward` also skips those with advantage zero, by which
        a policy loss multiplies. A datum without such a position costs nothing. Soft targets share the pass of their
        position; those of weight zero are skipped too, so that padding costs nothing.
        """
        loss, config = resolve_loss(loss_fn, loss_fn_config, self.losses)
        check_inputs(loss_fn, loss, self.known_inputs, data)
        _check_tokens(data, self.weights.base)
        gates = loss.gates if backward else ("weights",)
        inputs = {"weights", *loss.required} - {"target_tokens"}
        outputs = _zeros_like_targets(data)
        metrics = MetricSums()

        def run(batch: Microbatch) -> None:
            predictions = self._predict(batch, config)
            losses = loss.compute(
                self._token_batch(predictions, {key: batch.gather(data, key) for key in inputs}, batch.segments), config
            )
            metrics.add({"loss:sum": losses.values, **losses.metrics})
            batch.scatter(predictions, outputs)
            if backward:
                losses.values.sum().backward()

        batches = self._batches(data, gates)
        if backward:
            with _FreshGradient(self) as fresh:
                for batch in batches:
                    run(batch)
                reduced = _finite({"loss:sum": 0.0, **metrics.reduce()}, loss_fn)
                fresh.keep()
        else:
            with torch.no_grad():
                for batch in batches:
                    run(batch)
            reduced = _finite({"loss:sum": 0.0, **metrics.reduce()}, loss_fn)
        return ForwardBackwardOutput([{self.prediction: output} for output in outputs], reduced)

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLoss) -> ForwardBackwardOutput:
        """A loss over the logprobs of all datums together, exact for any batching.

        If one micro-batch holds everything, its graph is kept and this is one pass. Otherwise logprobs come from a pass
        without gradient, the loss is differentiated by them, and a second pass carries dL/dlogprob into the weights.
        """
        if not data:
            raise DataError("forward_backward_custom: no datums were given")
        for index, datum in enumerate(data):
            if "target_tokens" not in datum.loss_fn_inputs:
                raise DataError(f"datum {index}: forward_backward_custom needs loss_fn_inputs 'target_tokens'")
        check_soft_targets(data, "custom", accepted=True)
        _check_tokens(data, self.weights.base)
        outputs = _zeros_like_targets(data)
        batches = self._batches(data, ("weights",))
        one_pass = len(batches) == 1
        with _FreshGradient(self) as fresh:
            with torch.set_grad_enabled(one_pass):
                computed = [self._logprobs(batch) for batch in batches]
            for batch, logprobs in zip(batches, computed, strict=True):
                batch.scatter(logprobs, outputs)
            leaves = [
                torch.from_numpy(output.copy()).to(self.weights.base.device).requires_grad_() for output in outputs
            ]
            gradients, metrics = differentiate(loss_fn, data, leaves)
            for batch, logprobs in zip(batches, computed, strict=True):
                slopes = _slopes(batch, gradients)
                if slopes.any():
                    (logprobs if one_pass else self._logprobs(batch)).backward(slopes)
            fresh.keep()
        return ForwardBackwardOutput([{"logprobs": output} for output in outputs], metrics)

    def optim_step(self, params: AdamParams) -> OptimStepResponse:
        """One AdamW step (Loshchilov & Hutter 2019, algorithm 2) on the accumulated gradient, clipped by its global
        norm.

        Without any forward_backward since the last step the gradient is zero. A gradient that is not finite is dropped,
        and the step with it.

        Raises:
            ConfigError: a value of `params` is out of range.
            BackendError: the step made weights that are not finite; load an earlier save to go on.
        """
        params.check()
        gradient = self._gradient or [torch.zeros_like(parameter) for parameter in self._parameters]
        self._gradient = None
        norm = float(torch.nn.utils.get_total_norm(gradient))
        if not math.isfinite(norm):
            return OptimStepResponse({"grad_norm": 0.0, "skipped_steps": 1.0})
        if 0 < params.grad_clip_norm < norm:
            for values in gradient:
                values.mul_(params.grad_clip_norm / norm)
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        for parameter, values in zip(self._parameters, gradient, strict=True):
            parameter.grad = values
        self.optimizer.step()
        self.weights.publish()
        self.optimizer.zero_grad(set_to_none=True)
        self.check_finite("optim_step")
        return OptimStepResponse({"grad_norm": norm, "skipped_steps": 0.0})

    def check_finite(self, operation: str) -> None:
        """Raises BackendError where a trained weight is NaN or infinite."""
        with torch.no_grad():
            norm = float(torch.nn.utils.get_total_norm(self._parameters))
        if not math.isfinite(norm):
            raise BackendError(
                f"{operation}: the weights are no longer finite; lower the learning rate and go back to an earlier save"
            )

    def _predict(self, batch: Microbatch, config: Mapping[str, float]) -> torch.Tensor:
        return self._logprobs(batch, config["temperature"])

    def _token_batch(
        self, predictions: torch.Tensor, inputs: Mapping[str, torch.Tensor], segments: torch.Tensor
    ) -> TokenBatch:
        return TokenBatch(predictions, inputs, segments)

    def _logprobs(self, batch: Microbatch, temperature: float = 1.0) -> torch.Tensor:
        return token_logprobs(
            self.weights.model,
            batch.input_ids,
            batch.flat_positions,
            batch.targets,
            temperature,
            batch.position_of_target,
        )

    def _batches(self, data: Sequence[Datum], gates: Sequence[str]) -> list[Microbatch]:
        """Micro-batches within the token budget over the datums that have a position where every gate is non-zero."""
        entries = [_computed_entries(datum, gates) for datum in data]
        used = [index for index, found in enumerate(entries) if len(found[0])]
        batches = microbatches([int(entries[index][0][-1]) + 1 for index in used], self._token_budget)
        return [self._microbatch(data, [used[item] for item in batch], entries) for batch in batches]

    def _microbatch(self, data: Sequence[Datum], datums: list[int], entries: list[Entries]) -> Microbatch:
        device = self.weights.base.device
        computed = [entries[index] for index in datums]
        chosen = [(data[index], found) for index, found in zip(datums, computed, strict=True)]
        input_ids = right_padded([datum.model_input.tokens[: found[0][-1] + 1] for datum, found in chosen], device)
        flat = np.concatenate([row * input_ids.shape[1] + found[0] for row, found in enumerate(computed)])
        targets = np.concatenate([datum.loss_fn_inputs["target_tokens"][found] for datum, found in chosen])
        segments = np.repeat(np.arange(len(datums)), [len(found[0]) for found in computed])
        first = np.diff(flat, prepend=-1) > 0  # ascending, a position repeated for each of its soft targets
        tensors = [torch.from_numpy(array).to(device) for array in (flat[first], targets, segments)]
        if first.all():
            return Microbatch(datums, computed, input_ids, *tensors)
        return Microbatch(
            datums, computed, input_ids, *tensors, position_of_target=torch.from_numpy(first.cumsum() - 1).to(device)
        )


class CriticSession(TrainingSession):
    """A session whose model ends in a value head: after each input token it predicts the return from there on."""

    losses: Mapping[str, LossFunction] = {"value": VALUE}
    known_inputs = frozenset({"target_tokens", "weights", *VALUE.required})
    prediction = "values"

    def __init__(self, weights: TrainableWeights, token_budget: int) -> None:
        self._head = ValueHead(weights)
        super().__init__(weights, token_budget)

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLoss) -> ForwardBackwardOutput:
        raise CapabilityError("a critic predicts values, not logprobs: it has the loss 'value' only")

    def _predict(self, batch: Microbatch, config: Mapping[str, float]) -> torch.Tensor:
        return self._head(hidden_states(self.weights.model, batch.input_ids).flatten(0, 1)[batch.flat_positions])

    def _token_batch(
        self, predictions: torch.Tensor, inputs: Mapping[str, torch.Tensor], segments: torch.Tensor
    ) -> TokenBatch:
        return TokenBatch(torch.zeros_like(predictions), {**inputs, "values": predictions}, segments)


class _FreshGradient:
    """Collects a new gradient in `.grad`. `keep` adds it to that of the session; without `keep` it is dropped."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._parameters = session._parameters

    def __enter__(self) -> _FreshGradient:
        return self

    def keep(self) -> None:
        gradient = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self._parameters
        ]
        if self._session._gradient is None:
            self._session._gradient = gradient
        else:
            for total, values in zip(self._session._gradient, gradient, strict=True):
                total.add_(values)

    def __exit__(self, *exception: object) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _zeros_like_targets(data: Sequence[Datum]) -> list[np.ndarray]:
    return [np.zeros(datum.loss_fn_inputs["target_tokens"].shape, np.float32) for datum in data]


def _computed_entries(datum: Datum, gates: Sequence[str]) -> Entries:
    """Where every gate that the datum carries is non-zero."""
    needed = np.ones(datum.loss_fn_inputs["target_tokens"].shape, dtype=bool)
    for gate in gates:
        if gate in datum.loss_fn_inputs:
            needed &= datum.loss_fn_inputs[gate] != 0
    return needed.nonzero()


def _slopes(batch: Microbatch, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """dL/dlogprob at the entries of a micro-batch."""
    rows = []
    for index, entries in zip(batch.datums, batch.entries, strict=True):
        where = tuple(torch.from_numpy(places).to(gradients[index].device) for places in entries)
        rows.append(gradients[index][where])
    return torch.cat(rows)


def _check_tokens(data: Sequence[Datum], base: BaseModel) -> None:
    for index, datum in enumerate(data):
        if datum.model_input.length > base.context_length:
            raise DataError(
                f"datum {index}: model_input has {datum.model_input.length} tokens; "
                f"the context of {base.name!r} is {base.context_length}{base.context_note}"
            )
        targets = datum.loss_fn_inputs["target_tokens"]
        lowest = min(min(datum.model_input.tokens), int(targets.min()))
        highest = max(max(datum.model_input.tokens), int(targets.max()))
        if lowest < 0 or highest >= base.vocabulary_size:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"datum {index}: token {wrong} is outside the vocabulary of {base.name!r}, "
                f"0 to {base.vocabulary_size - 1}"
            )


def _finite(metrics: dict[str, float], loss_fn: str) -> dict[str, float]:
    if not math.isfinite(metrics["loss:sum"]):
        raise BackendError(
            f"loss {loss_fn!r} is {metrics['loss:sum']}; nothing was added to the gradient "
            "(look for extreme sampling logprobs, advantages or weights in the data)"
        )
    return metrics
