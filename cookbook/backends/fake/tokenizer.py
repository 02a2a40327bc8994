"""The fake backend's byte-level tokenizer: token `b` is byte `b`, and a few special tokens for chat follow."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|pad|>")
TOOL_CALL_TOKENS = ("<tool_call>", "</tool_call>")
"""Ordinary added tokens, by whose ids the `renderers` library's parser of this JSON format (Hermes, Qwen3) finds
calls."""

TOKEN_BYTES = (
    *(bytes([byte]) for byte in range(256)),
    *(token.encode() for token in SPECIAL_TOKENS + TOOL_CALL_TOKENS),
)
VOCABULARY_SIZE = len(TOKEN_BYTES)
EOS_TOKEN = TOKEN_BYTES.index(b"<|end|>")

CHAT_TEMPLATE = """
{%- if tools %}{{ '<|system|>Tools: ' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {%- set written = {'name': call.function.name, 'arguments': call.function.arguments} %}
                {{- '<tool_call>' + (written | tojson) + '</tool_call>' }}
            {%- endfor %}
            {{- '<|end|>' }}
        {%- endgeneration %}
    {%- elif message.role in ['system', 'user', 'tool'] %}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role + '; use system, user, assistant or tool') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""Prefix-stable: a conversation's tokens begin with those of each of its prefixes. The generation prompt is one
token."""


def _byte_alphabet() -> list[str]:
    """The printable character by which byte-level BPE writes each byte (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


@cache
def build_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer, built in code. Cached: treat it as read-only."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in enumerate(_byte_alphabet())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_CALL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL_TOKENS[:4]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
