"""Reads numbers as people and models write them in answers, and normalises their spelling.

Numbers are text, never floats, so `0.1` is exactly `0.1`. A number that is only part of an expression (`10**6`, `3½`,
`5 k`) is not read. Every pattern here is possessive (no backtracking), so reading takes time linear in the text.
docs/rewards.md lists what is read as which number.
"""

from __future__ import annotations

import re
import unicodedata

ANSWER_MARKER = "####"

# Models write fullwidth forms within Chinese or Japanese text, and these dashes for a minus sign.
_TO_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_TO_ASCII |= dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\ufe63"), ord("-"))

_COMMAND = r"\\(?:boxed|fbox|mbox|bm|(?:text|math)(?:bf|rm|it|sf|tt|normal)?)\s*+\{"
_LATEX_SPACE = r"\\(?:[,;:!>\ ]|q?quad(?![a-zA-Z]))"
_CLOSING = {"\\(": "\\)", "\\[": "\\]", "(": ")"}

_LEAD = re.compile(
    rf"""
    # white space, markdown emphasis, currency
    (?P<skip>(?:[\s*_`$€£¥₹]|\\[$]|\\displaystyle(?![a-zA-Z])|{_LATEX_SPACE})++)
  | (?P<open>\\[(\[]|[({{]|{_COMMAND})
    """,
    re.VERBOSE,
)
_NUMBER = re.compile(
    r"""
    (?P<sign>[+-])?+
    (?:\\?[$€£¥₹])*+                                    # -$5
    (?P<integer>[0-9]++(?:(?:\{,\}|,\\!|\\[,!]|,)[0-9]++)*+)?+
    (?:\.(?P<fraction>[0-9]++))?+
    """,
    re.VERBOSE,
)
_SEPARATOR = re.compile(r"[{}\\,!]++")

# What may follow a number without changing it.
_TAIL = re.compile(
    rf"""
    (?P<space>(?:[^\S\r\n]|{_LATEX_SPACE}|~)++)
  | (?P<line>[\r\n]++)
  | (?P<close>\\[)\]]|[)}}])
  | (?P<emphasis>[*_`]++(?=[\s.,;:!?)\]}}$%\\"'*_`<]|\Z))
  | (?P<unit>(?:\\?[$%€£¥₹]|[¢°]|\^(?:\\circ(?![a-zA-Z])|\{{\s*+\\circ\s*+\}}))++)
  | (?P<comment>\((?=[^\W\d_]{{2}})[^()\r\n]*+\))
  | (?P<open>{_COMMAND})
  | (?P<word>(?:[/\-\u2014][^\S\r\n]?+)?+(?P<letters>[^\W\d_]++(?:['\u2019-][^\W\d_]++)*+))
  | (?P<comma>[,;\u3001](?=[\s)}}*_`$\\]|\Z))
  | (?P<stop>[.\u3002](?=[\s)}}*_`$"'\u201d\\<]|\Z))
  | (?P<shout>[!?]++)
  | (?P<markup></[A-Za-z]++>|<\|[^|<>\s]++\|>|["'\u201c\u201d\ufe0f])
    """,
    re.VERBOSE,
)

# Letters that are read as units; any other single letter may be a variable, a digit or a factor: 5x, 5i, 5k, 5M.
_UNIT_LETTERS = frozenset("aghlmsLCF")
_NOT_UNITS = frozenset(
    [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
        "twenty",
        "thirty",
        "forty",
        "fifty",
        "sixty",
        "seventy",
        "eighty",
        "ninety",
        "half",
        "halve",
        "quarter",
        "third",
        "fourth",
        "fifth",
        "sixth",
        "seventh",
        "eighth",
        "ninth",
        "tenth",
        "hundredth",
        "thousandth",
        "millionth",
        "hundred",
        "dozen",
        "lakh",
        "crore",
        "mil",
        "mio",
        "bn",
        "mn",
        "mln",
        "bln",
        "tn",
        "permille",
        "plus",
        "minus",
        "multiplied",
        "divided",
        "mod",
        "modulo",
        "squared",
        "cubed",
        "factorial",
        "sqrt",
        "root",
        "power",
        "exp",
        "log",
        "ln",
        "sin",
        "cos",
        "tan",
        "point",
        "pi",
        "infinity",
        "infinite",
    ]
)
_SCALES = ("thousand", "million", "milliard", "billion", "trillion", "quadrillion")


