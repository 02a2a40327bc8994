"""The parts that `tiny_programs` composes: inputs, operations from one type of value to another, and ways to print.

The variable of a type has one name in every program: n an integer, xs integers, s a text, ws words, a, b, c integers on one line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Type = Literal["int", "pair", "triple", "ints", "text", "words", "output"]

LETTERS = "aeinorst"
CONSTANTS: Mapping[str, Sequence[int | str]] = {"k": range(2, 10), "c": LETTERS, "m": "-+/:"}
"""An operation's constant is a number, a letter or a mark, and stands as {k}, {c} or {m} in its phrases and its code."""


@dataclass(frozen=True)
class Input:
    """What is on stdin: in the words of either phrasing, and the line of code that reads it."""

    name: str
    type: Type
    phrases: tuple[str, str]
    code: str


@dataclass(frozen=True)
class Operation:
    """From a value of type `takes` to one of type `gives`: in words, in code, and as a function of the value and the constant."""

    name: str
    takes: Type
    gives: Type
    phrases: tuple[str, str]
    code: str
    function: Callable[[Any, Any], Any]

    @cached_property
    def constant(self) -> str | None:
        """Its key in `CONSTANTS`; None where the operation has no constant."""
        return next((key for key in CONSTANTS if f"{{{key}}}" in self.code), None)


INPUTS = (
    Input("one", "int", ("an integer", "one integer"), "n = int(input())"),
    Input("two", "pair", ("two integers on a line", "two integers"), "a, b = map(int, input().split())"),
    Input("three", "triple", ("three integers on a line", "three integers"), "a, b, c = map(int, input().split())"),
    Input("list", "ints", ("a line of integers", "a list of integers"), "xs = list(map(int, input().split()))"),
    Input("word", "text", ("a word", "one word"), "s = input()"),
    Input("words", "words", ("a line of words", "a list of words"), "ws = input().split()"),
)


def _operations(
    takes: Type, gives: Type, *rows: tuple[str, str, str, str, Callable[[Any, Any], Any]]
) -> list[Operation]:
    """From rows of name, phrases, code and function."""
    return [
        Operation(name, takes, gives, (first, second), code, function) for name, first, second, code, function in rows
    ]


def _horner(values: Sequence[int], factor: int) -> int:
    total = 0
    for value in values:
        total = total * factor + value
    return total


