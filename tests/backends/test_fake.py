"""The fake backend beyond the contract: exactness, determinism, the tokenizer, and independence of torch."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from renderers import DefaultRendererConfig, build_training_sample, create_renderer

from cookbook.backends.fake import FAKE_CAPABILITIES, FakeService, FakeTrainingClient
from cookbook.backends.fake.model import (
    LOSSES,
    NextToken,
    TrainedWeights,
    base_logits,
    draw,
    log_softmax,
    logits_gradient,
    target_logprobs,
)
from cookbook.backends.fake.tokenizer import EOS_TOKEN, TOKEN_BYTES, build_tokenizer
from cookbook.core.clients import Capabilities
from cookbook.core.errors import CapabilityError, CheckpointError, ConfigError, CookbookError, DataError, LossError
from cookbook.core.types import AdamParams, Datum, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints(b"Q: 1+1? A: ")


def datum(text: bytes = b"hello there", **inputs: np.ndarray) -> Datum:
    return Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": np.array(list(text[1:])), **inputs})


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(str(tmp_path))


@pytest.fixture
def client(service: FakeService) -> FakeTrainingClient:
    return service.create_lora_training_client("any/name", rank=8)


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_equal_finite_differences(loss_fn: str, temperature: float) -> None:
    rng = np.random.default_rng(1)
    logits = base_logits("m")
    previous, targets = rng.integers(97, 101, 40), rng.integers(97, 123, 40)
    start = target_logprobs(logits, previous, targets, temperature)
    inputs = {
        "weights": rng.choice([0.5, 1.0, 2.0], 40),
        "logprobs": start + rng.choice([-0.5, -0.1, 0.1, 0.5, 2.0], 40),  # ratios away from every clip's corner
        "advantages": rng.normal(size=40),
        "datum": np.repeat([0, 1, 2], [5, 20, 15]),
    }
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 3.0, "beta": 0.05}
    frozen = LOSSES[loss_fn].terms(start, inputs, config)[1]
    coefficient_is_constant = loss_fn in ("cispo", "gspo_token")

    def loss(changed: np.ndarray) -> float:
        logprobs = target_logprobs(changed, previous, targets, temperature)
        return float(
            (frozen * logprobs).sum()
            if coefficient_is_constant
            else LOSSES[loss_fn].terms(logprobs, inputs, config)[0].sum()
        )

    gradient = logits_gradient(logits, previous, targets, frozen, temperature)
    direction = rng.standard_normal(logits.shape)
    step = 1e-6 * direction
    assert (gradient * direction).sum() == pytest.approx((loss(logits + step) - loss(logits - step)) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_adam_equals_torch(clip: float) -> None:
    rng = np.random.default_rng(2)
    params = AdamParams(learning_rate=0.05, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=clip)
    weights = TrainedWeights(rng.normal(size=(4, 3)))
    parameter = torch.nn.Parameter(torch.from_numpy(weights.table.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(5):
        gradient = rng.normal(size=(4, 3))
        weights.gradient += gradient
        parameter.grad = torch.from_numpy(gradient.copy())
        norm = torch.nn.utils.clip_grad_norm_([parameter], clip or float("inf"))
        optimizer.step()
        assert weights.adam_step(params) == pytest.approx(norm.item())
    np.testing.assert_allclose(weights.table, parameter.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.5, 1.0, -1), (1.0, 0.6, -1), (1.3, 1.0, 5), (1.0, 0.7, 20)]
)
def test_draws_follow_the_truncated_distribution(temperature: float, top_p: float, top_k: int) -> None:
    logits = base_logits("m")
    next_token = NextToken.from_logits(logits, temperature, top_p, top_k)
    expected = np.exp(log_softmax(logits[ord("a")] / temperature))
    order = sorted(range(len(expected)), key=lambda token: -expected[token])
    kept = order[:top_k] if top_k > 0 else order
    mass = expected[kept] / expected[kept].sum()
    nucleus = [token for i, token in enumerate(kept) if top_p == 1 or mass[:i].sum() < top_p]
    truncated = np.zeros_like(expected)
    truncated[nucleus] = expected[nucleus] / expected[nucleus].sum()
    np.testing.assert_allclose(np.diff(next_token.cumulative[ord("a")], prepend=0.0), truncated, atol=1e-12)

    generators = [np.random.default_rng(seed) for seed in range(4000)]
    sequences = draw(next_token, ord("a"), generators, SamplingParams(max_tokens=1))
    counts = np.bincount([sequence.tokens[0] for sequence in sequences], minlength=len(expected))
    assert np.abs(counts / 4000 - truncated).sum() < 0.2  # total variation of an honest draw is about 0.1
    assert not counts[truncated == 0].any()


def test_requests_without_a_seed_replay_by_their_order() -> None:
    def tokens() -> list[list[int]]:
        sampler = FakeService().create_sampling_client(base_model="m")
        return [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=20)).result().sequences[0].tokens for _ in range(3)]

    first = tokens()
    assert first == tokens()
    assert first[0] != first[1] != first[2]


def test_a_base_models_samples_are_text_that_ends() -> None:
    service = FakeService()
    response = (
        service.create_sampling_client(base_model="m")
        .sample(PROMPT, 200, SamplingParams(max_tokens=60, seed=-1))
        .result()
    )
    ends = [sequence.stop_reason for sequence in response.sequences]
    assert 0.5 < ends.count("eos") / 200 < 0.99 and "length" in ends
    drawn = [token for sequence in response.sequences for token in sequence.tokens if token != EOS_TOKEN]
    assert np.mean([32 <= token < 127 or token == 10 for token in drawn]) > 0.95
    other = service.create_sampling_client(base_model="other").compute_logprobs(PROMPT).result()
    assert other != service.create_sampling_client(base_model="m").compute_logprobs(PROMPT).result()


@pytest.mark.parametrize(
    ("operation", "kind", "says"),
    [
        (lambda c: c.forward([datum()], "cross_entrpy"), CapabilityError, "did you mean 'cross_entropy'"),
        (lambda c: c.forward([datum()], "xyz"), CapabilityError, "use one of: cispo, cross_entropy"),
        (lambda c: c.forward([datum()], "ppo", {"clip_low": 1.0}), ConfigError, "did you mean 'clip_low_threshold'"),
        (lambda c: c.forward([datum()], "ppo", {"temperature": 0.0}), ConfigError, "temperature is 0.0"),
        (
            lambda c: c.forward([datum(logprobs=np.zeros(10), advantage=np.zeros(10))], "ppo"),
            DataError,
            "'advantages' for 'advantage'",
        ),
        (lambda c: c.forward([], "cross_entropy"), DataError, "data is empty"),
        (
            lambda c: c.forward([Datum(PROMPT, {"target_tokens": np.array([999] * PROMPT.length)})], "cross_entropy"),
            DataError,
            "datum 0: target_tokens",
        ),
        (lambda c: c.save_state("../up"), ConfigError, "'../up' is not a plain name"),
        (lambda c: c.load_state("/nowhere"), CheckpointError, "/nowhere: no saved state"),
        (
            lambda c: c.load_state_with_optimizer(c.save_weights_for_sampler("w").result().path),
            CheckpointError,
            "without an optimizer",
        ),
        (lambda c: c.forward_backward_custom([datum()], lambda data, lp: (lp[0], {})), LossError, "a tensor of shape"),
    ],
)
def test_errors_say_what_to_do(
    client: FakeTrainingClient, operation: Callable, kind: type[CookbookError], says: str
) -> None:
    future = operation(client)
    with pytest.raises(kind) as raised:
        future.result()
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_states_of_another_configuration_or_damaged_are_refused(
    service: FakeService, client: FakeTrainingClient
) -> None:
    path = client.save_state("s").result().path
    for other in (
        service.create_lora_training_client("other", rank=8),
        service.create_lora_training_client("any/name", rank=4),
    ):
        with pytest.raises(CheckpointError, match="rank 8"):
            other.load_state(path).result()
    assert [child.name for child in Path(path).parent.iterdir()] == ["s"], "nothing is left beside a save"
    (Path(path) / "weights.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="damaged"):
        client.load_state(path).result()


def test_same_operations_save_the_same_bytes(tmp_path: Path) -> None:
    folders = []
    for run in ("a", "b"):
        client = FakeService(str(tmp_path / run)).create_lora_training_client("m")
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(AdamParams())
        folders.append(Path(client.save_state("s").result().path))
    for file in folders[0].iterdir():
        assert file.read_bytes() == (folders[1] / file.name).read_bytes(), file.name


def test_narrowed_capabilities_are_kept_to() -> None:
    narrow = Capabilities(losses=frozenset({"cross_entropy"}), token_stops=False)
    service = FakeService(capabilities=narrow)
    client = service.create_lora_training_client("m")
    sampler = client.save_weights_and_get_sampling_client()
    refused = [
        client.forward([datum()], "ppo"),
        client.forward_backward_custom([datum()], lambda data, logprobs: (logprobs[0].sum(), {})),
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=16, stop=(3,))),
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=16), topk_prompt_logprobs=1),
    ]
    for future in refused:
        with pytest.raises(CapabilityError):
            future.result()
    with pytest.raises(ConfigError, match="no key 'temperature'"):
        client.forward([datum()], "cross_entropy", {"temperature": 1.0}).result()
    with pytest.raises(CapabilityError):
        service.create_lora_training_client("m", rank=None)
    seeded = [
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=16, seed=1)).result().sequences[0].tokens for _ in range(2)
    ]
    assert seeded[0] != seeded[1], "a service without seeds ignores them"
    with pytest.raises(CapabilityError, match="no critic"):
        FakeService(capabilities=dataclasses.replace(FAKE_CAPABILITIES, critic=False)).create_lora_training_client(
            "m", role="critic"
        )
    with pytest.raises(ConfigError, match="reinforce"):
        FakeService(
            capabilities=dataclasses.replace(FAKE_CAPABILITIES, losses=FAKE_CAPABILITIES.losses | {"reinforce"})
        )


def test_tokenizer_is_bytes() -> None:
    tokenizer = build_tokenizer()
    text = "Zoë  paid £3.50\n\tfor 😀<|end|>"
    assert tokenizer.encode(text) == [*text.removesuffix("<|end|>").encode(), EOS_TOKEN]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.convert_tokens_to_ids(token.decode()) for token in TOKEN_BYTES[256:]] == list(
        range(256, len(TOKEN_BYTES))
    )
    assert tokenizer.eos_token_id == EOS_TOKEN and len(tokenizer) == len(TOKEN_BYTES)


def test_chat_renders_parses_and_masks() -> None:
    tokenizer = build_tokenizer()
    renderer = create_renderer(tokenizer, DefaultRendererConfig(tool_parser="qwen3"))
    call: dict[str, Any] = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 2."},
    ]
    tools: list[Any] = [{"name": "add", "description": "adds", "parameters": {}}]
    whole = renderer.render_ids(messages, tools=tools)
    for turn in range(1, 5):  # prefix-stable, with the generation prompt before an assistant turn
        prompt = renderer.render_ids(
            messages[:turn], tools=tools, add_generation_prompt=messages[turn]["role"] == "assistant"
        )
        assert whole[: len(prompt)] == prompt
    prompt = renderer.render_ids(messages[:2], tools=tools, add_generation_prompt=True)
    completion = whole[len(prompt) : whole.index(EOS_TOKEN, len(prompt)) + 1]
    parsed = renderer.parse_response(completion)
    assert parsed.content == "I add." and [(c.name, c.arguments) for c in parsed.tool_calls] == [("add", {"x": 1})]
    assert renderer.get_stop_token_ids() == [EOS_TOKEN]

    turns = 'I add.<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call><|end|>', "It is 2.<|end|>"
    sample = build_training_sample(renderer, messages, role_to_mask=lambda m: m["role"] == "assistant", tools=tools)
    trained = tokenizer.decode([token for token, kept in zip(sample.token_ids, sample.loss_mask, strict=True) if kept])
    assert trained == f"<|assistant|>{turns[0]}<|assistant|>{turns[1]}"  # that renderer counts the header too ...
    call["function"]["arguments"] = {"x": 1}
    marked: Any = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    assert list(marked["input_ids"]) == whole
    exact = tokenizer.decode(
        [token for token, kept in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if kept]
    )
    assert exact == "".join(turns)  # ... the template's own marks do not


WITHOUT_TORCH = """
import sys
from cookbook.backends.fake import FakeService
from cookbook.core.types import AdamParams, Datum, ModelInput, SamplingParams

service = FakeService()
client = service.create_lora_training_client("m")
prompt = ModelInput.from_ints(b"question?")
for step in range(2):
    sampler = client.save_weights_and_get_sampling_client()
    params = [SamplingParams(max_tokens=64, seed=i, stop=("END",)) for i in range(32)]
    groups = [sampler.sample(prompt, 8, each).result() for each in params]
    data = []
    for sequence in (sequence for group in groups for sequence in group.sequences):
        tokens = [*prompt.tokens, *sequence.tokens]
        padding = [0.0] * (prompt.length - 1)
        advantages = padding + [1.0] * len(sequence.tokens)
        inputs = {"target_tokens": tokens[1:], "logprobs": padding + sequence.logprobs, "advantages": advantages}
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    client.forward_backward(data, "importance_sampling")
    client.optim_step(AdamParams()).result()
    client.save_state("s").result()
service.stop()
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_drives_a_loop_without_torch() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
