"""The `openai` package over a real socket: base model, weights in training, saved checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from cookbook.backends.local import LocalService
from cookbook.core.types import ModelInput, SamplingParams
from tests.serve.live_server import API_KEY

if importlib.util.find_spec("openai") is None or importlib.util.find_spec("tinker") is None:
    pytest.skip("needs the openai and tinker packages", allow_module_level=True)

import openai
import tinker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES: Any = [{"role": "user", "content": "Ada has 5 coins and finds 3 more. How many coins does Ada have now?"}]
TAUGHT = "#### 77"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(local: LocalService) -> PreTrainedTokenizerBase:
    return local.create_sampling_client(base_model="tiny").get_tokenizer()


def prompt_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = str(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False))
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def test_a_seeded_chat_is_what_the_backend_draws(
    client: openai.OpenAI, local: LocalService, tokenizer: PreTrainedTokenizerBase
):
    prompt = prompt_of(tokenizer)
    drawn = (
        local.create_sampling_client(base_model="tiny")
        .sample(ModelInput.from_ints(prompt), 4, SamplingParams(40, seed=3))
        .result()
    )
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=4, seed=3, max_tokens=40, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == [
        tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in drawn.sequences
    ]
    for choice, sequence in zip(answer.choices, drawn.sequences, strict=True):
        ended = sequence.stop_reason == "eos"
        assert choice.finish_reason == ("stop" if ended else "length")
        assert choice.logprobs is not None and choice.logprobs.content is not None
        values = [token.logprob for token in choice.logprobs.content]
        assert values == pytest.approx(sequence.logprobs[: len(values)], abs=1e-4)
        assert len(values) == len(sequence.tokens) - ended
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(prompt),
        sum(len(s.tokens) for s in drawn.sequences),
    )


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI):
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, seed=1, max_tokens=40)
    texts, ends, usage = ["", ""], ["", ""], None
    options: Any = {"include_usage": True}
    for event in client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, seed=1, max_tokens=40, stream=True, stream_options=options
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_a_stop_string_ends_the_text_before_itself(client: openai.OpenAI):
    greedy = (
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=60)
        .choices[0]
        .message.content
    )
    assert greedy is not None and "####" in greedy
    stopped = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=60, stop=["####", "@"], logprobs=True
    ).choices[0]
    assert stopped.message.content == greedy.partition("####")[0]
    assert stopped.finish_reason == "stop"
    cut = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=1).choices[0]
    assert cut.finish_reason == "length"


def test_completions_take_text_or_tokens(client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase):
    prompt = prompt_of(tokenizer)
    settings: Any = {"model": "tiny", "max_tokens": 30, "seed": 5, "logprobs": 1}
    by_tokens = client.completions.create(prompt=prompt, **settings)
    by_text = client.completions.create(prompt=tokenizer.decode(prompt), **settings)
    assert by_text.choices == by_tokens.choices
    logprobs = by_tokens.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == by_tokens.choices[0].text and max(logprobs.token_logprobs) <= 0
    streamed = client.completions.create(prompt=prompt, stream=True, **settings)
    assert "".join(choice.text for event in streamed for choice in event.choices) == by_tokens.choices[0].text


def test_weights_in_training_and_a_saved_checkpoint(
    url: str, client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
):
    """Train a model on one sentence: the live model learns it, the checkpoint keeps it, the base model is unchanged."""
    prompt, taught = prompt_of(tokenizer), tokenizer(TAUGHT, add_special_tokens=False)["input_ids"]
    tokens = [*prompt, *taught, tokenizer.eos_token_id]  # pyright: ignore[reportGeneralTypeIssues]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )
    service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    training = service.create_lora_training_client(base_model="tiny", rank=8, seed=0).result()
    live = training.get_info().model_id

    def say(model: str) -> str | None:
        answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=40)
        return answer.choices[0].message.content

    before = say("tiny")
    assert say(live) == before
    for _ in range(40):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    assert say(live) == TAUGHT
    path = training.save_weights_for_sampler("taught").result().path
    training.forward_backward([datum], "cross_entropy")
    for _ in range(10):
        training.optim_step(tinker.AdamParams(learning_rate=0.5)).result()
    assert say(live) != TAUGHT
    assert say(path) == say(f"tiny;{path}") == TAUGHT
    assert say("tiny") == before
    names = {model.id for model in client.models.list()}
    assert {"tiny", live, path} <= names
    assert client.models.retrieve(path).id == path


@pytest.mark.parametrize(
    ("request_fields", "status", "message"),
    [
        ({"model": "tinny"}, 400, "'tinny' is not served .did you mean tiny"),
        ({"model": "tinker://x/weights/y"}, 404, "there is no checkpoint"),
        ({"max_tokens": 10**6}, 400, "exceed the context"),
        ({"n": 0}, 400, "n: "),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools: is not supported"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, 400, "chat template of tiny refuses"),
    ],
)
def test_refusals_say_what_is_wrong(client: openai.OpenAI, request_fields: dict[str, Any], status: int, message: str):
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 5, **request_fields})
    assert refused.value.status_code == status


def test_the_prefix_of_tinkers_own_service(url: str):
    with openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=API_KEY) as client:
        assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3).choices
