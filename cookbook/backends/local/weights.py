"""Trainable weights of a session, and the pinned copies that samplers use.

Every session has its own tree of modules over the base model's tensors, so sessions do not affect one another:
what they share is never written, and what they write is never shared.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers import PreTrainedModel

from cookbook.backends.local.model import BaseModel, embedding_weight, quiet_transformers

_ADAPTER = "default"

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


class LoraWeights(TrainableWeights):
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685) on every linear layer but the output layer, kept in float32."""

    def __init__(self, base: BaseModel, rank: int, alpha: float, seed: int) -> None:
        config = LoraConfig(
            r=rank,
            lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # pyright: ignore[reportArgumentType] - any number scales
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base.name,
        )
        # Created on the meta device, so that peft's own initialisation draws nothing from the global generator.
        with quiet_transformers():
            peft_model = get_peft_model(_tree_over_same_tensors(base.model), config, _ADAPTER, low_cpu_mem_usage=True)
        generator = torch.Generator().manual_seed(seed)
        parameters = {}
        for layer_name, layer in peft_model.named_modules():
            if isinstance(layer, LoraLinear):
                for part in ("lora_A", "lora_B"):
                    linear = getattr(layer, part)[_ADAPTER]
                    linear.weight = nn.Parameter(_initial(part, linear.weight.shape, generator).to(base.device))
                    parameters[f"{layer_name}.{part}.weight"] = linear.weight
        self.config = config
        model = peft_model.get_base_model()
        assert isinstance(model, PreTrainedModel)
        super().__init__(base, model, parameters)


class FullWeights(TrainableWeights):
    """A float32 copy of every weight of the base model."""

    def __init__(self, base: BaseModel) -> None:
        model = copy.deepcopy(base.model).float().requires_grad_(True)
        super().__init__(base, model, dict(model.named_parameters()))


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


def merged_adapter(pinned: PinnedWeights) -> PinnedWeights:
    """Merge an adapter into the base weights, W + scale * B A, so that the plain model runs.

    Weights without an adapter are returned unchanged.

    Meant for float32. In bfloat16 the sum of a weight and a small update rounds to the weight, and the update is lost.
    """
    with torch.no_grad(), pinned.applied() as model:
        layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
        if not layers:
            return pinned
        values = []
        for layer in layers:
            weight = layer.get_base_layer().weight
            assert isinstance(weight, nn.Parameter)
            values.append((weight, weight + layer.get_delta_weight(_ADAPTER)))
    return PinnedWeights(pinned.base, pinned.base.model, values)


def _tree_over_same_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """A new tree of modules over the same tensors as `model`."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())})


def _initial(part: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """peft's initial values: A uniform in +-1/sqrt(inputs), which is kaiming_uniform with a = sqrt(5); B zero."""
    if part == "lora_B":
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
