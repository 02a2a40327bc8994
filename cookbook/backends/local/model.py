"""Base models: loading, checks, and the logprobs of given tokens."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from cookbook.backends.base_models import base_model_source, load_failure
from cookbook.core.errors import BackendError, ConfigError
from cookbook.core.turns import end_of_turn_tokens, set_generation_eos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOGIT_ELEMENTS = 1 << 24
"""Logits are computed in chunks of at most this many (64 MiB in float32)."""


@dataclass(frozen=True, eq=False)
class BaseModel:
    """A frozen model that sessions share, its tokenizer, and the limits that requests are checked against.

    `tokenizer` is for callers. The engine's thread has its own copy, because a tokenizer must not be used by two
    threads at once.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine_tokenizer: PreTrainedTokenizerBase
    context_length: int
    context_note: str
    """Why the context is shorter than that of the model, in brackets, or empty."""
    vocabulary_size: int
    eos_token_ids: frozenset[int]

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA, else MPS, else the CPU.

    Raises:
        ConfigError: the device does not exist here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"backend device={device!r} is not available on this machine; use 'auto', 'cpu', 'cuda' or 'mps'"
        ) from error


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 elsewhere.

    Raises:
        ConfigError: any other name than auto, float32, bfloat16.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"backend dtype={dtype!r}; use 'auto', 'float32' or 'bfloat16'")
    return torch.float32 if dtype == "float32" else torch.bfloat16


def load_base_model(name: str, device: torch.device, dtype: torch.dtype) -> BaseModel:
    """Load a base model and freeze it.

    Raises:
        ConfigError, BackendError: see `check_base_model`; also a model whose architecture the engine cannot run
            exactly.
    """
    with quiet_transformers():
        source = base_model_source(name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            config = AutoConfig.from_pretrained(source)
            _dequantize(name, config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=dtype, output_loading_info=True
            )
        except BackendError:
            raise
        except Exception as error:  # transformers raises nearly any type for an unloadable folder
            raise load_failure(name, error) from error
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):  # transformers would fill them with random values
        raise BackendError(
            f"base model {name!r}: its weights lack {len(missing)} tensors of its architecture, such as {missing[0]}"
        )
    nn.Module.to(model, device)
    model.eval().requires_grad_(False)
    context_length, context_note = _context(model.config.get_text_config())
    if model.generation_config is not None:
        set_generation_eos(tokenizer, model.generation_config.eos_token_id)
    vocabulary_size = len(embedding_weight(model))
    base = BaseModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        engine_tokenizer=copy.deepcopy(tokenizer),
        context_length=context_length,
        context_note=context_note,
        vocabulary_size=vocabulary_size,
        eos_token_ids=frozenset(token for token in end_of_turn_tokens(tokenizer) if token < vocabulary_size),
    )
    _check_architecture(base)
    return base


def _dequantize(name: str, config: PreTrainedConfig) -> None:
    """Have weights published in MXFP4, such as the experts of gpt-oss, or in FP8 loaded in the model's dtype: packed
    weights cannot be trained, and adapters would leave them out.

    Raises:
        BackendError: the weights are quantised in another way.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    if quantization["quant_method"] not in ("mxfp4", "fp8"):
        raise BackendError(
            f"base model {name!r} is quantised with {quantization['quant_method']}; the local backend trains full "
            "weights, and those in MXFP4 and FP8, which it dequantises; choose the model's unquantised version"
        )
    quantization["dequantize"] = True


def _context(config: PreTrainedConfig) -> tuple[int, str]:
    """The longest sequence, and a note where it is shorter than what the model was made for.

    With longrope every position of a sequence depends on whether its length exceeds the original context: the result
    would depend on the rest of the batch, and a sample would change behind itself as it grows.
    """
    longest = config.max_position_embeddings
    schemes = getattr(config, "rope_parameters", None) or {}
    for scheme in [schemes, *schemes.values()]:
        if isinstance(scheme, dict) and scheme.get("rope_type") == "longrope":
            original = scheme["original_max_position_embeddings"]
            if original < longest:
                note = f" (of {longest}: beyond {original} its longrope changes all positions, which is not supported)"
                return original, note
    return longest, ""


def _check_architecture(base: BaseModel) -> None:
    layer_types = set(getattr(base.model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if not layer_types <= {"full_attention", "sliding_attention"}:
        raise BackendError(
            f"base model {base.name!r} has layers of type {', '.join(sorted(layer_types))}; "
            "the local backend runs attention layers only"
        )
    probe = torch.tensor([[0, base.vocabulary_size - 1]], device=base.device)
    with torch.inference_mode():
        ours = logits_function(base.model)(hidden_states(base.model, probe))
        if not torch.allclose(ours, base.model(input_ids=probe).logits):
            raise BackendError(
                f"base model {base.name!r} changes its logits after the output layer in a way that the local backend "
                "does not know; choose another model"
            )


def output_layer(model: PreTrainedModel) -> nn.Module:
    """The layer from hidden states to logits."""
    head = model.get_output_embeddings()
    if head is None:
        raise BackendError(
            f"a {type(model).__name__} has no output layer; the local backend runs causal language models"
        )
    return head


def logits_function(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function from last hidden states to logits: the output layer, then what the model's configuration says."""
    head, config = output_layer(model), model.config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = head(hidden)
        if divisor is not None:
            values = values / divisor
        if factor is not None:
            values = values * factor
        if cap is not None:
            values = torch.tanh(values / cap) * cap
        return values

    return logits


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """The input embedding, `[vocabulary, hidden]`."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def hidden_states(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states `[rows, length, hidden]` of right-padded rows.

    No mask is needed: causal attention does not see what is to the right.
    """
    return model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state


def token_logprobs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    flat_positions: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    position_of_target: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logprobs of given tokens, float32 `[N]`: of `targets[n]` at position `flat_positions[n]` of the flattened rows.

    `input_ids` `[rows, length]` is right-padded; `flat_positions` and `targets` are `[N]`. The output layer runs only
    at those positions, in chunks; with more than one chunk the backward pass recomputes the logits instead of keeping
    them.

    Where positions have several targets, `position_of_target` `[N]`, ascending, says at which of the `flat_positions`
    `[P]` each one is; the output layer still runs once per position.
    """
    hidden = hidden_states(model, input_ids).flatten(0, 1)[flat_positions]
    logits_of = logits_function(model)
    chunk = max(1, _LOGIT_ELEMENTS // len(embedding_weight(model)))
    if len(hidden) <= chunk:
        return _selected_logprobs(logits_of, hidden, targets, temperature, position_of_target)
    starts = list(range(0, len(hidden), chunk))
    first_targets = starts
    if position_of_target is not None:
        first_targets = torch.searchsorted(position_of_target, torch.tensor(starts, device=targets.device)).tolist()
    parts = []
    for start, first, end in zip(starts, first_targets, [*first_targets[1:], len(targets)], strict=True):
        rows = None if position_of_target is None else position_of_target[first:end] - start
        arguments = logits_of, hidden[start : start + chunk], targets[first:end], temperature, rows
        parts.append(checkpoint(_selected_logprobs, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts)


def _selected_logprobs(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    logits = logits_of(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    if rows is None:
        return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)
    return logits[rows, targets] - logits.logsumexp(-1)[rows]


def right_padded(rows: list[list[int]] | list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """int64 `[rows, longest]`, padded with token 0."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


def microbatches(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Split indices into batches of similar lengths and of at least one, whose padded size is within the budget."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, advice or warnings from transformers and peft inside the block."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
