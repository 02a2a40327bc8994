"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """` (did you mean X?)` with the closest of `options`, or "" if none is close. Begins with a space."""
    matches = get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches else ""
