"""The model of the fake backend: a bigram softmax over bytes, with losses, gradients, AdamW and sampling in numpy.

The logits of the next token are row `previous` of one table, `base + trained`. The base part is a fixed function of the
model's name that favours printable text and ends a sequence after some thirty tokens; the trained part starts at zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cookbook.backends.fake.tokenizer import EOS_TOKEN, TOKEN_BYTES, VOCABULARY_SIZE
from cookbook.core.errors import BackendError
from cookbook.core.types import AdamParams, SampledSequence, SamplingParams, StopReason

Array = np.ndarray

LossTerms = tuple[Array, Array]
"""Per token: the loss and its derivative by the token's logprob."""


def base_logits(base_model: str) -> Array:
    """The frozen table of a base model, `[previous, next]`."""
    seed = int.from_bytes(hashlib.sha256(base_model.encode()).digest()[:8], "big")
    preference = np.full(VOCABULARY_SIZE, -8.0)
    preference[ord("!") : ord("~") + 1] = -1.0
    for first, last in ("09", "AZ", "az"):
        preference[ord(first) : ord(last) + 1] = 0.0
    preference[[ord(" "), ord("\n"), EOS_TOKEN]] = [1.0, -1.0, 1.0]
    return preference + 0.5 * np.random.default_rng(seed).standard_normal((VOCABULARY_SIZE, VOCABULARY_SIZE))


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class TokenLoss:
    """A built-in loss: which per-token inputs it needs, its settings with their defaults, and its terms."""

    inputs: tuple[str, ...]
    config: Mapping[str, float]
    terms: Callable[[Array, Mapping[str, Array], Mapping[str, float]], LossTerms]


