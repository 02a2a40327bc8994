"""Extraction of the program from a completion."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from cookbook.sandbox.base import Language

ALIASES: dict[Language, frozenset[str]] = {
    "python": frozenset({"python", "python3", "py", "py3"}),
    "cpp": frozenset({"cpp", "c++", "cc", "cxx", "c++17", "c++20", "cpp17", "cpp20"}),
    "java": frozenset({"java"}),
    "go": frozenset({"go", "golang"}),
    "rust": frozenset({"rust", "rs"}),
    "javascript": frozenset({"javascript", "js", "node"}),
}
"""Tags of code fences for each language, in lower case."""

_BARE: dict[Language, re.Pattern[str]] = {
    "cpp": re.compile(r"\bmain\s*\("),
    "java": re.compile(r"\bclass\s+\w"),
    "go": re.compile(r"^\s*package\s+\w", re.MULTILINE),
    "rust": re.compile(r"\bfn\s+main\b"),
    "javascript": re.compile(r"\bconsole\.|\brequire\s*\(|\bprocess\.|^\s*import\b", re.MULTILINE),
}
"""What a text without fences must contain to be a program; Python is parsed instead."""

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)$")
_TAG = re.compile(r"[\w+#-]+")


@dataclass(frozen=True)
class ExtractedProgram:
    """`fenced`: the program was in a closed code block that is tagged with the language."""

    text: str
    fenced: bool


@dataclass(frozen=True)
class _Block:
    tag: str
    text: str
    closed: bool


def extract_program(text: str, language: Language) -> ExtractedProgram | None:
    """The program of a completion, or None if there is none.

    Thinking (up to the last `</think>`) is removed; if `<think>` is never closed, there is no program. The program is
    the last code block (three or more backticks or tildes) that is tagged with the language, or else the last untagged
    one. A block that is never closed extends to the end. A text without fences is the program if it looks like one.
    """
    _, _, answer = text.rpartition("</think>")
    if "<think>" in answer:
        return None
    blocks = [block for block in _blocks(answer) if block.text.strip()]
    for tags in (ALIASES[language], {""}):
        for block in reversed(blocks):
            if block.tag in tags:
                return ExtractedProgram(block.text, fenced=block.closed and block.tag != "")
    if not any(_FENCE.match(line) for line in _lines(answer)) and _is_program(answer, language):
        return ExtractedProgram(answer.strip("\r\n") + "\n", fenced=False)
    return None


def _blocks(text: str) -> Iterator[_Block]:
    """The fenced code blocks in order.

    Two differences from CommonMark: fences may be indented, as in lists, and a tagged fence inside a block starts the
    next block, since the closing fence may be missing. A fence indented four spaces more than its block is text.
    """
    opening: re.Match[str] | None = None
    content: list[str] = []
    for line in _lines(text):
        fence = _FENCE.match(line)
        if opening is None:
            opening, content = fence, []
            continue
        indent = len(opening["indent"])
        if fence is not None and len(fence["indent"]) < indent + 4:
            same_kind = fence["marks"].startswith(opening["marks"])
            tagged = bool(fence["info"].strip())
            if same_kind and not tagged:
                yield _block(opening, content, closed=True)
                opening = None
                continue
            if tagged and (same_kind or _tag(opening) in ("markdown", "md")):
                yield _block(opening, content, closed=False)
                opening, content = fence, []
                continue
        # As much of the fence's own indentation as the line has.
        content.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
    if opening is not None:
        yield _block(opening, content, closed=False)


def _lines(text: str) -> list[str]:
    # Not str.splitlines, which also splits at characters that may occur inside a string.
    return text.replace("\r\n", "\n").split("\n")


def _block(opening: re.Match[str], content: list[str], closed: bool) -> _Block:
    return _Block(_tag(opening), "\n".join(content).rstrip("\n") + "\n", closed)


def _tag(fence: re.Match[str]) -> str:
    """The first word after the fence: `python`, `{.python}` and `python title="a.py"` are python."""
    tag = _TAG.search(fence["info"])
    return "" if tag is None else tag[0].lower()


def _is_program(text: str, language: Language) -> bool:
    if language != "python":
        return _BARE[language].search(text) is not None
    tree = parse_python(text)
    # A single word or number is also a valid Python expression, but does nothing.
    return tree is not None and any(
        not isinstance(statement, ast.Expr) or any(isinstance(node, ast.Call) for node in ast.walk(statement))
        for statement in tree.body
    )


def parse_python(text: str) -> ast.Module | None:
    """The syntax tree; None if the text is not Python, or is nested too deeply to parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