_OPERATIONS = (
    *_operations(
        "int",
        "int",
        ("add", "add {k}", "increase it by {k}", "n = n + {k}", lambda n, k: n + k),
        ("subtract", "subtract {k}", "decrease it by {k}", "n = n - {k}", lambda n, k: n - k),
        ("multiply", "multiply by {k}", "take it {k} times", "n = n * {k}", lambda n, k: n * k),
        (
            "divide",
            "divide by {k} and round down",
            "take its whole quotient by {k}",
            "n = n // {k}",
            lambda n, k: n // k,
        ),
        ("remainder", "take the remainder by {k}", "reduce it modulo {k}", "n = n % {k}", lambda n, k: n % k),
        ("at_least", "raise it to at least {k}", "take the larger of it and {k}", "n = max(n, {k})", max),
        ("at_most", "cut it to at most {k}", "take the smaller of it and {k}", "n = min(n, {k})", min),
        (
            "distance",
            "take its distance to {k}",
            "find how far it is from {k}",
            "n = abs(n - {k})",
            lambda n, k: abs(n - k),
        ),
        ("square", "square it", "multiply it by itself", "n = n * n", lambda n, _: n * n),
        ("negate", "negate it", "change its sign", "n = -n", lambda n, _: -n),
        (
            "digit_sum",
            "add up its digits",
            "find the sum of its digits",
            "n = sum(map(int, str(abs(n))))",
            lambda n, _: sum(map(int, str(abs(n)))),
        ),
        (
            "sum_below",
            "add up {k} times each number below it",
            "sum {k} times every number under it",
            "t = 0\nfor i in range(n):\n    t += i * {k}\nn = t",
            lambda n, k: sum(i * k for i in range(n)),
        ),
    ),
    *_operations(
        "int",
        "text",
        ("backwards", "write it backwards", "reverse its digits", "s = str(n)[::-1]", lambda n, _: str(n)[::-1]),
        (
            "repeat_number",
            "write it {k} times in a row",
            "repeat its digits {k} times",
            "s = str(n) * {k}",
            lambda n, k: str(n) * k,
        ),
        (
            "pad",
            "fill it with zeros to length {k}",
            "write it with {k} digits",
            "s = str(n).zfill({k})",
            lambda n, k: str(n).zfill(k),
        ),
    ),
    *_operations(
        "pair",
        "int",
        ("sum_two", "add them", "find their sum", "n = a + b", lambda ab, _: ab[0] + ab[1]),
        (
            "minus",
            "subtract the second from the first",
            "take the first minus the second",
            "n = a - b",
            lambda ab, _: ab[0] - ab[1],
        ),
        ("product", "multiply them", "find their product", "n = a * b", lambda ab, _: ab[0] * ab[1]),
        ("larger", "take the larger one", "find the maximum", "n = max(a, b)", lambda ab, _: max(ab)),
        ("smaller", "take the smaller one", "find the minimum", "n = min(a, b)", lambda ab, _: min(ab)),
        (
            "gap",
            "take their distance",
            "find how far apart they are",
            "n = abs(a - b)",
            lambda ab, _: abs(ab[0] - ab[1]),
        ),
        (
            "weighted",
            "add {k} times the second to the first",
            "take the first plus {k} times the second",
            "n = a + {k} * b",
            lambda ab, k: ab[0] + k * ab[1],
        ),
    ),
    *_operations(
        "triple",
        "int",
        ("sum_three", "add them", "find their sum", "n = a + b + c", lambda abc, _: sum(abc)),
        ("largest_three", "take the largest one", "find the maximum", "n = max(a, b, c)", lambda abc, _: max(abc)),
        ("smallest_three", "take the smallest one", "find the minimum", "n = min(a, b, c)", lambda abc, _: min(abc)),
        (
            "spread",
            "take the largest minus the smallest",
            "find the range between maximum and minimum",
            "n = max(a, b, c) - min(a, b, c)",
            lambda abc, _: max(abc) - min(abc),
        ),
        (
            "middle",
            "take the middle one by size",
            "find the median",
            "n = sorted([a, b, c])[1]",
            lambda abc, _: sorted(abc)[1],
        ),
        (
            "product_plus",
            "multiply the first two and add the third",
            "take the product of the first two plus the third",
            "n = a * b + c",
            lambda abc, _: abc[0] * abc[1] + abc[2],
        ),
        (
            "plus_minus",
            "add the first two and subtract the third",
            "take the sum of the first two minus the third",
            "n = a + b - c",
            lambda abc, _: abc[0] + abc[1] - abc[2],
        ),
    ),
    *_operations(
        "ints",
        "ints",
        (
            "keep_even",
            "keep the even ones",
            "drop the odd ones",
            "xs = [x for x in xs if x % 2 == 0]",
            lambda xs, _: [x for x in xs if x % 2 == 0],
        ),
        (
            "keep_odd",
            "keep the odd ones",
            "drop the even ones",
            "xs = [x for x in xs if x % 2 == 1]",
            lambda xs, _: [x for x in xs if x % 2 == 1],
        ),
        (
            "keep_above",
            "keep those above {k}",
            "select the ones greater than {k}",
            "xs = [x for x in xs if x > {k}]",
            lambda xs, k: [x for x in xs if x > k],
        ),
        (
            "keep_below",
            "keep those below {k}",
            "select the ones less than {k}",
            "xs = [x for x in xs if x < {k}]",
            lambda xs, k: [x for x in xs if x < k],
        ),
        (
            "keep_multiples",
            "keep the multiples of {k}",
            "select the ones divisible by {k}",
            "xs = [x for x in xs if x % {k} == 0]",
            lambda xs, k: [x for x in xs if x % k == 0],
        ),
        (
            "add_each",
            "add {k} to each",
            "increase all by {k}",
            "xs = [x + {k} for x in xs]",
            lambda xs, k: [x + k for x in xs],
        ),
        (
            "multiply_each",
            "multiply each by {k}",
            "take all {k} times",
            "xs = [x * {k} for x in xs]",
            lambda xs, k: [x * k for x in xs],
        ),
        (
            "square_each",
            "square each",
            "multiply all by themselves",
            "xs = [x * x for x in xs]",
            lambda xs, _: [x * x for x in xs],
        ),
        ("sort", "sort them", "put them in ascending order", "xs = sorted(xs)", lambda xs, _: sorted(xs)),
        ("reverse", "reverse them", "put them in reverse order", "xs = xs[::-1]", lambda xs, _: xs[::-1]),
    ),
    *_operations(
        "ints",
        "int",
        ("sum", "add them up", "find their sum", "n = sum(xs)", lambda xs, _: sum(xs)),
        ("largest", "take the largest one", "find the maximum", "n = max(xs)", lambda xs, _: max(xs)),
        ("smallest", "take the smallest one", "find the minimum", "n = min(xs)", lambda xs, _: min(xs)),
        ("count", "count them", "find how many there are", "n = len(xs)", lambda xs, _: len(xs)),
        (
            "count_above",
            "count those above {k}",
            "find how many are greater than {k}",
            "n = sum(x > {k} for x in xs)",
            lambda xs, k: sum(x > k for x in xs),
        ),
        (
            "sum_above",
            "add up those above {k}",
            "find the sum of the ones greater than {k}",
            "n = 0\nfor x in xs:\n    if x > {k}:\n        n += x",
            lambda xs, k: sum(x for x in xs if x > k),
        ),
        (
            "horner",
            "from 0, multiply by {k} and add each in turn",
            "start at 0 and for each take it {k} times plus that one",
            "n = 0\nfor x in xs:\n    n = n * {k} + x",
            _horner,
        ),
    ),
    *_operations(
        "ints",
        "text",
        (
            "join",
            'join them with "{m}"',
            'put "{m}" between them',
            's = "{m}".join(map(str, xs))',
            lambda xs, k: k.join(map(str, xs)),
        ),
    ),
    *_operations(
        "text",
        "text",
        ("reverse_text", "reverse it", "turn it around", "s = s[::-1]", lambda s, _: s[::-1]),
        ("upper", "make it upper case", "write it in capitals", "s = s.upper()", lambda s, _: s.upper()),
        (
            "remove",
            "remove every {c}",
            "drop each letter {c}",
            's = s.replace("{c}", "")',
            lambda s, k: s.replace(k, ""),
        ),
        (
            "star",
            "replace every {c} by *",
            "turn each letter {c} into *",
            's = s.replace("{c}", "*")',
            lambda s, k: s.replace(k, "*"),
        ),
        ("head", "keep the first {k} letters", "cut it after {k} letters", "s = s[:{k}]", lambda s, k: s[:k]),
        ("tail", "keep the last {k} letters", "take its final {k} letters", "s = s[-{k}:]", lambda s, k: s[-k:]),
        ("append", "append {c}", "put {c} behind it", 's = s + "{c}"', lambda s, k: s + k),
        ("prepend", "prepend {c}", "put {c} before it", 's = "{c}" + s', lambda s, k: k + s),
        ("repeat", "write it {k} times in a row", "repeat it {k} times", "s = s * {k}", lambda s, k: s * k),
    ),
    *_operations(
        "text",
        "int",
        ("length", "take its length", "count its letters", "n = len(s)", lambda s, _: len(s)),
        ("count_letter", "count every {c}", "find how often {c} occurs", 'n = s.count("{c}")', lambda s, k: s.count(k)),
        (
            "count_vowels",
            "count its vowels",
            "find how many vowels it has",
            'n = sum(x in "aeiou" for x in s)',
            lambda s, _: sum(x in "aeiou" for x in s),
        ),
    ),
    *_operations(
        "words",
        "words",
        ("sort_words", "sort them", "put them in ascending order", "ws = sorted(ws)", lambda ws, _: sorted(ws)),
        ("reverse_words", "reverse their order", "put them in reverse order", "ws = ws[::-1]", lambda ws, _: ws[::-1]),
        (
            "upper_words",
            "make each upper case",
            "write all in capitals",
            "ws = [w.upper() for w in ws]",
            lambda ws, _: [w.upper() for w in ws],
        ),
        (
            "turn_words",
            "reverse each word",
            "turn all words around",
            "ws = [w[::-1] for w in ws]",
            lambda ws, _: [w[::-1] for w in ws],
        ),
        (
            "keep_long",
            "keep those longer than {k}",
            "select the ones with more than {k} letters",
            "ws = [w for w in ws if len(w) > {k}]",
            lambda ws, k: [w for w in ws if len(w) > k],
        ),
        (
            "keep_with",
            "keep those with {c}",
            "select the ones that contain {c}",
            'ws = [w for w in ws if "{c}" in w]',
            lambda ws, k: [w for w in ws if k in w],
        ),
        (
            "heads",
            "keep the first {k} letters of each",
            "cut all after {k} letters",
            "ws = [w[:{k}] for w in ws]",
            lambda ws, k: [w[:k] for w in ws],
        ),
    ),
    *_operations(
        "words",
        "text",
        (
            "join_words",
            'join them with "{m}"',
            'put "{m}" between them',
            's = "{m}".join(ws)',
            lambda ws, k: k.join(ws),
        ),
        (
            "longest",
            "take the longest one",
            "find the first of greatest length",
            "s = max(ws, key=len)",
            lambda ws, _: max(ws, key=len),
        ),
        (
            "initials",
            "take their first letters",
            "put their initials together",
            's = "".join(w[0] for w in ws)',
            lambda ws, _: "".join(w[0] for w in ws),
        ),
    ),
    *_operations(
        "words",
        "int",
        ("count_words", "count them", "find how many there are", "n = len(ws)", lambda ws, _: len(ws)),
    ),
    *_operations(
        "words",
        "ints",
        (
            "lengths",
            "take their lengths",
            "find the length of each",
            "xs = [len(w) for w in ws]",
            lambda ws, _: [len(w) for w in ws],
        ),
    ),
)

