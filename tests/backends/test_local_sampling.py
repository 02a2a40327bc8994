"""Sampling on the local backend: the distribution, tokens independent of the batch, logprobs equal to the trainer's."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cookbook.backends.local import LocalService
from cookbook.backends.local.clients import LocalSamplingClient, LocalTrainingClient
from cookbook.backends.local.token_sampler import TokenSampler, uniforms
from cookbook.core.errors import BackendError
from cookbook.core.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams
from tests.backends.local_model import CONTEXT, EOS, disturb, policy_data, random_tokens

PROMPTS = [ModelInput.from_ints(random_tokens(seed, length)) for seed, length in enumerate([3, 29, 12, 1, 60, 12])]
FREE = SamplingParams(max_tokens=40, seed=4)


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    service = LocalService(device="cpu")
    yield service
    service.stop()


@pytest.fixture(scope="module")
def trainer(service: LocalService, random_model: str) -> LocalTrainingClient:
    client = service.create_lora_training_client(random_model, rank=4, alpha=8, seed=0)
    disturb(client, steps=1)
    return client


@pytest.fixture(scope="module")
def sampler(trainer: LocalTrainingClient) -> LocalSamplingClient:
    return trainer.save_weights_and_get_sampling_client()


def forward_logprobs(
    client: LocalTrainingClient, prompt: ModelInput, sequence: SampledSequence, temperature: float
) -> np.ndarray:
    tokens = [*prompt.tokens, *sequence.tokens]
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    output = client.forward([datum], "cross_entropy", {"temperature": temperature}).result()
    return output.loss_fn_outputs[0]["logprobs"][prompt.length - 1 :]


@pytest.mark.parametrize("rank", [4, None])
def test_logprobs_agree_with_forward_whatever_the_company(
    service: LocalService, random_model: str, rank: int | None
) -> None:
    client = service.create_lora_training_client(random_model, rank=rank, alpha=8, seed=0)
    disturb(client, steps=1)
    sampler = client.save_weights_and_get_sampling_client()
    settings = [
        FREE,
        SamplingParams(max_tokens=25, temperature=0.6, seed=1),
        SamplingParams(max_tokens=50, temperature=1.7, top_k=20, stop=("a", "Q"), seed=2),
        SamplingParams(max_tokens=30, temperature=0.9, top_p=0.7, stop=(7, 8, 9), seed=3),
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(max_tokens=1, seed=5),
    ]
    futures = [sampler.sample(prompt, 3, params) for prompt, params in zip(PROMPTS, settings, strict=True)]
    reasons = set()
    for prompt, params, future in zip(PROMPTS, settings, futures, strict=True):
        for sequence in future.result().sequences:
            reasons.add(sequence.stop_reason)
            expected = forward_logprobs(client, prompt, sequence, params.temperature or 1.0)
            np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)
    assert {"stop", "length"} <= reasons


def test_in_bfloat16_the_adapter_runs_unmerged(random_model: str) -> None:
    """Merged into bfloat16 weights, a small update would round away; here the sampler must follow the trainer."""
    service = LocalService(device="cpu", dtype="bfloat16")
    client = service.create_lora_training_client(random_model, rank=4, alpha=8, seed=0)
    before = client.save_weights_and_get_sampling_client().compute_logprobs(PROMPTS[4]).result()
    disturb(client, steps=1)
    sampler = client.save_weights_and_get_sampling_client()
    for sequence in sampler.sample(PROMPTS[4], 2, FREE).result().sequences:
        gaps = np.abs(np.array(sequence.logprobs) - forward_logprobs(client, PROMPTS[4], sequence, 1.0))
        assert np.median(gaps) < 0.1
    assert sampler.compute_logprobs(PROMPTS[4]).result() != before
    service.stop()


def test_tokens_depend_on_seed_and_sample_index_alone(random_model: str, service: LocalService) -> None:
    def draw(
        token_budget: int, max_sample_rows: int, prompts: list[ModelInput], num_samples: int
    ) -> dict[ModelInput, list[SampledSequence]]:
        other = LocalService(device="cpu", token_budget=token_budget, max_sample_rows=max_sample_rows)
        sampler = other.create_sampling_client(base_model=random_model)
        futures = {prompt: sampler.sample(prompt, num_samples, FREE) for prompt in prompts}
        drawn = {prompt: future.result().sequences for prompt, future in futures.items()}
        other.stop()
        return drawn

    together = draw(4096, 512, PROMPTS, 5)
    for other in (
        draw(16, 512, PROMPTS, 5),
        draw(4096, 4, PROMPTS, 5),
        draw(4096, 1, PROMPTS[1:3], 2),
        draw(4096, 512, PROMPTS[::-1], 3),
    ):
        for prompt, sequences in other.items():
            assert [each.tokens for each in sequences] == [each.tokens for each in together[prompt][: len(sequences)]]
            for mine, theirs in zip(sequences, together[prompt], strict=False):
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
    assert len({tuple(each.tokens) for each in together[PROMPTS[1]]}) == 5


def test_requests_of_one_turn_of_the_event_loop_replay_bit_by_bit(sampler: LocalSamplingClient) -> None:
    async def rollouts() -> list:
        return await asyncio.gather(*(sampler.sample(prompt, 4, FREE) for prompt in PROMPTS))

    assert asyncio.run(rollouts()) == asyncio.run(rollouts())


def test_no_seed_is_a_fresh_one_each_time(sampler: LocalSamplingClient) -> None:
    params = SamplingParams(max_tokens=20)
    first, second = (sampler.sample(PROMPTS[0], 1, params).result().sequences[0].tokens for _ in range(2))
    assert first != second


def test_greedy_takes_the_likeliest_token_at_each_step(sampler: LocalSamplingClient) -> None:
    sequence = sampler.sample(PROMPTS[1], 1, SamplingParams(max_tokens=12, temperature=0)).result().sequences[0]
    likeliest = sampler.sample(
        PROMPTS[1].append(sequence.tokens), 1, SamplingParams(max_tokens=1), topk_prompt_logprobs=1
    ).result()
    assert likeliest.topk_prompt_logprobs is not None
    tail = likeliest.topk_prompt_logprobs[PROMPTS[1].length :]
    assert [best[0][0] for best in tail if best] == sequence.tokens
    np.testing.assert_allclose([best[0][1] for best in tail if best], sequence.logprobs, atol=1e-4)


def test_prompt_logprobs_are_those_of_compute_logprobs(
    sampler: LocalSamplingClient, trainer: LocalTrainingClient
) -> None:
    for prompt in PROMPTS:
        response = sampler.sample(
            prompt, 1, SamplingParams(max_tokens=1, temperature=0.5), True, topk_prompt_logprobs=97
        ).result()
        computed = sampler.compute_logprobs(prompt).result()
        assert response.prompt_logprobs is not None and response.topk_prompt_logprobs is not None
        assert computed[0] is None and len(computed) == prompt.length
        assert response.prompt_logprobs[0] is None and response.topk_prompt_logprobs[0] is None
        for token, mine, theirs, ranked in zip(
            prompt.tokens[1:],
            computed[1:],
            response.prompt_logprobs[1:],
            response.topk_prompt_logprobs[1:],
            strict=True,
        ):
            assert mine == pytest.approx(theirs, abs=1e-5) and ranked is not None
            assert mine == pytest.approx(dict(ranked)[token], abs=1e-4)
            assert [value for _, value in ranked] == sorted((value for _, value in ranked), reverse=True)
        if prompt.length > 1:
            whole = SampledSequence(list(prompt.tokens[1:]), [], "length")
            np.testing.assert_allclose(
                np.array(computed[1:]), forward_logprobs(trainer, ModelInput(prompt.tokens[:1]), whole, 1.0), atol=1e-4
            )


def test_stop_strings_tokens_and_length(sampler: LocalSamplingClient, trainer: LocalTrainingClient) -> None:
    tokenizer = trainer.get_tokenizer()
    free = sampler.sample(PROMPTS[2], 6, FREE).result().sequences
    row = next(index for index, each in enumerate(free) if each.stop_reason == "length")
    tokens = free[row].tokens
    assert len(tokens) == FREE.max_tokens and EOS not in tokens

    def draw(*stop: str | int) -> SampledSequence:
        return sampler.sample(PROMPTS[2], 6, SamplingParams(max_tokens=40, seed=4, stop=stop)).result().sequences[row]

    text = str(tokenizer.decode(tokens))
    for string in (text[10:11], text[12:15], text[20:31]):
        shortest = next(length for length in range(len(tokens) + 1) if string in str(tokenizer.decode(tokens[:length])))
        by_string = draw("never there", string)
        assert (by_string.tokens, by_string.stop_reason) == (tokens[:shortest], "stop")
        assert by_string.logprobs == pytest.approx(free[row].logprobs[:shortest], abs=1e-5)
    by_token = draw(tokens[5])
    assert (by_token.tokens, by_token.stop_reason) == (tokens[: tokens.index(tokens[5]) + 1], "stop")
    assert draw("never there", next(token for token in range(2, 97) if token not in tokens)) == free[row]


def test_eos_ends_a_sequence_and_is_its_last_token(service: LocalService, random_model: str) -> None:
    client = service.create_lora_training_client(random_model, rank=None)
    prompt = PROMPTS[0]
    datum = Datum(prompt, {"target_tokens": [EOS] * prompt.length, "weights": [0, 0, 1]})
    for _ in range(20):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-2))
    sampler = client.save_weights_and_get_sampling_client()
    sequence = (
        sampler.sample(prompt, 1, SamplingParams(max_tokens=5, temperature=0, stop=(EOS, "<eos>")))
        .result()
        .sequences[0]
    )
    assert (sequence.tokens, sequence.stop_reason) == ([EOS], "eos")


def test_a_sampler_stays_pinned(service: LocalService, random_model: str) -> None:
    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    sampler = client.save_weights_and_get_sampling_client()
    before = sampler.compute_logprobs(PROMPTS[1]).result()
    disturb(client)
    newer = client.save_weights_and_get_sampling_client()
    client.stop()
    assert newer.compute_logprobs(PROMPTS[1]).result() != before
    assert sampler.compute_logprobs(PROMPTS[1]).result() == before


def test_bad_requests_fail_alone_with_their_numbers(sampler: LocalSamplingClient) -> None:
    good = sampler.sample(PROMPTS[0], 1, FREE)
    long = ModelInput.from_ints([5] * 180)
    for future, message in [
        (
            sampler.sample(long, 1, SamplingParams(max_tokens=20)),
            f"180 tokens and max_tokens 20 exceed the context of .*, {CONTEXT}; .* to 12",
        ),
        (sampler.sample(ModelInput(()), 1, FREE), "prompt is empty"),
        (sampler.sample(ModelInput((97,)), 1, FREE), "token 97, which is outside the vocabulary"),
        (sampler.sample(PROMPTS[0], 0, FREE), "num_samples is 0"),
        (sampler.sample(PROMPTS[0], 1, FREE, topk_prompt_logprobs=98), "topk_prompt_logprobs is 98"),
        (sampler.compute_logprobs(ModelInput.from_ints([5] * 193)), "193 tokens"),
    ]:
        with pytest.raises(BackendError, match=message):
            future.result()
    assert good.result().sequences
    exactly = sampler.sample(long, 1, SamplingParams(max_tokens=12, seed=0)).result().sequences[0]
    assert exactly.stop_reason == "eos" or len(exactly.tokens) == 12


def test_operations_see_samples_in_call_order(service: LocalService, random_model: str) -> None:
    """A request made before a step gets the same answer as one made after it: samplers are pinned."""
    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    futures = []
    for step in range(3):
        futures.append(client.save_weights_and_get_sampling_client().compute_logprobs(PROMPTS[1]))
        client.forward_backward(policy_data(step), "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-2))
    answers = [tuple(future.result()) for future in futures]
    assert len(set(answers)) == 3


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(-1, 1.0), (3, 1.0), (-1, 0.6), (5, 0.5), (1, 1.0), (900, 0.999), (-1, 0.999)]
)
def test_draws_follow_the_truncated_distribution(top_k: int, top_p: float) -> None:
    """Against truncation written out on sorted probabilities, over a vocabulary larger than the first candidates."""
    vocabulary, draws = 1000, 20_000
    temperature = 0.7
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1.5, vocabulary)).float()
    probabilities = torch.softmax(logits.double() / temperature, -1).numpy()
    order = np.argsort(-probabilities)
    kept = order[: top_k if top_k > 0 else vocabulary]
    cumulative = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    kept = kept[: np.searchsorted(cumulative, top_p) + 1] if top_p < 1 else kept
    expected = np.zeros(vocabulary)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    # Half of the rows are not truncated: their company must change nothing.
    mates = SamplingParams(max_tokens=1, temperature=temperature)
    token_sampler = TokenSampler.for_rows([params, mates] * (draws // 2), torch.device("cpu"))
    tokens, logprobs = token_sampler.sample(logits.expand(draws, -1), torch.from_numpy(uniforms(0, 0, draws)))
    mine = tokens[::2].numpy()
    assert set(mine) <= set(kept)
    counts = np.bincount(mine, minlength=vocabulary) / len(mine)
    assert np.abs(counts - expected).sum() < 0.02 + 1.2 * np.sqrt(expected * (1 - expected) / len(mine)).sum()
    np.testing.assert_allclose(logprobs.numpy(), np.log(probabilities)[tokens.numpy()], atol=1e-4)


def test_a_draw_never_falls_on_a_token_without_probability() -> None:
    logits = torch.full((2, 4), -torch.inf)
    logits[:, 1], logits[:, 2] = 0.0, 0.0
    token_sampler = TokenSampler.for_rows([SamplingParams(max_tokens=1)] * 2, torch.device("cpu"))
    tokens, _ = token_sampler.sample(logits, torch.tensor([0.0, 1 - 2.0**-23]))
    assert tokens.tolist() == [1, 2]


def test_uniforms_are_keyed_by_seed_and_sample() -> None:
    rows = {(seed, sample): uniforms(seed, sample, 8) for seed in (0, 1, -1, 2**63) for sample in (0, 1)}
    assert len({row.tobytes() for row in rows.values()}) == len(rows)
    np.testing.assert_array_equal(uniforms(1, 1, 20)[:8], rows[1, 1])
