"""Nothing of a conversation is dropped in silence: weights, reasoning and tools in the loss mask and the text."""

from typing import Any

import pytest

from cookbook.core.errors import DataError
from cookbook.core.examples import Message
from tests.data.test_rendering import make_family

CHAT: list[Message] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Who are you?", "weight": 0},
    {"role": "user", "content": "Ada!"},
    {"role": "assistant", "content": "I am a helper."},
]
TOOL = {"type": "function", "function": {"name": "clock", "description": "d", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", ["tiny", "llama-3"])
def test_a_message_of_weight_zero_is_context(name: str, monkeypatch: pytest.MonkeyPatch):
    family = make_family(name, monkeypatch)
    everywhere = [{**message, "weight": 1} for message in CHAT]
    tokens, _ = family.renderer.supervised(CHAT, "all_assistant")
    assert tokens == family.renderer.supervised(everywhere, "all_assistant")[0]  # type: ignore[arg-type]
    assert family.loss_mask(CHAT, "all_assistant") == f"I am a helper.{family.last_end}"
    trained = family.loss_mask(CHAT, "everything")
    assert "Who are you?" not in trained and "I am a helper." in trained and "Ada!" in trained
    untrained: list[Message] = [*CHAT[:3], {**CHAT[3], "weight": 0}]
    assert family.loss_mask(untrained, "all_assistant") == family.loss_mask(untrained, "last_assistant") == ""


def test_reasoning_that_the_format_does_not_write_is_refused_where_it_is_trained(monkeypatch: pytest.MonkeyPatch):
    thinking: list[Message] = [CHAT[0], {**CHAT[3], "reasoning_content": "Who?"}]
    with pytest.raises(DataError, match="does not write the reasoning of message 1"):
        make_family("tiny", monkeypatch).renderer.supervised(thinking, "all_assistant")
    # Qwen3 writes the reasoning of the last turn alone.
    family = make_family("qwen3", monkeypatch)
    longer: list[Message] = [*thinking, CHAT[2], CHAT[3]]
    with pytest.raises(DataError, match="does not write the reasoning of message 1"):
        family.renderer.supervised(longer, "all_assistant")
    assert "I am a helper." in family.loss_mask(longer, "last_assistant")


@pytest.mark.parametrize(("name", "written"), [("tiny", False), ("qwen3", True)])
def test_whether_the_tools_are_in_the_text(name: str, written: bool, monkeypatch: pytest.MonkeyPatch):
    renderer: Any = make_family(name, monkeypatch).renderer
    assert renderer.writes_tools(CHAT, [TOOL]) is written


def test_a_prompt_that_the_format_refuses_is_an_error_of_the_data(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError, match="refuses the conversation"):
        make_family("tiny", monkeypatch).renderer.prompt([{"role": "judge", "content": "Hello"}])
