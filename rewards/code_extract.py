"""Extraction of the program from a completion."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

from cookbook.sandbox.base import Language
from rewards.fences import Block, Line, block_text, read_blocks, read_lines
from rewards.final_part import final_part

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
    "go": re.compile(r"^[^\S\n]*+package\s+\w", re.MULTILINE),
    "rust": re.compile(r"\bfn\s+main\b"),
    "javascript": re.compile(r"\bconsole\.|\brequire\s*\(|\bprocess\.|^[^\S\n]*+import\b", re.MULTILINE),
}
"""What a text without fences must contain to be a program; Python is parsed instead."""


@dataclass(frozen=True)
class ExtractedProgram:
    """`fenced`: the program was in a closed code block that is tagged with the language."""

    text: str
    fenced: bool


def extract_program(text: str, language: Language) -> ExtractedProgram | None:
    """The program of a completion, or None if there is none. Only the final part of the completion counts.

    The program is the last code block (three or more backticks or tildes) that is tagged with the language, or else the
    last untagged one. A block that is never closed extends to the end. A text without fences is the program if it looks
    like one, and so is the text before the first fence if the blocks hold none: its opening fence is missing.
    """
    if language == "python" and "```" not in text and "~~~" not in text and _is_program(text, language):
        return ExtractedProgram(_stripped(text), fenced=False)
    answer = final_part(text)
    if answer is None:
        return None
    lines = read_lines(answer)
    blocks = [block for block in read_blocks(lines) if block.text.strip()]
    for block in reversed(blocks):
        if block.tag in ALIASES[language]:
            return _program(lines, block, language)
    untagged = [block for block in reversed(blocks) if not block.tag]
    for block in untagged:
        if block.closed and _is_program(block.text, language):
            return _program(lines, block, language)
    first_fence = next((line for line in lines if line.fence is not None), None)
    if first_fence is None or (first_fence.fence and not first_fence.fence["info"].strip()):
        bare = answer if first_fence is None else answer[: first_fence.start]
        if _is_program(bare, language):
            return ExtractedProgram(_stripped(bare), fenced=False)
    return _program(lines, untagged[0], language) if untagged else None


def _program(lines: list[Line], block: Block, language: Language) -> ExtractedProgram:
    """The program of a block. Python that ends in the middle of a text goes on to the last fence, if it is whole then:
    the fences between are part of a text in the program."""
    text = block.text
    if language == "python" and block.closed and parse_python(text) is None:
        fences = (
            number
            for number in range(len(lines) - 1, block.end, -1)
            if (fence := lines[number].fence) and fence["marks"].startswith(block.marks) and not fence["info"].strip()
        )
        longer = block_text(lines[block.first : next(fences, block.end)], block.indent)
        text = longer if parse_python(longer) is not None else text
    return ExtractedProgram(text.removeprefix("\ufeff"), fenced=block.closed and block.tag != "")


def _stripped(program: str) -> str:
    return program.replace("\r\n", "\n").removeprefix("\ufeff").strip("\r\n") + "\n"


def _is_program(text: str, language: Language) -> bool:
    if language != "python":
        return _BARE[language].search(text) is not None
    tree = parse_python(text)
    return tree is not None and any(_does_something(statement) for statement in tree.body)


def _does_something(statement: ast.stmt) -> bool:
    """False for words that happen to be Python: `word`, `42`, `Answer: below`."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None
    return not isinstance(statement, ast.Expr) or any(isinstance(node, ast.Call) for node in ast.walk(statement))


def parse_python(text: str) -> ast.Module | None:
    """The syntax tree; None if the text is not Python, or is nested too deeply to parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text.removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
