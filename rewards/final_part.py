"""The part of a completion that is its answer: what a model writes after thinking, or in its final channel."""

from __future__ import annotations

import re

from rewards.fences import read_blocks, read_lines

# The channels of gpt-oss (https://cookbook.openai.com/articles/openai-harmony): a header, then the text.
_CHANNEL = re.compile(r"<\|channel\|>\s*+(?P<name>\w++)(?:[^<]|<\|constrain\|>)*+<\|message\|>")
_CHANNEL_END = re.compile(r"<\|(?:end|return|call|start)\|>")

_THINKING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>", "<channel|>"),  # Gemma 4
)
_CLOSING = dict(_THINKING)
_TAG = re.compile("|".join(re.escape(tag) for pair in _THINKING for tag in pair))


def final_part(text: str) -> str | None:
    """The text after thinking, or of the last final channel; None if the completion did not come to its answer.

    A text without tags of thinking or channels is all answer. Thinking may begin in the prompt, so that only its end is
    in the text. A tag inside a code block of the answer is part of the code.
    """
    channels = list(_CHANNEL.finditer(text))
    if channels or text.lstrip().startswith("<|channel|>"):
        final = next((channel for channel in reversed(channels) if channel["name"] == "final"), None)
        if final is None:
            return None
        end = _CHANNEL_END.search(text, final.end())
        text = text[final.end() : end.start() if end else len(text)]
    first = _TAG.match(text, len(text) - len(text.lstrip()))
    if first is not None and first[0] in _CLOSING:
        end = text.find(_CLOSING[first[0]], first.end())
        if end < 0:
            return None
        text = text[end + len(_CLOSING[first[0]]) :]
    tags = _tags_outside_code(text)
    if not tags:
        return text
    return None if tags[-1][0] in _CLOSING else text[tags[-1].end() :]


def _tags_outside_code(text: str) -> list[re.Match[str]]:
    """The tags of thinking, without those that are part of a program.

    In a block that is never closed, a tag at the beginning or end of its line is the model's: it left a draft.
    """
    tags = list(_TAG.finditer(text))
    if not tags:
        return []
    lines = read_lines(text)
    code: list[tuple[int, int, bool]] = []
    for block in read_blocks(lines):
        if block.end > block.first:
            last = lines[block.end - 1]
            code.append((lines[block.first].start, last.start + len(last.text), block.closed))
    outside: list[re.Match[str]] = []
    spans = iter(code)
    span = next(spans, None)
    for tag in tags:
        while span is not None and span[1] < tag.end():
            span = next(spans, None)
        if span is None or tag.start() < span[0] or (not span[2] and _ends_a_line(text, tag)):
            outside.append(tag)
    return outside


def _ends_a_line(text: str, tag: re.Match[str]) -> bool:
    before, after = text[tag.start() - 1 : tag.start()], text[tag.end() : tag.end() + 1]
    return before in ("", "\n") or after in ("", "\r", "\n")
