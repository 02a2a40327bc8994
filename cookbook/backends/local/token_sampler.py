"""The sampler of next tokens from logits: each row has its own settings and its own uniform number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cookbook.core.types import SamplingParams

_TRUNCATION_CANDIDATES = 256
"""The number of likeliest tokens that truncation looks at first: nearly always enough, and cheaper than a full sort."""

_LARGEST_UNIFORM = 1 - 2.0**-23
"""Keeps `uniform * total` below `total` in float32, so that a token is always found."""


def uniforms(seed: int, sample: int, count: int) -> np.ndarray:
    """The uniform numbers of one row, float32 `[count]`: a function of the request's seed and the sample's index alone.

    A counter-based generator (Philox, Salmon et al. 2011) keyed by the pair; more numbers only extend the row.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, sample], np.uint64)))
    return np.minimum(generator.random(count), _LARGEST_UNIFORM).astype(np.float32)


@dataclass(frozen=True)
class TokenSampler:
    """The sampling settings of R rows, as columns `[R]`.

    `temperature` is 1 for greedy rows; an unset `top_k` is the largest int64.
    """

    temperature: torch.Tensor
    greedy: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    truncated_rows: torch.Tensor
    any_greedy: bool
    all_temperature_one: bool

    @classmethod
    def for_rows(cls, params: Sequence[SamplingParams], device: torch.device) -> TokenSampler:
        greedy = torch.tensor([each.temperature == 0 for each in params])
        temperature = torch.tensor([each.temperature or 1.0 for each in params])
        top_k = torch.tensor([each.top_k if each.top_k > 0 else torch.iinfo(torch.int64).max for each in params])
        top_p = torch.tensor([each.top_p for each in params])
        return cls._make(temperature.to(device), greedy.to(device), top_k.to(device), top_p.to(device))

    @classmethod
    def _make(
        cls, temperature: torch.Tensor, greedy: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> TokenSampler:
        truncated = ((top_p < 1) | (top_k < torch.iinfo(torch.int64).max)) & ~greedy
        return cls(
            temperature,
            greedy,
            top_k,
            top_p,
            truncated.nonzero()[:, 0],
            bool(greedy.any()),
            bool((temperature == 1).all()),
        )

    def select(self, rows: torch.Tensor) -> TokenSampler:
        return self._make(self.temperature[rows], self.greedy[rows], self.top_k[rows], self.top_p[rows])

    def sample(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `[R]` and their logprobs after temperature, before truncation `[R]`, from float32 logits `[R, V]`.

        Inverse-transform sampling over the vocabulary in its own order: truncation zeroes
        probabilities of a row but moves none.
        """
        if not self.all_temperature_one:
            logits = logits / self.temperature[:, None]
        logprobs = logits.log_softmax(-1)
        probabilities = logprobs.exp()
        if len(self.truncated_rows):
            rows = self.truncated_rows
            probabilities[rows] = _truncate(probabilities[rows], self.top_k[rows], self.top_p[rows])
        cumulative = probabilities.cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
        if self.any_greedy:
            tokens = torch.where(self.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
        return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _truncate(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` likeliest tokens, and of those the smallest set of likeliest ones with `top_p` of their mass."""
    vocabulary = probabilities.shape[-1]
    count = min(_TRUNCATION_CANDIDATES, vocabulary)
    while True:
        ranked, order = probabilities.topk(count, sorted=True)
        in_top_k = torch.arange(count, device=ranked.device) < top_k[:, None]
        mass = torch.where(top_k >= vocabulary, 1.0, (ranked * in_top_k).sum(-1))
        before = ranked.cumsum(-1) - ranked
        kept = in_top_k & ((before < (top_p * mass)[:, None]) | (top_p == 1)[:, None])
        undecided = (top_k > count) & ((top_k < vocabulary) | kept[:, -1])
        if count == vocabulary or not bool(undecided.any()):
            return torch.zeros_like(probabilities).scatter_(-1, order, ranked * kept)
        count = vocabulary
