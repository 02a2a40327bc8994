"""The tokens that end an assistant's turn: one answer for training masks, sampling, the server and the text that
rewards see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_EOS = "generation_eos_token_ids"
"""The attribute of a tokenizer that holds the eos ids of its model's generation config."""

_CONTENT = "Zanzibar"
"""What the probe turns say. It must not occur in a template's own text."""

_QUESTION = {"role": "user", "content": "?"}
_ANSWER = {"role": "assistant", "content": _CONTENT}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {"word": _CONTENT}}}
_TOOL_CALL = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}]


def set_generation_eos(tokenizer: PreTrainedTokenizerBase, eos_token_id: int | Iterable[int] | None) -> None:
    """Let a tokenizer carry the `eos_token_id` of its model's generation config. Backends call it on loading one."""
    ids = () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
    setattr(tokenizer, _GENERATION_EOS, ids)


def end_of_turn_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the tokens that end an assistant's turn, without repeats.

    First the one that the chat template writes after an answer, then the one after a tool call, then the eos tokens
    of the tokenizer and of the model's generation config. A template that writes no single token there adds none.
    """
    eos: int | None = tokenizer.eos_token_id  # pyright: ignore[reportAssignmentType]
    ids = (*_template_ends(tokenizer), eos, *getattr(tokenizer, _GENERATION_EOS, ()))
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _template_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        return []
    after_answer = _added_tokens(tokenizer, _written_after_content(tokenizer, _ANSWER, None))
    if not after_answer:
        return []  # nor would a tool call be ended; what follows it belongs to the call
    after_call = _added_tokens(tokenizer, _written_after_content(tokenizer, _TOOL_CALL, _TOOLS))
    return [after_answer[0], *after_call[-1:]]


def _written_after_content(tokenizer: PreTrainedTokenizerBase, turn: dict[str, Any], tools: list[Any] | None) -> str:
    """What the template writes after the content of a last turn; empty where it refuses such a conversation."""
    for opening in ([], [{"role": "system", "content": "."}]):
        try:
            text = str(tokenizer.apply_chat_template([*opening, _QUESTION, turn], tools=tools, tokenize=False))
        except Exception:  # a template is a program and can raise anything
            continue
        _, found, after = text.rpartition(_CONTENT)
        return after if found else ""
    return ""


def _added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The added tokens in a text, special or not, in their order, without those that are white space."""
    added = tokenizer.added_tokens_decoder
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return [token for token in tokens if token in added and added[token].content.strip()]
