"""Every public function that reads a model's or a program's text takes time in proportion to it.

Work is counted as processor time of this thread, for a text and one of eight times its length: quadratic work takes 64
times as long. A busy machine makes single measurements longer, so the best of several counts.
"""

import json
import re
import time
from collections.abc import Callable
from functools import partial

import pytest

from cookbook.core.numbers import extract_answer, normalize_number
from cookbook.sandbox.base import Language
from rewards.code_compare import ForgedAnswerError, read_answer, same_output, same_value
from rewards.code_extract import extract_program
from rewards.fences import read_blocks, read_lines
from rewards.final_part import final_part
from rewards.latex_text import UnreadableError, find_answer
from rewards.latex_text import read_answer as read_latex
from rewards.latex_worker import last_box

LANGUAGES: tuple[Language, ...] = ("python", "cpp", "java", "go", "rust", "javascript")

PIECES = [
    "9", "0", "1,", ",123", "{,}123", r"\,123", "1.", "1e", "9x", "9 ", " ", "\n", "\r\n", "\t", "\xa0", "-", "+-",
    "*", "**",
    "_", "`", "~", "```\n", "~~~\n", "```python\n", "~~~ a\n", "``` \n", "    ```\n", "`~", "$", "$$", "$ ", "$x$ ",
    r"\$", "\\",
    r"\(", r"\)", r"\[", r"\(\)", "(", ")", "((", "{", "}", "{}", r"\boxed{", r"\text{", r"\text{a}", r"1\text{ a }",
    r"\frac{1}{2}", "3 1/2 ", "3 1/", r"0.\overline{3}", r"\dot{3}", "0.", ".3", ":", "3:", "3: ", "12:00", "%", r"\%",
    "percent", "per cent ", "5 million", "million ", "#", "#### ", "#### 5 ", "<", "<think>", "</think>",
    "<think></think>",
    "<|channel|>", "<|channel|>a", "<|channel|>final<|message|>", "<|end|>", "[THINK]", "a", "a ", "a'", "a-",
    "import ",
    "package ", "main ", "class ", "console", "\ufeff", "½", "⁶", "\u0661", "e\u0301", "\ud800", "\x00", "=", "= ",
    "5 = ", "/", "/ ",
    '"', "'", '"""', "#", "[", "(1,", "not ", "x=", "if x:\n ", "\\\n",
]  # fmt: skip
ENDS = ["", "x", "`", "5", "}", "\n```\n", "1"]
STARTS = ["", "#### ", "#### 5", "```python\n", "~~~", "1", r"\boxed{", "$", "<think>", "```" + " " * 1000]


def call(line: str) -> None:
    try:
        same_value(read_answer(line).content, {"a": [1.0, "x"], "1": 2}, 1e-6)
    except (ForgedAnswerError, RecursionError):
        return


def latex(text: str) -> None:
    try:
        read_latex(text)
    except UnreadableError:
        return


READERS: dict[str, Callable[[str], object]] = {
    "extract_answer": extract_answer,
    "normalize_number": normalize_number,
    "final_part": final_part,
    "fences": lambda text: list(read_blocks(read_lines(text))),
    "last_box": last_box,
    "find_answer": find_answer,
    "read_latex": latex,
    "output": lambda text: same_output(text, "1.5 2.5", 1e-6),
    "one token": lambda text: same_output("".join(text.split()), "1.5", 1e-6),
    "many tokens": lambda text: same_output(text, text + "1", 1e-6),
    **{f"program in {language}": partial(extract_program, language=language) for language in LANGUAGES},
    "value": lambda text: call(json.dumps({"value": text})),
    "line": call,
    "int": lambda text: call(json.dumps({"value": {"int": text}})),
    "dict": lambda text: call(json.dumps({"value": {"dict": [[text[:8], 1]] * (len(text) // 16)}})),
    "number": lambda text: call('{"value": ' + text + "}"),
}  # fmt: skip


def seconds(reader: Callable[[str], object], text: str) -> float:
    start = time.thread_time()
    reader(text)
    return time.thread_time() - start


def is_linear(reader: Callable[[str], object], make: Callable[[int], str], largest: int) -> bool:
    """Grows the text by factors of eight, so that quadratic work is found before it takes minutes."""
    size = 1 << 13
    before = seconds(reader, make(size))
    while size < largest:
        size = min(8 * size, largest)
        text = make(size)
        for _ in range(6):
            now = seconds(reader, text)
            # Twice linear, above a constant below which time is not measured well.
            if now <= 16 * max(before, 0.004):
                break
        else:
            return False
        before = now
    return True


def slow(
    reader: Callable[[str], object], texts: list[tuple[str, str, str]], largest: int
) -> list[tuple[str, str, str]]:
    def is_slow(start: str, piece: str, end: str) -> bool:
        return not is_linear(reader, lambda size: start + piece * (size // len(piece)) + end, largest)

    return [text for text in texts if is_slow(*text)]


@pytest.mark.parametrize("name", READERS)
def test_work_grows_in_proportion_to_the_text(name: str):
    texts = [(STARTS[n % len(STARTS)], piece, ENDS[n % len(ENDS)]) for n, piece in enumerate(PIECES)]
    assert slow(READERS[name], [*texts, *[("", piece, "") for piece in PIECES[::2]]], 1 << 16) == []


@pytest.mark.parametrize("name", READERS)
def test_up_to_a_megabyte(name: str):
    texts = [
        ("", "9", "x"),
        ("#### 5", "9", "x"),
        ("", "~", "`"),
        ("#### ", ",123", ""),
        ("", "\n", "package"),
        ("", " ", "%"),
    ]
    assert slow(READERS[name], texts, 1 << 20) == []


def test_the_measure_finds_quadratic_work():
    quadratic = re.compile(r"[0-9]*[0-9]*x")
    assert not is_linear(lambda text: quadratic.fullmatch(text[: len(text) >> 3]), lambda size: "9" * size, 1 << 16)
