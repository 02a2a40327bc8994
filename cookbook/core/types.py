"""Values that a loop and a backend exchange: numpy arrays and plain Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal

import numpy as np

from cookbook.core.errors import ConfigError, DataError

Role = Literal["policy", "critic"]

StopReason = Literal["eos", "stop", "length"]
"""Why a sequence ended: the model's end-of-sequence token, a requested stop string or token, or `max_tokens`."""

INTEGER_INPUTS = frozenset({"target_tokens"})


@dataclass(frozen=True)
class ModelInput:
    """A token sequence, stored as a tuple, so that it hashes by content."""

    tokens: tuple[int, ...]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls(tuple(int(token) for token in tokens))

    def to_ints(self) -> list[int]:
        return list(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def append(self, tokens: Sequence[int]) -> ModelInput:
        return ModelInput(self.tokens + tuple(int(token) for token in tokens))


@dataclass(frozen=True)
class Datum:
    """One training sequence: `model_input` of T tokens and per-token arrays of shape `[T]`.

    Position `i` predicts `loss_fn_inputs["target_tokens"][i]`. `target_tokens` is stored as int64, everything else as
    float32. For soft targets, as in distillation, `target_tokens` has shape `[T, K]`: K candidates per position. Only
    then may other arrays have that shape too.

    Raises:
        DataError: an array has another shape, holds something that is not a number, or holds a NaN.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        if self.model_input.length == 0:
            raise DataError("Datum: model_input is empty; a datum needs at least one token")
        arrays = {key: _per_token_array(key, values) for key, values in self.loss_fn_inputs.items()}
        length, targets = self.model_input.length, arrays.get("target_tokens")
        shapes = [(length,)]
        if targets is not None and targets.ndim == 2 and len(targets) == length and targets.size:
            shapes.append(targets.shape)
        for key, array in arrays.items():
            if array.shape not in shapes:
                raise DataError(
                    f"Datum: loss_fn_inputs[{key!r}] has shape {array.shape}, but model_input has {length} tokens; "
                    f"every per-token array must be exactly that long, here of shape {' or '.join(map(str, shapes))}"
                )
            if array.dtype == np.float32 and np.isnan(array).any():
                raise DataError(
                    f"Datum: loss_fn_inputs[{key!r}] holds a NaN at position {int(np.isnan(array).nonzero()[0][0])}"
                )
        object.__setattr__(self, "loss_fn_inputs", arrays)


def check_soft_targets(data: Sequence[Datum], loss_fn: str, accepted: bool) -> None:
    """Refuse soft targets for a loss that takes none, and weights whose shape is not that of the targets.

    Raises:
        DataError: naming the datum and the input.
    """
    for index, datum in enumerate(data):
        for key, array in datum.loss_fn_inputs.items():
            if array.ndim == 2 and not accepted:
                raise DataError(
                    f"datum {index}: loss_fn_inputs[{key!r}] has shape {array.shape}, but loss {loss_fn!r} takes one "
                    "target per position; use cross_entropy for soft targets"
                )
        targets, weights = (datum.loss_fn_inputs.get(key) for key in ("target_tokens", "weights"))
        if targets is not None and weights is not None and targets.shape != weights.shape:
            raise DataError(
                f"datum {index}: loss_fn_inputs['weights'] has shape {weights.shape}, but target_tokens has "
                f"{targets.shape}; soft targets need one weight each"
            )


def _per_token_array(key: str, values: object) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.int64 if key in INTEGER_INPUTS else np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"Datum: loss_fn_inputs[{key!r}] is not an array of numbers ({error}); give one number per token"
        ) from error


@dataclass
class AdamParams:
    """AdamW settings, all sent on every `optim_step`, so that every backend takes the same step.

    Also the schema of the `optim` section of a run's configuration.

    `grad_clip_norm` is the largest allowed global gradient norm; 0 turns clipping off.

    Raises:
        ConfigError: a value is not a finite number, or is out of range.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check the values again, which may have been set since; every backend does before it takes a step."""
        check_adam(vars(self), "AdamParams.")


def check_adam(values: Mapping[str, object], where: str) -> None:
    """Raises ConfigError unless the values of AdamParams are numbers in their range; `where` begins their names."""
    for name, value in values.items():
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        if name in ("beta1", "beta2"):
            fits, wanted = 0 <= number < 1, "in [0, 1)"
        elif name == "eps":
            fits, wanted = 0 < number < math.inf, "a finite number above 0"
        else:
            fits, wanted = 0 <= number < math.inf, "a finite number of at least 0"
        if not fits:
            raise ConfigError(f"{where}{name}={value}: must be {wanted}")


@dataclass(frozen=True)
class SamplingParams:
    """Settings of sampling.

    `temperature` 0 is greedy. `top_k` -1 and `top_p` 1 keep the whole distribution. A string in `stop` ends the
    sequence once its text contains it; an int in `stop` is a token id. The token that ends a sequence is part of it.
    Sample `j` of a request draws from a generator that is a function of (`seed`, `j`) alone; `seed` None
    means a new one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str | int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise DataError(f"SamplingParams: max_tokens is {self.max_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            raise DataError(f"SamplingParams: temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise DataError(f"SamplingParams: top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k == 0 or self.top_k < -1:
            raise DataError(f"SamplingParams: top_k is {self.top_k}; it must be -1 (off) or at least 1")


@dataclass(frozen=True)
class SampledSequence:
    """One completion: its tokens (the ending token included), their logprobs, and why it ended.

    `logprobs` are those of the distribution after temperature and before top_p/top_k truncation.
    For greedy sampling (temperature 0) they are those at temperature 1.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason


@dataclass(frozen=True)
class SampleResponse:
    """The answer to one `sample` call.

    `prompt_logprobs` has one value per prompt token, the first None. `topk_prompt_logprobs` has per prompt token the
    `k` likeliest (token, logprob) pairs, the first entry None.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """The answer to `forward` and `forward_backward`.

    `loss_fn_outputs` holds per datum `logprobs`, float32 in the shape of `target_tokens`. `metrics` are named
    `name:reduction`.

    `metrics["loss:sum"]` is the loss itself: the sum over tokens and datums.
    `logprobs` at a position whose weight is zero may be 0.0: backends need not compute what no loss reads.
    A critic's loss is `value`, and its outputs are `values`: its prediction of the return after each input token.
    """

    loss_fn_outputs: list[dict[str, np.ndarray]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimStepResponse:
    """The answer to `optim_step`.

    `metrics["grad_norm"]`, if reported, is the global norm before clipping. `metrics["skipped_steps"]`, if reported, is
    1 where the gradient was not finite: it was dropped, the weights are unchanged, and `grad_norm` is 0.
    """

    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainableSummary:
    """How many parameters a session trains.

    `kinds` counts them by kind of layer, such as attention, mlp and experts. `total` counts all parameters of the
    model, trained or not, an adapter included.
    """

    kinds: Mapping[str, int]
    total: int

    @property
    def trained(self) -> int:
        return sum(self.kinds.values())

    def as_dict(self) -> dict[str, object]:
        return {"parameters": self.trained, "of": self.total, "kinds": dict(self.kinds)}

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.kinds.items())
        return f"{self.trained:,} of {self.total:,} parameters ({self.trained / self.total:.2%}): {kinds}"


@dataclass(frozen=True)
class SaveResponse:
    """The path of a save, which `load_state` or `create_sampling_client` of the same service accepts."""

    path: str
