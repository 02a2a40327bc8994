"""Sampling of completions in batches, on the engine's thread.

Each distinct prompt is run once; finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cookbook.backends.local.kv_cache import BlockCache
from cookbook.backends.local.model import BaseModel, logits_function, microbatches, right_padded
from cookbook.backends.local.token_sampler import TokenSampler, uniforms
from cookbook.backends.local.weights import PinnedWeights
from cookbook.backends.stops import StopStrings
from cookbook.core.types import SampledSequence, SampleResponse, SamplingParams, StopReason

_FIRST_BLOCK = 64
"""Positions beyond the prompt that the cache has at first; it grows by half its length."""

_RETIRE_BELOW = 0.75
"""The batch is compacted once fewer than this share of its rows are unfinished."""


@dataclass(eq=False)
class SampleRequest:
    """One `sample` call, and what has been computed of its answer."""

    pinned: Future[PinnedWeights]
    prompt: tuple[int, ...]
    num_samples: int
    params: SamplingParams
    seed: int
    include_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    future: Future[SampleResponse] = field(default_factory=Future)
    prompt_logprobs: list[float | None] | None = None
    topk: list[list[tuple[int, float]] | None] | None = None
    sequences: dict[int, SampledSequence] = field(default_factory=dict)

    def finish(self, sample: int, sequence: SampledSequence) -> None:
        """Record one completion; the last one answers the request."""
        self.sequences[sample] = sequence
        if len(self.sequences) == self.num_samples:
            ordered = [self.sequences[index] for index in range(self.num_samples)]
            self.future.set_result(SampleResponse(ordered, self.prompt_logprobs, self.topk))


def draw_completions(
    base: BaseModel, model: PreTrainedModel, requests: Sequence[SampleRequest], max_rows: int, token_budget: int
) -> None:
    """Answer the requests, their rows taken in order, at most `max_rows` at a time; prompts are run within
    `token_budget`.

    A row's tokens depend on its request and sample index only: other rows of the batch change nothing but rounding.
    """
    rows = [(request, sample) for request in requests for sample in range(request.num_samples)]
    for start in range(0, len(rows), max_rows):
        _Batch(base, model, rows[start : start + max_rows], token_budget).run()


class _Batch:
    """Rows that are decoded together. `self.rows` are those still in the batch, in the order of all per-row arrays."""

    def __init__(
        self, base: BaseModel, model: PreTrainedModel, rows: list[tuple[SampleRequest, int]], token_budget: int
    ) -> None:
        self._base = base
        self._model = model
        self._device = base.device
        self.rows = rows
        self._token_budget = token_budget
        self._longest_prompt = max(len(request.prompt) for request, _ in rows)
        self._limits = np.array([request.params.max_tokens for request, _ in rows])
        self._most_tokens = int(self._limits.max())
        self._uniforms = torch.from_numpy(
            np.stack([uniforms(request.seed, sample, self._most_tokens) for request, sample in rows])
        ).to(self._device)
        self._token_sampler = TokenSampler.for_rows([request.params for request, _ in rows], self._device)
        self._padding = torch.tensor(
            [self._longest_prompt - len(request.prompt) for request, _ in rows], device=self._device
        )
        self._tokens = np.zeros((len(rows), self._most_tokens), np.int64)
        self._logprobs = np.zeros((len(rows), self._most_tokens), np.float32)
        self._unfinished = np.ones(len(rows), bool)
        self._stop_tokens = [
            frozenset(stop for stop in request.params.stop if isinstance(stop, int)) for request, _ in rows
        ]
        self._stop_strings = self._watch_stop_strings()
        self._is_eos = np.zeros(base.vocabulary_size, bool)
        self._is_eos[list(base.eos_token_ids)] = True

    @torch.inference_mode()
    def run(self) -> None:
        cache, hidden = self._prefill()
        visible = torch.arange(self._longest_prompt + self._most_tokens, device=self._device) >= self._padding[:, None]
        padded = bool(self._padding.any())
        logits = logits_function(self._model)
        decoder = self._model.get_decoder()
        for step in range(self._most_tokens):
            tokens, logprobs = self._token_sampler.sample(logits(hidden).float(), self._uniforms[:, step])
            self._take(step, tokens.cpu().numpy(), logprobs.cpu().numpy())
            unfinished = int(self._unfinished.sum())
            if unfinished == 0:
                return
            kept = None
            if unfinished < _RETIRE_BELOW * len(self.rows):
                kept = torch.from_numpy(self._unfinished.nonzero()[0]).to(self._device)
                self._retire(kept)
                visible, tokens = visible[kept], tokens[kept]
            if kept is not None or cache.length == cache.capacity:
                cache.resize(
                    min(cache.length + max(_FIRST_BLOCK, cache.length // 2), self._longest_prompt + self._most_tokens),
                    kept,
                )
            mask = visible[:, : cache.length + 1] if padded else None
            # A finished row stays until the next compaction; it must not run past the context.
            positions = (cache.length - self._padding[:, None]).clamp(max=self._base.context_length - 1)
            output = decoder(
                input_ids=tokens[:, None], attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
            )
            hidden = output.last_hidden_state[:, -1]

    def _prefill(self) -> tuple[BlockCache, torch.Tensor]:
        """Run every distinct prompt once.

        Returns a cache with a row per sample, where all prompts end at the same position, and each row's last hidden
        state `[rows, hidden]`.
        """
        rows_of_prompt: dict[tuple[int, ...], list[int]] = {}
        for row, (request, _) in enumerate(self.rows):
            rows_of_prompt.setdefault(request.prompt, []).append(row)
        prompts = list(rows_of_prompt)
        cache: BlockCache | None = None
        hidden = torch.empty(0)
        for batch in microbatches([len(prompt) for prompt in prompts], self._token_budget):
            chosen = [prompts[index] for index in batch]
            prefilled = DynamicCache()
            output = self._model.get_decoder()(
                input_ids=right_padded(chosen, self._device), cache=prefilled, use_cache=True
            )
            states = output.last_hidden_state
            targets = [row for prompt in chosen for row in rows_of_prompt[prompt]]
            sources = [source for source, prompt in enumerate(chosen) for _ in rows_of_prompt[prompt]]
            ends = [len(prompt) - 1 for prompt in chosen for _ in rows_of_prompt[prompt]]
            target_rows, source_rows, last = (
                torch.tensor(values, device=self._device) for values in (targets, sources, ends)
            )
            if cache is None:
                capacity = self._longest_prompt + min(_FIRST_BLOCK, self._most_tokens)
                cache = BlockCache.allocate(prefilled, len(self.rows), self._longest_prompt, capacity)
                hidden = states.new_empty(len(self.rows), states.shape[-1])
            cache.place(prefilled, source_rows, target_rows, self._padding[target_rows])
            hidden[target_rows] = states[source_rows, last]
        assert cache is not None
        return cache, hidden

    def _take(self, step: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Record the newest token of each row and finish the rows that it ends."""
        self._tokens[:, step] = tokens
        self._logprobs[:, step] = logprobs
        at_eos = self._is_eos[tokens]
        at_limit = self._limits == step + 1
        for row in self._unfinished.nonzero()[0].tolist():
            reason: StopReason | None = None
            if at_eos[row]:
                reason = "eos"
            elif tokens[row] in self._stop_tokens[row] or self._stop_string_found(row, step):
                reason = "stop"
            elif at_limit[row]:
                reason = "length"
            if reason is not None:
                self._unfinished[row] = False
                request, sample = self.rows[row]
                end = step + 1
                request.finish(
                    sample,
                    SampledSequence(self._tokens[row, :end].tolist(), self._logprobs[row, :end].tolist(), reason),
                )

    def _stop_string_found(self, row: int, step: int) -> bool:
        watcher = self._stop_strings[row]
        return watcher is not None and watcher.found(
            self._tokens[row, max(0, step + 1 - watcher.tail) : step + 1].tolist()
        )

    def _watch_stop_strings(self) -> list[StopStrings | None]:
        """One watcher per distinct set of stop strings, shared by its rows."""
        watchers: dict[tuple[str, ...], StopStrings | None] = {(): None}
        found = []
        for request, _ in self.rows:
            strings = tuple(stop for stop in request.params.stop if isinstance(stop, str))
            if strings not in watchers:
                watchers[strings] = StopStrings(self._base.engine_tokenizer, strings)
            found.append(watchers[strings])
        return found

    def _retire(self, kept: torch.Tensor) -> None:
        """Drop the finished rows from every per-row array."""
        indices = kept.tolist()
        self.rows = [self.rows[row] for row in indices]
        self._stop_tokens = [self._stop_tokens[row] for row in indices]
        self._stop_strings = [self._stop_strings[row] for row in indices]
        self._limits, self._tokens, self._logprobs = (
            self._limits[indices],
            self._tokens[indices],
            self._logprobs[indices],
        )
        self._unfinished = self._unfinished[indices]
        self._uniforms, self._padding = self._uniforms[kept], self._padding[kept]
        self._token_sampler = self._token_sampler.select(kept)
