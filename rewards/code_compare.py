"""Comparison of outputs and results with the expected ones, as programming judges do it.

A result is compared in the encoded form in which the program's process sent it (`rewards.code_replay.encode`): no set
or dict is built of values that a program has chosen, and no number of more digits than the comparison needs.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"[+-]?+(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]{1,4}+)?+")
_HEX = re.compile(r"-?0x[0-9a-f]++")

_LARGEST_FLOAT_DIGITS = 256
"""Hexadecimal digits of the largest float."""


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


@dataclass(frozen=True)
class Tagged:
    """An encoded value of a kind that JSON lacks: {"tuple": [1, 2]} is Tagged("tuple", [1, 2])."""

    kind: str
    content: Any


class ForgedAnswerError(ValueError):
    """An answer that the harness did not write."""


def read_answer(line: str) -> Tagged:
    """A line of `rewards.code_replay.answer_calls`: Tagged("value", data), or Tagged("raised", what was raised).

    In the data, an object with one key is Tagged, any other object a tuple of pairs, which is equal to nothing.

    Raises:
        ForgedAnswerError: the harness writes no such line.
    """
    try:
        answer = json.loads(line, object_pairs_hook=_read_object)
    except (ValueError, RecursionError):  # not JSON, an integer of too many digits, or nested too deeply
        answer = None
    match answer:
        case Tagged("value"):
            return answer
        case (("raised", str(name)), ("message", str(message))):
            return Tagged("raised", f"{name}: {message}")
    raise ForgedAnswerError("the result is nested too deeply, or was not written by the harness")


def _read_object(pairs: list[tuple[str, Any]]) -> object:
    return Tagged(*pairs[0]) if len(pairs) == 1 else tuple(pairs)


def same_value(value: object, expected: object, float_tolerance: float | None = None) -> bool:
    """Whether an encoded result (see `read_answer`) equals the expected JSON value.

    A tuple equals a list, and a key of a dict equals its JSON text. Numbers are compared as in Python (1 == 1.0 ==
    True), or with `float_tolerance` if one of them is a float.

    Raises:
        RecursionError: the values are nested several hundred levels deep.
    """
    if isinstance(expected, list):
        items = value.content if isinstance(value, Tagged) and value.kind == "tuple" else value
        return (
            isinstance(items, list)
            and len(items) == len(expected)
            and all(same_value(item, want, float_tolerance) for item, want in zip(items, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, Tagged) and value.kind == "dict" and _same_dict(value.content, expected, float_tolerance)
        )
    if isinstance(expected, str) or expected is None:
        return type(value) is type(expected) and value == expected
    if isinstance(value, Tagged) and value.kind == "int":
        value = _large_int(value.content, expected)
    if not isinstance(value, int | float) or not isinstance(expected, int | float):
        return False
    if float_tolerance is None or not (isinstance(value, float) or isinstance(expected, float)):
        return value == expected
    try:
        return close(float(value), float(expected), float_tolerance)
    except OverflowError:  # an int too large for a float
        return False


def _same_dict(items: object, expected: dict[str, Any], float_tolerance: float | None) -> bool:
    if not isinstance(items, list) or len(items) != len(expected):
        return False
    seen: set[str] = set()  # of the expected keys
    for item in items:
        match item:
            case [key, value]:
                text = key if isinstance(key, str) else json.dumps(_plain(key))
            case _:
                return False
        if text not in expected or text in seen or not same_value(value, expected[text], float_tolerance):
            return False
        seen.add(text)
    return True


def _plain(key: object) -> object:
    """A key as JSON. What JSON lacks, other than tuples, becomes text that no expected key has."""
    if isinstance(key, Tagged) and key.kind == "int":
        return _large_int(key.content, 0.0)
    if isinstance(key, Tagged) and key.kind == "tuple" and isinstance(key.content, list):
        return [_plain(item) for item in key.content]
    return key if key is None or isinstance(key, int | float | str) else repr(key)


def _large_int(digits: object, expected: object) -> int | None:
    """An int that is encoded in hexadecimal; None if it is longer than any number that it could be equal to."""
    if not isinstance(digits, str) or not _HEX.fullmatch(digits):
        return None
    longest = expected.bit_length() // 4 + 4 if isinstance(expected, int) else _LARGEST_FLOAT_DIGITS + 4
    return int(digits, 16) if len(digits) <= longest else None