_FORMATS = (
    *_operations(
        "int",
        "output",
        ("plain", "Print the result.", "Output it.", "print(n)", lambda n, _: n),
        ("angles", "Print it as <result>.", "Output it in <>.", 'print(f"<{{n}}>")', lambda n, _: f"<{n}>"),
        (
            "label",
            'Print "result:" and it.',
            'Output it after "result:".',
            'print("result:", n)',
            lambda n, _: f"result: {n}",
        ),
        (
            "above",
            "Print yes if it is above {k}, else no.",
            "Output yes if it is greater than {k}, otherwise no.",
            'print("yes" if n > {k} else "no")',
            lambda n, k: "yes" if n > k else "no",
        ),
        (
            "dash",
            "Print it, a dash and it plus {k}.",
            "Output it and the number {k} greater as x-y.",
            'print(f"{{n}}-{{n + {k}}}")',
            lambda n, k: f"{n}-{n + k}",
        ),
    ),
    *_operations(
        "text",
        "output",
        ("plain", "Print the result.", "Output it.", "print(s)", lambda s, _: s),
        ("angles", "Print it as <result>.", "Output it in <>.", 'print(f"<{{s}}>")', lambda s, _: f"<{s}>"),
        (
            "label",
            'Print "result:" and it.',
            'Output it after "result:".',
            'print("result:", s)',
            lambda s, _: f"result: {s}",
        ),
        (
            "with_length",
            "Print it and its length.",
            "Output it, then its length.",
            "print(s, len(s))",
            lambda s, _: f"{s} {len(s)}",
        ),
    ),
    *_operations(
        "ints",
        "output",
        ("plain", "Print the results.", "Output them.", "print(*xs)", lambda xs, _: " ".join(map(str, xs))),
        (
            "commas",
            "Print them with commas.",
            "Output them with commas between.",
            'print(*xs, sep=",")',
            lambda xs, _: ",".join(map(str, xs)),
        ),
    ),
    *_operations(
        "words",
        "output",
        ("plain", "Print the results.", "Output them.", "print(*ws)", lambda ws, _: " ".join(ws)),
        (
            "commas",
            "Print them with commas.",
            "Output them with commas between.",
            'print(*ws, sep=",")',
            lambda ws, _: ",".join(ws),
        ),
    ),
)


def _by_type(operations: Sequence[Operation]) -> Mapping[Type, Sequence[Operation]]:
    grouped: dict[Type, list[Operation]] = defaultdict(list)
    for operation in operations:
        grouped[operation.takes].append(operation)
    return dict(grouped)


OPERATIONS = _by_type(_OPERATIONS)
FORMATS = _by_type(_FORMATS)
"""By the type they take; the first of each type is the plain one."""