def _cross_entropy(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> LossTerms:
    return -inputs["weights"] * logprobs, -inputs["weights"]


def _importance_sampling(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> LossTerms:
    loss = -inputs["weights"] * np.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]
    return loss, loss


def _ppo(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> LossTerms:
    ratio = np.exp(logprobs - inputs["logprobs"])
    surrogate = ratio * inputs["advantages"]
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"]) * inputs["advantages"]
    value, slope = np.minimum(surrogate, clipped), np.where(surrogate <= clipped, surrogate, 0.0)
    if dual_clip := config.get("dual_clip"):
        floor = dual_clip * inputs["advantages"]
        binds = (inputs["advantages"] < 0) & (value < floor)
        value, slope = np.where(binds, floor, value), np.where(binds, 0.0, slope)
    return -inputs["weights"] * value, -inputs["weights"] * slope


def _cispo(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> LossTerms:
    ratio = np.exp(logprobs - inputs["logprobs"])
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    slope = -inputs["weights"] * clipped * inputs["advantages"]
    return slope * logprobs, slope


def _dro(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> LossTerms:
    gap = logprobs - inputs["logprobs"]
    loss = -inputs["weights"] * (inputs["advantages"] * logprobs - config["beta"] / 2 * gap**2)
    return loss, -inputs["weights"] * (inputs["advantages"] - config["beta"] * gap)


def _gspo(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> LossTerms:
    loss, slope, of_token, length = _sequence_surrogate(logprobs, inputs, config)
    return loss, (np.bincount(of_token, slope) / length)[of_token]  # every token moves the ratio of its sequence


def _gspo_token(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> LossTerms:
    loss, slope, _, _ = _sequence_surrogate(logprobs, inputs, config)
    return loss, slope


def _sequence_surrogate(
    logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]
) -> tuple[Array, Array, Array, Array]:
    """The clipped surrogate of each token at its sequence's ratio, its derivative by the log ratio, and per token its
    sequence; the length of each sequence."""
    _, of_token = np.unique(inputs["datum"], return_inverse=True)
    length = np.bincount(of_token)
    log_ratio = (np.bincount(of_token, logprobs - inputs["logprobs"]) / length)[of_token]
    loss, slope = _ppo(log_ratio, {**inputs, "logprobs": np.zeros_like(log_ratio)}, config)
    return loss, slope, of_token, length


_RL_INPUTS = ("target_tokens", "logprobs", "advantages")

LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(("target_tokens",), {}, _cross_entropy),
    "importance_sampling": TokenLoss(_RL_INPUTS, {}, _importance_sampling),
    "ppo": TokenLoss(_RL_INPUTS, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 0.0}, _ppo),
    "dro": TokenLoss(_RL_INPUTS, {"beta": 0.05}, _dro),
    "gspo": TokenLoss(_RL_INPUTS, {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}, _gspo),
    "gspo_token": TokenLoss(_RL_INPUTS, {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}, _gspo_token),
    "cispo": TokenLoss(_RL_INPUTS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, _cispo),
}


def target_logprobs(logits: Array, previous: Array, targets: Array, temperature: float = 1.0) -> Array:
    """The logprob of each target after its previous token, shape `[tokens]`."""
    rows, row_of_token = np.unique(previous, return_inverse=True)
    return log_softmax(logits[rows] / temperature)[row_of_token, targets]


def logits_gradient(logits: Array, previous: Array, targets: Array, slopes: Array, temperature: float = 1.0) -> Array:
    """The gradient by the table of a loss whose derivative by each target's logprob is `slopes`."""
    rows, row_of_token = np.unique(previous, return_inverse=True)
    gradient = np.zeros_like(logits)
    np.add.at(gradient, (previous, targets), slopes)
    gradient[rows] -= (
        np.exp(log_softmax(logits[rows] / temperature)) * np.bincount(row_of_token, slopes, len(rows))[:, None]
    )
    return gradient / temperature


@dataclass
class TrainedWeights:
    """The trainable table with its gradient and AdamW moments. The gradient accumulates until `adam_step`."""

    table: Array = field(default_factory=lambda: np.zeros((VOCABULARY_SIZE, VOCABULARY_SIZE)))
    gradient: Array = field(init=False)
    first_moment: Array = field(init=False)
    second_moment: Array = field(init=False)
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.gradient = np.zeros_like(self.table)
        self.first_moment = np.zeros_like(self.table)
        self.second_moment = np.zeros_like(self.table)
        self.steps = 0

    def step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW step and its metrics. A gradient that is not finite is dropped, and the step with it.

        Raises:
            ConfigError: a value of `params` is out of range.
            BackendError: the step made weights that are not finite.
        """
        params.check()
        if not np.isfinite(self.gradient).all():
            self.gradient = np.zeros_like(self.table)
            return {"grad_norm": 0.0, "skipped_steps": 1.0}
        with np.errstate(over="ignore", invalid="ignore"):
            norm = self.adam_step(params)
        self.check_finite("optim_step")
        return {"grad_norm": norm, "skipped_steps": 0.0}

    def adam_step(self, params: AdamParams) -> float:
        """AdamW (Loshchilov & Hutter 2019, algorithm 2) after clipping by global norm. Returns the norm before
        clipping."""
        norm = float(np.linalg.norm(self.gradient))
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            self.gradient *= params.grad_clip_norm / norm
        self.steps += 1
        self.first_moment = params.beta1 * self.first_moment + (1 - params.beta1) * self.gradient
        self.second_moment = params.beta2 * self.second_moment + (1 - params.beta2) * self.gradient**2
        mean = self.first_moment / (1 - params.beta1**self.steps)
        scale = np.sqrt(self.second_moment / (1 - params.beta2**self.steps)) + params.eps
        self.table = self.table * (1 - params.learning_rate * params.weight_decay) - params.learning_rate * mean / scale
        self.gradient = np.zeros_like(self.table)
        return norm

    def check_finite(self, operation: str) -> None:
        """Raises BackendError where a weight is NaN or infinite."""
        if not np.isfinite(self.table).all():
            raise BackendError(
                f"{operation}: the weights are no longer finite; lower the learning rate and go back to an earlier save"
            )


@dataclass(frozen=True)
class NextToken:
    """The next token after every token: untruncated `logprobs` and truncated `cumulative` probabilities."""

    logprobs: Array
    cumulative: Array

    @classmethod
    def from_logits(cls, logits: Array, temperature: float, top_p: float, top_k: int) -> NextToken:
        logprobs = log_softmax(logits / (temperature or 1.0))
        order = np.argsort(-logprobs, axis=1, kind="stable")
        ranked = np.exp(np.take_along_axis(logprobs, order, axis=1))
        kept = 1 if temperature == 0 else top_k
        if kept > 0:
            ranked[:, kept:] = 0.0
            ranked /= ranked.sum(axis=1, keepdims=True)
        if top_p < 1:
            ranked[ranked.cumsum(axis=1) - ranked >= top_p] = 0.0
        probabilities = np.empty_like(ranked)
        np.put_along_axis(probabilities, order, ranked, axis=1)
        cumulative = probabilities.cumsum(axis=1)
        return cls(logprobs, cumulative / cumulative[:, -1:])


def draw(
    next_token: NextToken, last_prompt_token: int, generators: Sequence[np.random.Generator], params: SamplingParams
) -> list[SampledSequence]:
    """One sequence per generator, all drawn together by inverse-transform sampling."""
    uniforms = np.stack([generator.random(params.max_tokens) for generator in generators])
    stop_tokens = [stop for stop in params.stop if isinstance(stop, int)]
    stop_texts = [stop.encode() for stop in params.stop if isinstance(stop, str)]
    count = len(generators)
    tokens = np.zeros((count, params.max_tokens), dtype=np.int64)
    lengths = np.full(count, params.max_tokens)
    reasons: list[StopReason] = ["length"] * count
    texts = [bytearray() for _ in range(count)]
    previous = np.full(count, last_prompt_token)
    running = np.arange(count)
    for position in range(params.max_tokens):
        chosen = (next_token.cumulative[previous[running]] <= uniforms[running, position, None]).sum(axis=1)
        tokens[running, position] = previous[running] = chosen
        stopped = np.isin(chosen, stop_tokens)
        if stop_texts:
            for i, (row, token) in enumerate(zip(running, chosen, strict=True)):
                texts[row] += TOKEN_BYTES[token]
                stopped[i] |= any(stop in texts[row] for stop in stop_texts)
        at_eos = chosen == EOS_TOKEN
        for row, is_eos in zip(running[stopped | at_eos], at_eos[stopped | at_eos], strict=True):
            lengths[row], reasons[row] = position + 1, "eos" if is_eos else "stop"
        running = running[~(stopped | at_eos)]
        if not len(running):
            break
    sequences = []
    for row, length, reason in zip(tokens, lengths, reasons, strict=True):
        sequence = row[:length]
        logprobs = next_token.logprobs[np.concatenate([[last_prompt_token], sequence[:-1]]), sequence]
        sequences.append(SampledSequence(sequence.tolist(), logprobs.tolist(), reason))
    return sequences
