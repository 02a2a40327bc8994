"""Fenced code blocks of a text. Finding them takes time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# A byte-order mark or a zero-width space before a fence is invisible to the model that wrote it.
_FENCE = re.compile(r"[\ufeff\u200b\u2060]*+(?P<indent>[ \t]*+)(?P<marks>`{3,}+|~{3,}+)(?P<info>[^`]*+)$")
_TAG = re.compile(r"[\w+#-]+")


@dataclass(frozen=True)
class Line:
    """One line without its end. `start` is where it begins in the text."""

    text: str
    start: int
    fence: re.Match[str] | None


@dataclass(frozen=True)
class Block:
    """A code block: the lines from `first` up to `end`, not counting its fences. `closed`: it has a closing fence."""

    tag: str
    text: str
    closed: bool
    indent: int
    marks: str
    first: int
    end: int


def read_lines(text: str) -> list[Line]:
    """The lines of a text. Only line feeds end a line: what else `str.splitlines` splits at may be inside a string."""
    lines: list[Line] = []
    start = 0
    for line in text.split("\n"):
        plain = line.removesuffix("\r")
        lines.append(Line(plain, start, _FENCE.match(plain)))
        start += len(line) + 1
    return lines


def read_blocks(lines: list[Line]) -> Iterator[Block]:
    """The fenced code blocks in order.

    Two differences from CommonMark: fences may be indented, as in lists, and a tagged fence inside a block starts the
    next block, since the closing fence may be missing. A fence indented four spaces more than its block is text.
    """
    opening: re.Match[str] | None = None
    tag, first = "", 0
    for number, line in enumerate(lines):
        fence = line.fence
        if fence is None:
            continue
        closing = False
        if opening is not None:
            if len(fence["indent"]) >= len(opening["indent"]) + 4:
                continue
            same_kind = fence["marks"].startswith(opening["marks"])
            tagged = bool(fence["info"].strip())
            closing = same_kind and not tagged
            if not closing and not (tagged and (same_kind or tag in ("markdown", "md"))):
                continue
            yield _block(lines, opening, tag, closing, first, number)
        opening, first = None if closing else fence, number + 1
        tag = "" if opening is None else _tag(opening)
    if opening is not None:
        yield _block(lines, opening, tag, False, first, len(lines))


def block_text(lines: list[Line], indent: int) -> str:
    """The content of a block, each line without as much of the fence's indentation as it has."""
    content = [line.text[min(indent, len(line.text) - len(line.text.lstrip(" \t"))) :] for line in lines]
    return "\n".join(content).rstrip("\n") + "\n"


def _block(lines: list[Line], opening: re.Match[str], tag: str, closed: bool, first: int, end: int) -> Block:
    indent = len(opening["indent"])
    return Block(tag, block_text(lines[first:end], indent), closed, indent, opening["marks"], first, end)


def _tag(fence: re.Match[str]) -> str:
    """The first word after the fence: `python`, `{.python}` and `python title="a.py"` are python."""
    tag = _TAG.search(fence["info"])
    return "" if tag is None else tag[0].lower()
