"""Trainable weights of a session, and the pinned copies that samplers use.

Every session has its own tree of modules over the base model's tensors, so sessions do not affect one another:
what they share is never written, and what they write is never shared.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from cookbook.backends.local.model import BaseModel, embedding_weight

VALUE_HEAD = "value_head"
"""The prefix of the names of a critic's own parameters."""


@dataclass(frozen=True, eq=False)
class PinnedWeights:
    """A module tree and the values that some of its parameters have while a sampler runs it."""

    base: BaseModel
    model: PreTrainedModel
    values: Sequence[tuple[nn.Parameter, torch.Tensor]] = ()

    @contextlib.contextmanager
    def applied(self) -> Iterator[PreTrainedModel]:
        """The model with these values; the values of before are restored at the end."""
        before = [parameter.data for parameter, _ in self.values]
        try:
            for parameter, value in self.values:
                parameter.data = value
            yield self.model
        finally:
            for (parameter, _), value in zip(self.values, before, strict=True):
                parameter.data = value


class TrainableWeights:
    """The module tree that a session trains, and its trainable parameters by their names in saves."""

    def __init__(self, base: BaseModel, model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> None:
        self.base = base
        self.model = model
        self.parameters = dict(parameters)

    def pin(self) -> PinnedWeights:
        """A copy of the weights as they are now."""
        return PinnedWeights(
            self.base, self.model, [(parameter, parameter.detach().clone()) for parameter in self.parameters.values()]
        )

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
        self.publish()

    def publish(self) -> None:
        """Bring the model up to date after the parameters have changed."""


class FullWeights(TrainableWeights):
    """Every weight of the base model, in float32.

    The model computes in the base model's dtype, with rounded copies of these weights where that is not float32: so a
    new session computes exactly what its base model does, and small updates are not lost.
    """

    def __init__(self, base: BaseModel) -> None:
        model = copy.deepcopy(base.model).requires_grad_(True)
        self._rounded: list[tuple[nn.Parameter, nn.Parameter]] = []
        parameters = {}
        for name, parameter in model.named_parameters():
            parameters[name] = parameter
            if parameter.dtype != torch.float32:
                parameters[name] = nn.Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(_moves_gradient_to(parameters[name]))
                self._rounded.append((parameter, parameters[name]))
        super().__init__(base, model, parameters)

    def publish(self) -> None:
        with torch.no_grad():
            for rounded, parameter in self._rounded:
                rounded.copy_(parameter)

    def pin(self) -> PinnedWeights:
        values = [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()]
        return PinnedWeights(self.base, self.model, values)

    def unrounded(self) -> contextlib.AbstractContextManager[PreTrainedModel]:
        """The model with the float32 weights in it, to save it."""
        values = [(rounded, parameter.data) for rounded, parameter in self._rounded]
        return PinnedWeights(self.base, self.model, values).applied()


def _moves_gradient_to(target: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """A hook that adds the gradient of a rounded copy to that of its float32 weight, so that sums are in float32."""

    def move(rounded: torch.Tensor) -> None:
        assert rounded.grad is not None
        gradient = rounded.grad.float()
        target.grad = gradient if target.grad is None else target.grad + gradient
        rounded.grad = None

    return move


class ValueHead:
    """A float32 linear layer from the last hidden state to one number, whose parameters are added to those of
    `weights`.

    It starts at zero: a new critic predicts 0 everywhere.
    """

    def __init__(self, weights: TrainableWeights) -> None:
        device = weights.base.device
        self.weight = nn.Parameter(torch.zeros(embedding_weight(weights.base.model).shape[1], device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))
        weights.parameters |= {f"{VALUE_HEAD}.weight": self.weight, f"{VALUE_HEAD}.bias": self.bias}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """From hidden states `[N, hidden]` to values `[N]`."""
        return hidden.float() @ self.weight + self.bias


def tree_over_same_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """A new tree of modules over the same tensors as `model`."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())})