def normalize_number(text: str) -> str | None:
    """The number that `text` begins with, in its canonical spelling (`-1234.5`); None if there is none.

    Brackets, LaTeX boxes, emphasis and currency around the number are ignored, and so are units and remarks after it,
    up to the end of the line or sentence. None too if the number is part of an expression.

    Canonical: no `+`, no separators of thousands, no leading zeros, no trailing zeros after the point, no `-0`.
    """
    text = text.translate(_TO_ASCII)
    position, open_brackets = 0, []
    while lead := _LEAD.match(text, position):
        position = lead.end()
        if lead["open"]:
            open_brackets.append(_CLOSING.get(lead["open"], "}"))
    match = _NUMBER.match(text, position)
    if match is None:
        return None
    integer, fraction = _SEPARATOR.sub(",", match["integer"] or ""), match["fraction"] or ""
    if not (integer or fraction) or not _commas_separate_thousands(integer):
        return None
    if not _number_is_complete(text, match.end(), open_brackets):
        return None
    integer = integer.replace(",", "").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    number = f"{integer}.{fraction}" if fraction else integer
    return f"-{number}" if match["sign"] == "-" and number != "0" else number


def _commas_separate_thousands(integer: str) -> bool:
    """True for 1,234,567 and the Indian 12,34,567; False for 1,5 and 3,4,5, which mean something else."""
    first, *groups = integer.split(",")
    if not groups:
        return True
    return len(first) <= 3 and len(groups[-1]) == 3 and all(len(group) in (2, 3) for group in groups)


def _number_is_complete(text: str, position: int, open_brackets: list[str]) -> bool:
    """Whether what follows a number that ends at `position` leaves it as it is, and closes `open_brackets`."""
    before, sentence_ended = "number", False
    while position < len(text):
        token = _TAIL.match(text, position)
        found = token[0] if token else ""
        letters = (token["letters"] if token else None) or ""
        if token is None:
            if unicodedata.category(text[position]) != "So" or unicodedata.numeric(text[position], None) is not None:
                return False
            kind, position = "symbol", position + 1
        else:
            kind, position = token.lastgroup, token.end()
        match kind:
            case "line" if not open_brackets:
                return True
            case "close" if open_brackets and open_brackets.pop() != found:
                return False
            case "open":
                open_brackets.append("}")
            case "emphasis" if before == "space":
                return False
            case "comment" if before != "space" or not keeps_number(found[1:].split(maxsplit=1)[0].rstrip(")")):
                return False
            case "word" | "letters":
                if sentence_ended and before == "space" and not open_brackets and len(letters) > 1:
                    return True
                # "18 a day": the article, not a variable.
                if letters == "a" and not text[position : position + 2].strip().isalpha():
                    return False
                if not keeps_number(letters):
                    return False
                kind = "word"
            case "shout" if before != "word":  # 5! is 120
                return False
        sentence_ended = kind == "stop" or (sentence_ended and kind in ("space", "emphasis", "close"))
        before = kind
    return not open_brackets


def keeps_number(word: str) -> bool:
    """Whether a word after a number leaves it as it is: a unit or a remark, not `million`, `half`, `plus` or `x`."""
    if len(word) == 1:
        return word in _UNIT_LETTERS or (not word.isascii() and _is_plain(word))
    parts = word.casefold().replace("\u2019", "'").replace("'", "-").split("-")
    return (
        any(len(part) > 1 for part in parts)
        and not any(part.removesuffix("s") in _NOT_UNITS or part.startswith(_SCALES) for part in parts)
        and all(character.isascii() or _is_plain(character) for character in word)
    )


def _is_plain(letter: str) -> bool:
    """False for characters that are numbers or exponents in themselves: ½, ⁶, 万, 半 (half), ˣ, π."""
    return (
        unicodedata.numeric(letter, None) is None and unicodedata.category(letter) != "Lm" and letter not in "半点點π"
    )


def extract_answer(text: str) -> str | None:
    """The number after the last `####` of `text`, normalised; None if no number follows it directly."""
    _, marker, tail = text.rpartition(ANSWER_MARKER)
    return normalize_number(tail) if marker else None
