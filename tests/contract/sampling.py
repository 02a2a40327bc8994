"""Samplers: pinned weights, logprobs, and how a completion is drawn and ends."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cookbook.core.clients import ServiceClient, TrainingClient
from cookbook.core.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from tests.contract.harness import (
    MEMORISED,
    ContractHarness,
    Memoriser,
    assert_close,
    assert_differ,
    known,
    next_token_datum,
)


class SamplingContract(ContractHarness):
    def test_samplers_are_pinned(self, client: TrainingClient, data: list[Datum], prompt: ModelInput) -> None:
        old = client.save_weights_and_get_sampling_client()
        old_before = known(old.compute_logprobs(prompt).result(60))
        client.forward_backward(data, "cross_entropy")
        client.optim_step(self.adam())
        new = client.save_weights_and_get_sampling_client()  # sees what was enqueued before it ...
        client.forward_backward(data, "cross_entropy")
        client.optim_step(self.adam())  # ... and nothing enqueued after
        newest = client.save_weights_and_get_sampling_client()
        first = [known(sampler.compute_logprobs(prompt).result(60)) for sampler in (old, new, newest)]
        assert_close(first[0], old_before, self.tolerance / 10, "the old sampler after training")
        assert_differ(first[1], first[0], self.tolerance, "the new sampler sees the first step")
        assert_differ(first[2], first[1], self.tolerance, "the newest sampler sees the second step")

    def test_sampler_logprobs_equal_forward_logprobs(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum], prompt: ModelInput
    ) -> None:
        self.train(client, data)
        sampler = client.save_weights_and_get_sampling_client()
        temperatures = (1.0, 0.7, 1.5) if service.capabilities.loss_temperature else (1.0,)
        for temperature in temperatures:
            config = {"temperature": temperature} if service.capabilities.loss_temperature else None
            params = SamplingParams(max_tokens=24, temperature=temperature, stop=("5",), seed=3)
            for sequence in sampler.sample(prompt, 4, params).result(60).sequences:
                datum = next_token_datum([*prompt.tokens, *sequence.tokens])
                trained = self.logprobs(client, [datum, *data], config)[: datum.model_input.length]
                sampled = np.array(sequence.logprobs)
                assert_close(
                    sampled,
                    trained[prompt.length - 1 :],
                    self.tolerance,
                    f"sampled logprobs at temperature {temperature}",
                )
                if temperature == 1.0:
                    scored = known(
                        sampler.compute_logprobs(ModelInput.from_ints([*prompt.tokens, *sequence.tokens])).result(60)
                    )
                    assert_close(scored, trained, self.tolerance, "compute_logprobs")

    def test_compute_logprobs_shape(self, service: ServiceClient, prompt: ModelInput) -> None:
        sampler = service.create_sampling_client(base_model=self.base_model)
        logprobs = sampler.compute_logprobs(prompt).result(60)
        assert len(logprobs) == prompt.length and logprobs[0] is None
        assert len(known(logprobs)) == prompt.length - 1 and (known(logprobs) <= 0).all()
        assert sampler.compute_logprobs(ModelInput.from_ints(prompt.tokens[:1])).result(60) == [None]
        params = SamplingParams(max_tokens=1)
        response = sampler.sample(prompt, 1, params, include_prompt_logprobs=True).result(60)
        assert response.prompt_logprobs is not None and len(response.prompt_logprobs) == prompt.length
        assert_close(known(response.prompt_logprobs), known(logprobs), self.tolerance, "prompt_logprobs of sample")
        plain = sampler.sample(prompt, 1, params).result(60)
        assert plain.prompt_logprobs is None and plain.topk_prompt_logprobs is None

    def test_topk_prompt_logprobs(self, service: ServiceClient, prompt: ModelInput) -> None:
        if not service.capabilities.topk_prompt_logprobs:
            pytest.skip("no top-k prompt logprobs")
        sampler = service.create_sampling_client(base_model=self.base_model)
        response = sampler.sample(
            prompt, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=5
        ).result(60)
        assert response.prompt_logprobs is not None and response.topk_prompt_logprobs is not None
        assert len(response.topk_prompt_logprobs) == prompt.length and response.topk_prompt_logprobs[0] is None
        for token, own, top in zip(
            prompt.tokens[1:], response.prompt_logprobs[1:], response.topk_prompt_logprobs[1:], strict=True
        ):
            assert top is not None and own is not None and len({candidate for candidate, _ in top}) == 5
            values = [logprob for _, logprob in top]
            assert values == sorted(values, reverse=True)
            assert (
                own == pytest.approx(dict(top)[token], abs=self.tolerance)
                if token in dict(top)
                else own <= values[-1] + self.tolerance
            )

    def test_eos_ends_a_sequence_and_is_part_of_it(self, memoriser: Memoriser) -> None:
        sequence = memoriser.recite()
        assert sequence.tokens == memoriser.tokens[1:] and sequence.stop_reason == "eos"
        assert len(sequence.logprobs) == len(sequence.tokens) and max(sequence.logprobs) <= 0

    def test_max_tokens_ends_a_sequence(self, memoriser: Memoriser) -> None:
        sequence = memoriser.recite(max_tokens=2)
        assert sequence.tokens == memoriser.tokens[1:3] and sequence.stop_reason == "length"

    def test_stop_string_ends_a_sequence(self, memoriser: Memoriser, tokenizer: PreTrainedTokenizerBase) -> None:
        stop = MEMORISED[6:8]
        sequence = memoriser.recite(stop=(stop, "never"))
        assert sequence.tokens == memoriser.tokens[1 : 1 + len(sequence.tokens)] and sequence.stop_reason == "stop"
        assert stop in str(tokenizer.decode(sequence.tokens)) and stop not in str(
            tokenizer.decode(sequence.tokens[:-1])
        )

    def test_stop_token_ends_a_sequence(self, service: ServiceClient, memoriser: Memoriser) -> None:
        if not service.capabilities.token_stops:
            pytest.skip("no stop tokens")
        sequence = memoriser.recite(stop=(memoriser.tokens[2], "never"))
        assert sequence.tokens == memoriser.tokens[1:3] and sequence.stop_reason == "stop"

    def test_num_samples_and_their_ends(
        self, service: ServiceClient, prompt: ModelInput, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        sampler = service.create_sampling_client(base_model=self.base_model)
        max_tokens = 12
        sequences = (
            sampler.sample(prompt, 6, SamplingParams(max_tokens=max_tokens, stop=("4",), seed=1)).result(60).sequences
        )
        assert len(sequences) == 6
        assert len({tuple(sequence.tokens) for sequence in sequences}) > 1, "samples of one request differ"
        for sequence in sequences:
            assert 1 <= len(sequence.tokens) <= max_tokens and len(sequence.logprobs) == len(sequence.tokens)
            if sequence.stop_reason == "eos":
                assert sequence.tokens[-1] == tokenizer.eos_token_id
            elif sequence.stop_reason == "stop":
                assert "4" in str(tokenizer.decode(sequence.tokens[-1:]))
            else:
                assert len(sequence.tokens) == max_tokens
            assert tokenizer.eos_token_id not in sequence.tokens[:-1]
            assert "4" not in str(tokenizer.decode(sequence.tokens[:-1]))

    def test_truncation_narrows_the_draw_but_not_the_logprobs(self, service: ServiceClient, prompt: ModelInput) -> None:
        sampler = service.create_sampling_client(base_model=self.base_model)
        params = SamplingParams(max_tokens=10, seed=5)
        greedy = sampler.sample(prompt, 1, dataclasses.replace(params, temperature=0.0)).result(60).sequences[0]
        for changes in ({"top_k": 1}, {"top_p": 1e-6}):
            for sequence in sampler.sample(prompt, 2, dataclasses.replace(params, **changes)).result(60).sequences:
                assert sequence.tokens == greedy.tokens, f"{changes} leaves only the likeliest token"
                assert_close(
                    np.array(sequence.logprobs), np.array(greedy.logprobs), self.tolerance, "logprobs before truncation"
                )
        whole = ModelInput.from_ints([*prompt.tokens, *greedy.tokens])
        scored = known(sampler.compute_logprobs(whole).result(60))[prompt.length - 1 :]
        assert_close(np.array(greedy.logprobs), scored, self.tolerance, "greedy logprobs are those at temperature 1")

    def test_seeds_fix_every_sample(self, service: ServiceClient, prompt: ModelInput, data: list[Datum]) -> None:
        if not service.capabilities.seeds:
            pytest.skip("seeds are not honoured")
        sampler = service.create_sampling_client(base_model=self.base_model)
        params = SamplingParams(max_tokens=12, seed=11)
        first = sampler.sample(prompt, 4, params).result(60).sequences
        mates = [sampler.sample(datum.model_input, 2, dataclasses.replace(params, seed=12)) for datum in data]
        again = sampler.sample(prompt, 6, params)
        other = sampler.sample(prompt, 4, dataclasses.replace(params, seed=12)).result(60).sequences
        assert [sequence.tokens for sequence in again.result(60).sequences[:4]] == [
            sequence.tokens for sequence in first
        ]
        assert [sequence.tokens for sequence in other] != [sequence.tokens for sequence in first]
        unseeded = [sampler.sample(prompt, 4, SamplingParams(max_tokens=12)).result(60).sequences for _ in range(2)]
        assert [s.tokens for s in unseeded[0]] != [s.tokens for s in unseeded[1]], "without a seed, requests differ"
        assert all(len(mate.result(60).sequences) == 2 for mate in mates)
