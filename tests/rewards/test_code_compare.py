import json

import pytest

from rewards.code_compare import read_answer, same_output, same_value
from rewards.code_replay import NotPlain, decode, encode


@pytest.mark.parametrize(
    ("output", "expected", "tolerance", "same"),
    [
        ("1 2\n3\n", "1 2\n3", None, True),
        ("1 2  \r\n3\n\n\n", "1 2\n3\n", None, True),
        ("  1\n2", "1 2", None, True),
        ("", "\n", None, True),
        ("", "1", None, False),
        ("1 2", "1", None, False),
        ("Yes", "YES", None, False),
        ("12", "1 2", None, False),
        ("1.0", "1", None, False),
        ("0.3000001", "0.3", 1e-6, True),
        ("0.30001", "0.3", 1e-6, False),
        ("1000001", "1e6", 1e-5, True),
        ("nan", "1.0", 1e-6, False),
        ("inf", "1e9999", 1e-6, False),
        ("1.0", "1e9999", 1e-6, False),
        ("1_0", "10", 1e-6, False),
        ("a 1.0", "a 1", 1e-6, True),
        ("b 1.0", "a 1", 1e-6, False),
    ],
)
def test_outputs(output, expected, tolerance, same):
    assert same_output(output, expected, tolerance) is same


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "same"),
    [
        ((1, [2, (3,)]), [1, [2, [3]]], None, True),
        ([1, 2], [1, 2, 3], None, False),
        (1, 1.0, None, True),
        (True, 1, None, True),
        ("1", 1, None, False),
        (1, "1", None, False),
        (None, None, None, True),
        (0, None, None, False),
        (None, False, None, False),
        ({1: "a", None: "b"}, {"1": "a", "null": "b"}, None, True),
        ({(1, 2): 3.0}, {"[1, 2]": 3}, None, True),
        ({"a": 1}, {"b": 1}, None, False),
        ([0.1 + 0.2], [0.3], None, False),
        ([0.1 + 0.2], [0.3], 1e-9, True),
        (3, 4, 0.5, False),
        (4, 4.2, 0.5, True),
        (10**400, 1.0, 0.5, False),
        (float("nan"), 1.0, 0.5, False),
        ({1, 2}, [1, 2], None, False),
        ("ab", ["a", "b"], None, False),
    ],
)
def test_values(value, expected, tolerance, same):
    sent = read_answer(json.dumps({"value": encode(value)})).content
    assert same_value(sent, expected, tolerance) is same


VALUES = [
    None, True, -7, 10**5000, 2**63, -(2**70), 1.5, float("inf"), "é\ud800\u2028", b"\0\xff", 2 - 3j,
    (), (1, (2,)), [[], [1.0]], {1: {"a": (2,)}, (1, 2): None}, {1, "a", (2,)}, frozenset({1}), int, ValueError,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_arrives_as_it_was(value):
    arrived = decode(encode(value))
    assert arrived == value and type(arrived) is type(value)


def test_an_iterator_arrives_as_one():
    arrived = decode(encode(x * 2 for x in range(3)))
    assert arrived != [0, 2, 4] and list(arrived) == [0, 2, 4]  # type: ignore[call-overload]


def test_the_same_set_is_the_same_text_whatever_its_order():
    assert encode({8, 0, 16}) == encode({16, 8, 0})


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [object(), lambda: 0, [print], nested(200), (x for x in iter(int, 1))], ids=str)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(NotPlain):
        encode(value)


@pytest.mark.parametrize(
    "data", [{}, {"a": 1, "b": 2}, {"pickle": "x"}, {"bytes": 3}, {"dict": 5}, {"type": "eval"}, {"type": "nothing"}]
)
def test_forged_data_is_an_error(data):
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)):
        decode(data)
