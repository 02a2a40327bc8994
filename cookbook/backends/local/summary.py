"""Summary of what a session trains: how many parameters, in which kinds of layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from cookbook.backends.local.model import output_layer
from cookbook.core.types import TrainableSummary

_KINDS = {
    "attention": "attention|attn",
    "router": "router|gating",
    "experts": "experts",
    "embeddings": "embedding",
    "norms": "norm",
    "mlp": "mlp|feedforward",
}
"""Kinds of layers, each with what the class of such a layer, or of one around it, is called. The first that fits."""


def summarize(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> TrainableSummary:
    """The trained parameters, by their names in saves, beside all parameters of the model."""
    kinds: Counter[str] = Counter()
    added = 0
    of_model = dict(model.named_parameters())
    for name, parameter in parameters.items():
        kinds[_kind(model, name)] += parameter.numel()
        added += 0 if name in of_model else parameter.numel()
    return TrainableSummary(dict(kinds), added + sum(parameter.numel() for parameter in of_model.values()))


def _kind(model: PreTrainedModel, name: str) -> str:
    """The kind of layer that a parameter, or the adapter of one, belongs to."""
    module: nn.Module = model
    classes = []
    for part in name.removeprefix("base_model.model.").split("."):
        child = dict(module.named_children()).get(part)
        if child is None:
            break
        module = child
        classes.append(type(module).__name__)
    if module is output_layer(model):
        return "output layer"
    if module is model:
        return "value head"
    for kind, pattern in _KINDS.items():
        if any(re.search(pattern, each, re.IGNORECASE) for each in classes[1:]):
            return kind
    return "other"
