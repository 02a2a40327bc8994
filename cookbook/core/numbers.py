"""Reads numbers as people write them in answers, and normalises their spelling.

Numbers are text, never floats, so `0.1` is exactly `0.1`. Every pattern here is possessive (no backtracking), so
reading takes time linear in the text. docs/rewards.md lists what is read as which number.
"""

from __future__ import annotations

import re

ANSWER_MARKER = "####"

# Models write fullwidth forms within Chinese or Japanese text, and these dashes for a minus sign.
_TO_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_TO_ASCII |= dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\ufe63"), ord("-"))

_NUMBER = re.compile(
    r"""
    [\s*_`\\$€£¥₹]*+                # white space, markdown emphasis, currency, an escaped \$
    (?P<sign>[+-])?+
    [\\$€£¥₹]*+                     # -$5
    (?P<integer>[0-9]++(?:,[0-9]++)*+)?+
    (?:\.(?P<fraction>[0-9]++))?+
    """,
    re.VERBOSE,
)

# The digits just read are part of something else: 1.2.3, 12:30, 1e3, 5_000, 3/4, 10 - 3, 5 x 3, 1 000.
_CONTINUATION = re.compile(r"(?:[.,:'\u2019_]|[eE][+-]?|[^\S\r\n]*+(?:[-+*/^\u00d7\u00f7xX][^\S\r\n]*+)?+)\d")


def normalize_number(text: str) -> str | None:
    """The number that `text` begins with, in its canonical spelling (`-1234.5`); None if there is none.

    Canonical: no `+`, no commas, no leading zeros, no trailing zeros after the point, no `-0`.
    """
    text = text.translate(_TO_ASCII)
    match = _NUMBER.match(text)
    if match is None or _CONTINUATION.match(text, match.end()):
        return None
    integer, fraction = match["integer"] or "", match["fraction"] or ""
    if not (integer or fraction) or not _commas_separate_thousands(integer):
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


def extract_answer(text: str) -> str | None:
    """The number after the last `####` of `text`, normalised; None if no number follows it directly."""
    _, marker, tail = text.rpartition(ANSWER_MARKER)
    return normalize_number(tail) if marker else None
