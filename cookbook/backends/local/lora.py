"""LoRA adapters: which layers get one, how they are built, saved in peft's format, and merged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cookbook.backends.local.experts import ExpertAdapter, adapt, adapters_of, can_adapt, expert_stacks
from cookbook.backends.local.model import BaseModel
from cookbook.backends.local.weights import PinnedWeights, TrainableWeights, tree_over_same_tensors
from cookbook.core.errors import BackendError

_ADAPTER = "default"

_OLD_EXPERT_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Layers of experts in checkpoints from before transformers 5. In models with experts peft takes these names in
`target_modules` for those of experts and leaves out dense layers that have them."""

_ROUTER = re.compile("router|gating", re.IGNORECASE)


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer that gets an adapter, or the experts of a layer, whose every stack of weights gets one."""

    name: str
    module: nn.Module
    stacks: tuple[str, ...] = ()


def lora_targets(model: PreTrainedModel) -> list[LoraTarget]:
    """Every linear layer and all experts, in the order of the model.

    Not the output layer, nothing that text does not go through, such as the layers that read images, and no router:
    neither layers that choose experts nor those that weigh a shared one.

    Raises:
        BackendError: the model has experts whose weights are stored in a way that is not known.
    """
    decoder = set(model.get_decoder().modules())
    modules = dict(model.named_modules())
    experts = {name: tuple(stacks) for name, module in modules.items() if (stacks := expert_stacks(module))}
    counts = {name.rpartition(".")[0]: len(next(modules[name].parameters())) for name in experts}
    targets = []
    for name, module in modules.items():
        linear = isinstance(module, nn.Linear | Conv1D)
        if module not in decoder or _is_router(name, modules, counts):
            continue
        if linear or name in experts:
            targets.append(LoraTarget(name, module, experts.get(name, ())))
        matrices = [values for values in module.parameters(recurse=False) if values.ndim > 1]
        if not linear and matrices and "expert" in type(module).__name__.lower() and not can_adapt(module):
            raise BackendError(
                f"a {type(model).__name__} has experts of type {type(module).__name__}, which have no adapter in the "
                "local backend; set lora.rank=null to train every weight, or choose another model"
            )
    return targets


def _is_router(name: str, modules: Mapping[str, nn.Module], num_experts: Mapping[str, int]) -> bool:
    """Whether a layer chooses or weighs experts: it or a module that it is in is called a router, or beside experts,
    alone or in a module that is called a gate, it gives one number for each of them, or one for all."""
    parts = name.split(".")
    path = [modules[".".join(parts[: end + 1])] for end in range(len(parts))]
    if any(_ROUTER.search(word) for word in [*parts, *(type(module).__name__ for module in path)]):
        return True
    beside = ".".join(parts[:-2] if len(parts) > 1 and "gate" in parts[-2].lower() else parts[:-1])
    layer = path[-1]
    return beside in num_experts and isinstance(layer, nn.Linear) and layer.out_features in (1, num_experts[beside])


class LoraWeights(TrainableWeights):
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685) on all `lora_targets`, kept in float32."""

    def __init__(self, base: BaseModel, rank: int, alpha: float, seed: int) -> None:
        model = tree_over_same_tensors(base.model)
        targets = lora_targets(model)
        self.config = _peft_config(model, targets, rank, alpha, base.name)
        generator = torch.Generator().manual_seed(seed)
        parameters = {}

        def new_parameter(prefix: str, part: str, shape: Sequence[int]) -> nn.Parameter:
            parameter = nn.Parameter(_initial(part, shape, generator).to(base.device))
            parameters[f"base_model.model.{prefix}.{part}.weight"] = parameter
            return parameter

        for target in targets:
            if target.stacks:
                adapters = {stack: ExpertAdapter(target.module, stack, rank, alpha / rank) for stack in target.stacks}
                # peft wraps the stacks one around the other, the first innermost.
                for outer, adapter in zip(reversed(range(len(adapters))), adapters.values(), strict=True):
                    for part, shape in adapter.shapes.items():
                        adapter.weights[part] = new_parameter(target.name + ".base_layer" * outer, part, shape)
                adapt(target.module, adapters)
            else:
                layer = _lora_linear(target.module, self.config)
                for part in ("lora_A", "lora_B"):
                    linear = getattr(layer, part)[_ADAPTER]
                    linear.weight = new_parameter(target.name, part, linear.weight.shape)
                model.set_submodule(target.name, layer)
        super().__init__(base, model, parameters)


def _lora_linear(module: nn.Module, config: LoraConfig) -> LoraLinear:
    # On the meta device peft's own initialisation draws nothing from the global generator.
    with torch.device("meta"):
        return LoraLinear(
            module,
            _ADAPTER,
            config,
            r=config.r,
            lora_alpha=config.lora_alpha,
            is_target_conv_1d_layer=isinstance(module, Conv1D),
        )


def _peft_config(
    model: PreTrainedModel, targets: Sequence[LoraTarget], rank: int, alpha: float, base_name: str
) -> LoraConfig:
    """The settings with which plain peft builds the same layers."""
    has_experts = any(target.stacks for target in targets)
    modules, parameters = set(), set()
    for target in targets:
        if target.stacks:
            parameters |= {f"{target.name}.{stack}" for stack in target.stacks}
        elif has_experts and target.name.rpartition(".")[2] in _OLD_EXPERT_NAMES:
            parameters.add(f"{target.name}.weight")
        else:
            modules.add(target.name)
    return LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # pyright: ignore[reportArgumentType] - any number scales
        target_modules=_shortened(modules, [name for name, _ in model.named_modules()]),
        target_parameters=_shortened(parameters, [name for name, _ in model.named_parameters()]) or None,
        fan_in_fan_out=any(isinstance(target.module, Conv1D) for target in targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
    )


def _shortened(names: set[str], among: Sequence[str]) -> list[str]:
    """Endings that fit these names and no other: the last word, else what follows the layer's number, else all."""
    shortened = set()
    for name in names:
        for ending in (name.rpartition(".")[2], re.sub(r".*\.\d+\.", "", name), name):
            if all(other in names for other in among if f".{other}".endswith(f".{ending}")):
                shortened.add(ending)
                break
    return sorted(shortened)


def merged_adapter(pinned: PinnedWeights) -> PinnedWeights:
    """Merge an adapter into the base weights, W + scale * B A, so that the plain model runs.

    Weights without an adapter are returned unchanged.

    Meant for float32. In bfloat16 the sum of a weight and a small update rounds to the weight, and the update is lost.
    """
    with torch.no_grad(), pinned.applied() as model:
        values: list[tuple[nn.Parameter, torch.Tensor]] = []
        for layer in model.modules():
            if isinstance(layer, LoraLinear):
                weight = layer.get_base_layer().weight
                assert isinstance(weight, nn.Parameter)
                values.append((weight, weight + layer.get_delta_weight(_ADAPTER)))
        values += [(adapter.stack, adapter.stack + adapter.delta()) for adapter in adapters_of(model)]
    return PinnedWeights(pinned.base, pinned.base.model, values) if values else pinned


def _initial(part: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """peft's initial values: A uniform in +-1/sqrt(inputs), which is kaiming_uniform with a = sqrt(5); B zero."""
    if part == "lora_B":
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
