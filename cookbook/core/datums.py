"""Builds datums from tokens. The only place where tokens are shifted: the input is `tokens[:-1]`, the target
`tokens[1:]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cookbook.core.errors import DataError
from cookbook.core.rollouts import Trajectory
from cookbook.core.types import Datum, ModelInput

Truncation = Literal["drop", "left", "right"]


@dataclass
class _Segment:
    """Consecutive turns, where the prompt of each turn begins with all tokens before it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs if logprobs is not None else [0.0] * len(tokens))
        self.sampled.extend([logprobs is not None] * len(tokens))


def policy_datums(trajectory: Trajectory, advantage: float) -> list[Datum]:
    """The datums of one trajectory for a policy loss.

    Every sampled token, the ending one included, has weight 1 and the trajectory's advantage; prompt tokens have 0 and
    0. Turns whose prompt continues the tokens so far share one datum; where a turn breaks the prefix, a new one starts.
    Text is never tokenized again.
    """
    segments: list[_Segment] = []
    for turn in trajectory.transitions:
        known = len(segments[-1].tokens) if segments else 0
        if not segments or tuple(segments[-1].tokens) != turn.prompt_tokens[:known]:
            segments.append(_Segment())
            known = 0
        segments[-1].extend(turn.prompt_tokens[known:], None)
        segments[-1].extend(turn.completion_tokens, turn.sampling_logprobs)
    return [_policy_datum(segment, advantage) for segment in segments]


def _policy_datum(segment: _Segment, advantage: float) -> Datum:
    sampled = np.asarray(segment.sampled[1:], dtype=np.float32)
    return Datum(
        ModelInput.from_ints(segment.tokens[:-1]),
        {
            "target_tokens": np.asarray(segment.tokens[1:]),
            "logprobs": np.asarray(segment.logprobs[1:], dtype=np.float32),
            "advantages": advantage * sampled,
            "weights": sampled,
        },
    )


def supervised_datum(
    tokens: Sequence[int], loss_mask: Sequence[bool], max_length: int, truncation: Truncation
) -> Datum | None:
    """The datum of one conversation for cross-entropy: weight 1 where `loss_mask` is true of the target, else 0.

    Args:
        tokens: the conversation, as `Renderer.supervised` gives it.
        loss_mask: for each token, whether it is trained on. The first token never is: nothing predicts it.
        max_length: the most tokens to keep, at least 2.
        truncation: how to shorten a longer conversation: "drop" skips it, "left" keeps its last `max_length` tokens,
            "right" keeps its first ones.

    Returns:
        None if the conversation is dropped, or if no token to train on is left of it.

    Raises:
        DataError: `tokens` and `loss_mask` differ in length, or `max_length` is below 2.
    """
    if len(tokens) != len(loss_mask):
        raise DataError(
            f"supervised_datum: {len(tokens)} tokens and a loss_mask of {len(loss_mask)}; their lengths must be equal"
        )
    if max_length < 2:
        raise DataError(
            f"supervised_datum: max_length is {max_length}; it must be at least 2, an input token and its target"
        )
    if len(tokens) > max_length:
        if truncation == "drop":
            return None
        kept = slice(-max_length, None) if truncation == "left" else slice(max_length)
        tokens, loss_mask = tokens[kept], loss_mask[kept]
    if not any(loss_mask[1:]):
        return None
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": np.asarray(tokens[1:]), "weights": np.asarray(loss_mask[1:], dtype=np.float32)},
    )


def with_inputs(datum: Datum, **arrays: np.ndarray) -> Datum:
    """The datum with per-token arrays added or replaced."""
    return Datum(datum.model_input, {**datum.loss_fn_inputs, **arrays})


def only_inputs(datum: Datum, keys: Sequence[str]) -> Datum:
    """The datum with the per-token arrays that a loss reads, and no others."""
    return Datum(datum.model_input, {key: datum.loss_fn_inputs[key] for key in keys})


def scale_weights(data: Sequence[Datum], loss_agg: str, max_tokens: int) -> list[Datum]:
    """Scale weights so that a loss's sum becomes the mean that `loss_agg` names, over exactly the given datums.

    With n datums, of which datum i trains on t_i tokens:

    * token_mean: every token weighs 1 / sum(t) (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8);
    * sequence_mean: a token of datum i weighs 1 / (n * t_i) (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3);
    * constant: every token weighs 1 / (n * max_tokens) (Dr.GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.1).

    A datum whose weights are all zero contributes nothing, but is one of the n. Pass the whole batch of one
    `optim_step`; any split of it afterwards gives the same gradient.
    """
    counts = [float(np.count_nonzero(datum.loss_fn_inputs["weights"])) for datum in data]
    total = sum(counts)
    scaled = []
    for datum, count in zip(data, counts, strict=True):
        if count == 0:
            scaled.append(datum)
            continue
        if loss_agg == "token_mean":
            scale = 1 / total
        elif loss_agg == "sequence_mean":
            scale = 1 / (len(data) * count)
        elif loss_agg == "constant":
            scale = 1 / (len(data) * max_tokens)
        else:
            raise ValueError(f"loss_agg={loss_agg}")
        scaled.append(with_inputs(datum, weights=datum.loss_fn_inputs["weights"] * scale))
    return scaled
