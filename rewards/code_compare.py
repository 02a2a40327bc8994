"""Comparison of outputs and results with the expected ones, as programming judges do it."""

from __future__ import annotations

import json
import math
import re

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")


def same_output(output: str, expected: str, float_tolerance: float | None = None) -> bool:
    """Whether an output has the expected tokens in the expected order.

    Tokens are separated by any white space. They are compared as text, case-sensitively, or with `float_tolerance` as
    decimal numbers.
    """
    tokens, wanted = output.split(), expected.split()
    return len(tokens) == len(wanted) and all(
        token == want or (float_tolerance is not None and _same_number(token, want, float_tolerance))
        for token, want in zip(tokens, wanted, strict=True)
    )


def _same_number(token: str, wanted: str, tolerance: float) -> bool:
    return bool(_NUMBER.fullmatch(token) and _NUMBER.fullmatch(wanted)) and close(
        float(token), float(wanted), tolerance
    )


def close(value: float, expected: float, tolerance: float) -> bool:
    """Whether the error is at most `tolerance`, absolute or relative to the larger."""
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)


def same_value(value: object, expected: object, float_tolerance: float | None = None) -> bool:
    """Whether a function's result equals the expected JSON value.

    A tuple equals a list, and a key of a dict equals its JSON text. Numbers are compared as in Python (1 == 1.0 ==
    True), or with `float_tolerance` if one of them is a float.

    Raises:
        RecursionError: the values are nested several hundred levels deep.
    """
    if isinstance(expected, list):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(same_value(item, want, float_tolerance) for item, want in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        items = {_key(key): item for key, item in value.items()}
        return items.keys() == expected.keys() and all(
            same_value(items[key], want, float_tolerance) for key, want in expected.items()
        )
    if isinstance(expected, str) or expected is None:
        return type(value) is type(expected) and value == expected
    if not isinstance(value, int | float) or not isinstance(expected, int | float):
        return False
    if float_tolerance is None or not (isinstance(value, float) or isinstance(expected, float)):
        return value == expected
    try:
        return close(float(value), float(expected), float_tolerance)
    except OverflowError:  # an int too large for a float
        return False


def _key(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=repr)
