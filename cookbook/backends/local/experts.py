"""LoRA on a mixture of experts: the layer's weights are stacks `[experts, ...]`, and each expert has its own A and B.

peft adds such an adapter to the weights of all experts before every pass. That costs a copy of them per layer, and in
bfloat16 a small update is lost in the sum. Here each expert's rows go through W and through B A separately, as in a
dense LoRA layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_LOW_RANK = "low_rank"
"""The name of this forward pass among transformers' implementations of experts."""

_INTERFACE = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed"}
"""What transformers sets on experts whose forward pass can be exchanged."""

_GROUPED_MM = getattr(nn.functional, "grouped_mm", None)
"""The kernel for all experts at once, which torch has since 2.10."""


def expert_stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of all experts of a layer, if the module holds them: `[experts, ...]` by name."""
    if "expert" not in type(module).__name__.lower():
        return {}
    return {name: values for name, values in module.named_parameters(recurse=False) if values.ndim == 3}


class ExpertAdapter:
    """The adapter of one stack of expert weights, in peft's layout: A `[experts * rank, inputs]` and B
    `[outputs, rank * experts]`."""

    def __init__(self, experts: Any, name: str, rank: int, scale: float) -> None:
        self.stack: nn.Parameter = getattr(experts, name)
        self.is_transposed: bool = experts.is_transposed
        self.scale = scale
        self.num_experts, *sides = self.stack.shape
        inputs, outputs = sides if self.is_transposed else reversed(sides)
        self.shapes = {"lora_A": (self.num_experts * rank, inputs), "lora_B": (outputs, self.num_experts * rank)}
        self.weights: dict[str, nn.Parameter] = {}
        """The parameters, by the names of `shapes`."""

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A as `[experts, inputs, rank]` and B as `[experts, rank, outputs]`."""
        a = self.weights["lora_A"].unflatten(0, (self.num_experts, -1))
        b = self.weights["lora_B"].unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        return a.transpose(1, 2), b.contiguous().transpose(1, 2)

    def delta(self) -> torch.Tensor:
        """What the adapter adds to the stack."""
        a, b = self.factors()
        delta = self.scale * (a @ b)
        return (delta if self.is_transposed else delta.transpose(1, 2)).to(self.stack.dtype)


def can_adapt(experts: nn.Module) -> bool:
    """Whether `adapt` can change the forward pass of these experts."""
    if not vars(experts).keys() >= _INTERFACE:
        return False
    return set(expert_stacks(experts)) == {"gate_up_proj" if experts.has_gate else "up_proj", "down_proj"}


def adapt(experts: Any, adapters: Mapping[str, ExpertAdapter]) -> None:
    """Make experts run with an adapter for each of their stacks."""
    experts.config._experts_implementation = _LOW_RANK
    experts.adapters = dict(adapters)


def adapters_of(model: nn.Module) -> list[ExpertAdapter]:
    """The adapters of all experts of a model."""
    return [adapter for module in model.modules() for adapter in vars(module).get("adapters", {}).values()]


def _low_rank(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Hidden states `[tokens, hidden]` through the k experts that the router chose for each, `[tokens, k]`, weighted
    and summed."""
    choices = top_k_index.flatten()
    order = choices.argsort(stable=True)
    rows, chosen = hidden_states[order // top_k_index.shape[1]], choices[order]
    counts = torch.bincount(choices, minlength=experts.num_experts)
    if experts.has_gate:
        inner = experts._apply_gate(_project(experts, "gate_up_proj", rows, chosen, counts))
    else:
        inner = experts.act_fn(_project(experts, "up_proj", rows, chosen, counts))
    outer = _project(experts, "down_proj", inner, chosen, counts)
    if experts.has_post_expert_norm:
        outer = experts.post_expert_norm(outer)
    outer = (outer * top_k_weights.flatten()[order, None])[order.argsort()]
    return outer.unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(_LOW_RANK, _low_rank)


def _project(experts: Any, name: str, rows: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert through one linear map per expert, and through its adapter in the adapter's dtype."""
    weight: torch.Tensor = getattr(experts, name)
    result = _grouped(rows.to(weight.dtype), weight if experts.is_transposed else weight.transpose(1, 2), counts)
    if experts.has_bias:
        result = result + getattr(experts, f"{name}_bias")[chosen]
    adapter: ExpertAdapter = experts.adapters[name]
    a, b = adapter.factors()
    update = _grouped(_grouped(rows.to(a.dtype), a, counts), b, counts)
    return (result + adapter.scale * update).to(result.dtype)


def _grouped(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`[N, inputs]` sorted by expert, times `[experts, inputs, outputs]`: `[N, outputs]`."""
    if _GROUPED_MM is not None and _kernel_takes(rows, weights):
        return _GROUPED_MM(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def _kernel_takes(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """The kernel needs rows of whole 16 bytes, and on CUDA compute capability 8."""
    aligned = all(size * rows.itemsize % 16 == 0 for size in weights.shape[1:])
    if rows.device.type == "cuda":
        return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return aligned and rows.device.type == "cpu"
