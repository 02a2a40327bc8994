"""Reads answers in LaTeX before math-verify sees them: what it would misread is rewritten exactly, or not read at all.

All of it takes time linear in the text. docs/rewards.md lists what is read as what.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from cookbook.core.numbers import keeps_number
from rewards.latex_worker import last_box

MAX_DIGITS = 1000
"""Digits of a number that is computed with here; a longer one is not read."""


class UnreadableError(ValueError):
    """An answer that cannot be read as a whole. The message says why."""


@dataclass(frozen=True)
class Reading:
    """One answer: LaTeX for math-verify, or something that is compared exactly.

    `percent`: the LaTeX is followed by a percent sign. `exact`: ("clock", hours, minutes ..., "a" | "p" | ""),
    ("ratio", terms ...) of three or more terms, or ("base", digits, base).
    """

    latex: str = ""
    percent: bool = False
    exact: tuple[object, ...] | None = None


_MATH = re.compile(r"(?<!\\)\$\$?|\\[()\[\]]")
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{3,}+\s")
_OPERATORS = "+-*/^=:.,%()!$€£¥₹°÷·⋅∙√±~'\u00d7\u2044\u2212\u2013\u2215\u2217\u2236"
_AROUND = " \t\xa0:,."
_LETTERS = re.compile(r"\s*+(?P<word>[^\W\d_]++)")

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SMALL = re.compile("(?P<super>[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]++)|[₀₁₂₃₄₅₆₇₈₉]++")
_CHARACTERS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63", "-"), **dict.fromkeys("€£¥₹\u200b\ufeff", ""),
    **dict.fromkeys("·⋅∙\u2217", r"\cdot "), **dict.fromkeys("\u2044\u2215", "/"), "\u00d7": r"\times ", "÷": r"\div ",
    "\u2236": ":", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "…": r"\ldots ", "°": r"^\circ ",
}  # fmt: skip
_WRAPPER = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]|\\(?:pounds|euro|displaystyle)(?![a-zA-Z])")
_DOTS = re.compile(r"\.\.|\\[lc]?dots(?![a-zA-Z])")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?P<separators>(?:(?:\{,\}|,?\\[!,;:]|\{\\,\}|\\\ |~|'|\ )\d{3})++)(?![\d])")
_MIXED = re.compile(r"(?<![\d./])(\d++)(?:\s|\\[ ,;:]|~)++(\d++)\s*+/\s*+(\d++)(?![\d/.])")
_SPACED_FRACTION = re.compile(r"(?<=\d)(?:\s|\\[ ,;:!]|~)++(?=\\[dtc]?frac)")
_PERCENT = re.compile(r"(?:\\?%|(?:\\(?:text|mathrm|mbox)\s*+\{\s*+)?per\s?cent\s*+\}?)\s*+\.?\Z")
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d*+)\.(?P<fixed>\d*+)(?:\\(?:overline|bar)\s*+(?:\{\s*+(?P<over>\d++)\s*+\}|(?P<one>\d))"
    r"|\\dot\s*+\{?(?P<first>\d)\}?(?:(?P<middle>\d*+)\\dot\s*+\{?(?P<last>\d)\}?)?)(?!\d)"
)
_COLONS = re.compile(
    r"(?:\\(?:text|mathrm|mbox)\s*+\{)?\s*+(?P<terms>\d++(?:\.\d++)?(?:\s*+\{?:\}?\s*+\d++(?:\.\d++)?)++)\s*+\}?"
    r"(?:(?:\s|\\[ ,;:])*+(?:\\(?:text|mathrm|mbox)\s*+\{)?\s*+(?P<half>[aApP])\.?\s?[mM]\.?\s*+\}?)?"
)
_HOURS, _MINUTES = re.compile("[01]?[0-9]|2[0-4]"), re.compile("[0-5][0-9]")
_BASE = re.compile(r"(?P<digits>[0-9A-F]++)_(?:(?P<short>\d)|\{\s*+(?P<long>\d{1,2})\s*+\})")
_SCALE = re.compile(
    r"(?<=[\d}])(?:\s|\\[ ,;:]|~)*+(?:\\(?:text|mathrm|mbox)\s*+\{\s*+)?"
    r"(?P<name>hundred|thousand|million|billion|trillion)s?(?![a-zA-Z])(?P<close>\s*+\})?"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_TEXT = re.compile(
    r"(?<=[\d}])(?:\s|\\[ ,;:]|~)*+\\(?:text|mathrm|mbox)\s*+\{(?P<words>[^{}]*+)\}(?P<digit>[\s\\ ]*+\d)?"
)
_EXPONENT = re.compile(r"(?<=[\d.])[eE]\+?(-?\d{1,4})(?!\d)")
_LONG_EXPONENT = re.compile(r"\^(-?\d{2,}+)")


def find_answer(text: str) -> str | None:
    """The answer in the final part of a completion; None if there is none.

    The content of the last box; without a box the last formula, else the last expression of numbers and operators.
    """
    box = last_box(text)
    if box is not None:
        return box or None
    return _last_formula(text) or _last_expression(text)


def _last_formula(text: str) -> str | None:
    """The content of the last `$...$`, `$$...$$`, `\\(...\\)` or `\\[...\\]` that is not prose between two prices."""
    found = None
    opening: re.Match[str] | None = None
    for mark in _MATH.finditer(text):
        if opening is None:
            opening = mark if mark[0] in ("$", "$$", "\\(", "\\[") else None
            continue
        closing = {"\\(": "\\)", "\\[": "\\]"}.get(opening[0], opening[0])
        content = text[opening.end() : mark.start()] if mark[0] == closing else ""
        if content.strip() and not (mark[0] == "$" and ("\n" in content or _PROSE.search(content))):
            found, opening = content, None
        elif mark[0] in ("$", "$$", "\\(", "\\["):
            opening = mark
    return found


def _last_expression(text: str) -> str | None:
    """The last run of numbers and operators in plain text, if it is not part of a word or of a larger expression."""
    end = next((index + 1 for index in range(len(text) - 1, -1, -1) if _is_numeric(text[index])), 0)
    start = end
    while start and (_is_numeric(text[start - 1]) or text[start - 1] in _OPERATORS or text[start - 1] in " \t\xa0"):
        start -= 1
    while end < len(text) and (text[end] in _OPERATORS or text[end] in " \t\xa0"):
        end += 1
    start = max(start, text.rfind("=", start, end) + 1)
    while start < end and text[start] in _AROUND:
        start += 1
    while start < end and text[end - 1] in _AROUND:
        end -= 1
    after = _LETTERS.match(text, end)
    if start == end or _glues(text[start - 1 : start]) or (after and not keeps_number(after["word"])):
        return None
    return None if _glues(text[end : end + 1]) and not after else text[start:end]


def _is_numeric(character: str) -> bool:
    return unicodedata.numeric(character, None) is not None


def _glues(character: str) -> bool:
    """Whether a character beside a number makes it part of something else."""
    return character.isalpha() or character in ("\\", "_", "{", "}", "^", "<", ">", "|")


def read_answer(answer: str) -> Reading:
    """One answer, gold or a model's, without its box.

    Raises:
        UnreadableError: it cannot be read exactly, or is not an expression.
    """
    text = _plain_characters(answer)
    text = _WRAPPER.sub("", text).strip()
    if not text:
        raise UnreadableError("it is empty")
    if _DOTS.search(text):
        raise UnreadableError("it has dots in place of digits or terms")
    percent = _PERCENT.search(text)
    if percent:
        text = text[: percent.start()].rstrip("\\ \t\n")
    text = _REPEATING.sub(_repeating_fraction, text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _SPACED_FRACTION.sub("", text)
    exact = _exact(text)
    if exact is not None:
        return exact
    text = _EXPONENT.sub(r"\\cdot 10^{\1}", text)
    text = _SCALE.sub(lambda match: rf"\cdot 10^{{{_SCALES[match['name']]}}}", text)
    _refuse_fragments(text)
    text = re.sub(r"\*\*", "^", text).replace("*", r"\cdot ")
    return Reading(_LONG_EXPONENT.sub(r"^{\1}", text), percent=percent is not None)


def _plain_characters(text: str) -> str:
    """The text with fullwidth forms, fractions, superscripts and digits of other scripts in ASCII and LaTeX."""
    if text.isascii():
        return text
    text = _SMALL.sub(_small_to_latex, text)
    return "".join(character if character.isascii() else _plain_character(character) for character in text)


def _small_to_latex(match: re.Match[str]) -> str:
    if match["super"]:
        return f"^{{{match[0].translate(_SUPERSCRIPTS)}}}"
    return f"_{{{match[0].translate(_SUBSCRIPTS)}}}"


@functools.cache
def _plain_character(character: str) -> str:
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    if character.isspace():
        return " "
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    if unicodedata.decomposition(character).startswith("<fraction>"):
        over, _, under = unicodedata.normalize("NFKC", character).partition("\u2044")
        if under:
            return rf"\frac{{{over}}}{{{under}}}"
    if _is_numeric(character) or unicodedata.combining(character):
        raise UnreadableError(f"it contains {character!r}")
    return character


def _repeating_fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1\\overline{6} is (16 - 1) / 90."""
    whole, fixed = match["whole"] or "0", match["fixed"]
    period = match["over"] or match["one"] or match["first"] + (match["middle"] or "") + (match["last"] or "")
    if len(whole + fixed + period) > MAX_DIGITS:
        raise UnreadableError("its period is too long")
    difference = int(whole + fixed + period) - int(whole + fixed)
    value = Fraction(difference, 10 ** len(fixed) * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _exact(text: str) -> Reading | None:
    """A time of day, a ratio or a number in a named base; None if the text is none of them."""
    base = _BASE.fullmatch(text)
    if base:
        return Reading(exact=("base", base["digits"].lstrip("0"), int(base["short"] or base["long"])))
    colons = _COLONS.fullmatch(text)
    if not colons:
        return None
    if len(text) > MAX_DIGITS:
        raise UnreadableError("its numbers are too long")
    terms = [term.strip(" {}") for term in colons["terms"].split(":")]
    half = (colons["half"] or "").lower()
    if half or (_HOURS.fullmatch(terms[0]) and all(_MINUTES.fullmatch(term) for term in terms[1:])):
        return Reading(exact=("clock", *map(Fraction, terms), half))
    values = [Fraction(term) for term in terms]
    if 0 in values:
        raise UnreadableError("it is a ratio with 0")
    if len(values) == 2:
        value = values[0] / values[1]
        return Reading(rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    return Reading(exact=("ratio", *[value / values[0] for value in values]))


def _refuse_fragments(text: str) -> None:
    """Raise UnreadableError for what math-verify reads only a part of, or as something else."""
    if "%" in text:
        raise UnreadableError("it has a percent sign inside")
    if re.search(r"\d\s*+:|:\s*+\d", text):
        raise UnreadableError("it has a ratio or a time inside")
    if re.search(r"\d_", text):
        raise UnreadableError("it has a number in a named base inside")
    if re.search(r"\d(?:\s|\\[ ,;:!]|~)++\d", text):
        raise UnreadableError("it has two numbers with a space between them")
    for match in _TEXT.finditer(text):
        words = re.findall(r"[^\W\d_]+", match["words"])
        if match["digit"] and not {"and", "or"} & set(words):
            raise UnreadableError("it has several numbers with units")
        if not all(keeps_number(word) for word in words):
            raise UnreadableError(f"{match['words'].strip()!r} changes the number before it")


def same_exactly(gold: Reading, answer: Reading) -> bool | None:
    """Whether two answers are the same; None if math-verify has to compare them."""
    if gold.exact is None and answer.exact is None:
        return None
    if gold.exact is not None and answer.exact is not None:
        if gold.exact[0] == answer.exact[0] == "clock":
            halves = {gold.exact[-1], answer.exact[-1]} - {""}
            return gold.exact[:-1] == answer.exact[:-1] and len(halves) < 2
        return gold.exact == answer.exact
    # The base of a number may stand in the problem alone.
    return gold.exact is not None and gold.exact[0] == "base" and answer.latex.lstrip("0") == gold.exact[1]


def pairs(gold: Reading, answer: Reading) -> list[tuple[str, str]]:
    """What math-verify compares; one equal pair is enough.

    A percent sign may be left out where the other side has none: 25% is equal to 25 and to 0.25, but 25 is not 0.25.
    """
    found = [(gold.latex, answer.latex)]
    if gold.percent and not answer.percent:
        found.append((rf"\frac{{{gold.latex}}}{{100}}", answer.latex))
    if answer.percent and not gold.percent:
        found.append((gold.latex, rf"\frac{{{answer.latex}}}{{100}}"))
    return found
