"""The tokenizer of the bundled model: byte-level BPE, which round-trips any text; every digit is a separate token."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, PAD, END = "<|bos|>", "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
TOOL_CALL = "<|tool_call|>"

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant", "tool"] -%}
        {{- raise_exception("unknown role " + message.role) -}}
    {%- endif -%}
    {{- "<|" + message.role + "|>" + (message.content or "") -}}
    {%- for call in message.tool_calls or [] -%}
        {{- "<|tool_call|>" + call.function | tojson -}}
    {%- endfor -%}
    {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|assistant|>" -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train on `texts`. The end-of-turn token is also the end-of-sequence token; padding is a separate token."""
    special = [PAD, BOS, END, *(f"<|{role}|>" for role in ROLES), TOOL_CALL]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=special[3:],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return tokenizer.get_vocab()[token]
