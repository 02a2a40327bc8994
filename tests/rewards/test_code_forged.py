"""What a program writes on the harness's descriptor is at worst its own failure, whatever it is."""

import asyncio
import json
import random
import string

import pytest

from cookbook.core.rollouts import Completion
from cookbook.sandbox.base import ExecResult
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.problem import AssertTests, CallTests, CodeProblem
from rewards.code import CodeReward
from rewards.code_compare import ForgedAnswerError, Tagged, read_answer, same_value
from rewards.code_replay import DECODE_ERRORS, decode
from tests.rewards.code_cases import example, judged

EXPECTED = [1, 2.5, "a", None, True, [1, [2]], {"a": 1, "1": [2]}, 10**30, [], {}, ""]

FORGED = [
    '{"value": {"complex": [%s, 0]}}' % ("1" + "0" * 400),
    '{"value": {"complex": ["nan", {}]}}',
    '{"value": ' + "[" * 100_000,
    '{"value": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"value": ' + '{"tuple": [' * 50_000 + "]}" * 50_000 + "}",
    '{"value": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}",
    '{"value": %s}' % ("9" * 100_000),
    '{"value": 1e999999999999}',
    '{"value": -1e-999999999999}',
    '{"value": NaN}',
    '{"value": Infinity}',
    '{"value": {"int": "0x%s"}}' % ("f" * 900_000),
    '{"value": {"int": 5}}',
    '{"value": {"int": "0x"}}',
    '{"value": {"int": "1_0"}}',
    '{"value": {"bytes": "zz"}}',
    '{"value": {"bytes": 10000000000}}',
    '{"value": {"type": "eval"}}',
    '{"value": {"type": ["int"]}}',
    '{"value": {"dict": [[[], 1]]}}',
    '{"value": {"dict": [1, 2]}}',
    '{"value": {"dict": {"a": 1}}}',
    '{"value": {"dict": [["a", 1], ["a", 1]]}}',
    '{"value": {"dict": [[{"int": "0xzz"}, 1], [{"complex": [1, 2]}, 3]]}}',
    '{"value": {"set": [[1], [1]]}}',
    '{"value": {"set": 1}}',
    '{"value": {"frozenset": {"set": []}}}',
    '{"value": {"iterator": 3}}',
    '{"value": {"object": {"object": 1}}}',
    '{"value": {}}',
    '{"value": {"a": 1, "b": 2}}',
    '{"value": 1, "value": 2}',
    '{"value": 1, "raised": "x"}',
    '{"raised": 1, "message": 2}',
    '{"raised": "E"}',
    '{"raised": "E", "message": %s}' % ("[" * 3000 + "]" * 3000),
    "[]", "{}", "null", "1", '"value"', "", " ", "{", "\ufffd\ufffd", "\x00", "\ud800", "[1e5", '["value", 1]',
]  # fmt: skip


def outcome(line: str, expected: object, tolerance: float | None) -> str:
    """As the judge of a call comes to it; anything that it does not expect is raised."""
    try:
        answer = read_answer(line)
        return answer.kind if answer.kind == "raised" else str(same_value(answer.content, expected, tolerance))
    except (ForgedAnswerError, RecursionError):
        return "forged"


@pytest.mark.parametrize("line", FORGED, ids=lambda line: ascii(line[:30]))
def test_a_forged_answer_is_no_exception_and_earns_nothing(line: str):
    for expected in EXPECTED:
        for tolerance in (None, 1e-6):
            assert outcome(line, expected, tolerance) in ("False", "raised", "forged"), expected


def garbage(draw: random.Random, depth: int = 0) -> object:
    kinds = ["int", "complex", "bytes", "type", "object", "dict", "tuple", "set", "frozenset", "iterator", "value", "x"]
    atoms = [None, True, 0, -1, 1.5, 10**18, 10**400, "", "a", "int", "0xff", "-0x1", float("nan"), float("inf")]
    choice = draw.random()
    if depth > 4 or choice < 0.4:
        return draw.choice(atoms)
    if choice < 0.6:
        return [garbage(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    count = 1 if choice < 0.9 else draw.randint(0, 3)
    return {draw.choice(kinds): garbage(draw, depth + 1) for _ in range(count)}


def test_random_answers_are_no_exception():
    draw = random.Random(0)
    for _ in range(20_000):
        line = json.dumps({"value": garbage(draw)} if draw.random() < 0.8 else garbage(draw))
        if draw.random() < 0.3:
            position = draw.randrange(len(line) + 1)
            line = line[:position] + draw.choice(string.printable) + line[position + 1 :]
        for expected in EXPECTED:
            outcome(line, expected, draw.choice([None, 1e-6]))
        # The process that runs assertions reads them too.
        try:
            decode(json.loads(line))
        except DECODE_ERRORS:
            continue


def test_no_set_or_dict_is_built_of_what_a_program_sends():
    sent = read_answer('{"value": {"set": [1, 2]}}').content
    assert sent == Tagged("set", [1, 2])
    assert read_answer('{"value": {"dict": [[1, 2]]}}').content == Tagged("dict", [[1, 2]])


class Forger:
    """A sandbox in which every program sends the same line."""

    languages = frozenset({"python"})
    isolation = "none"
    python_modules = None

    def __init__(self, line: str) -> None:
        self.line = line

    async def run(self, code, language, stdin="", files=None, limits=None) -> ExecResult:
        return ExecResult("ok", f"loaded\n{self.line}\n", "", 0, 0.0, 0.0, 0.0)

    def close(self) -> None: ...


def test_the_reward_gives_a_verdict_on_every_forged_answer():
    problem = CodeProblem(CallTests("f", (((3,), [1, {"a": 2}]),)))
    for line in FORGED:
        reward = CodeReward(sandbox=Forger(line))
        result = asyncio.run(reward(Completion("def f(x): pass", "eos", 1), example(problem)))
        assert (result.value, result.status) == (0.0, "wrong"), line[:50]
        assert result.details["tests"][0] in ("wrong", "runtime_error"), line[:50]


WRITES = """
import os
def f(x):
    for fd in range(1, 30):
        try: os.write(fd, {line!r})
        except OSError: pass
    os._exit(0)
"""


@pytest.mark.parametrize("kind", ["call", "assert"])
def test_real_programs_that_write_on_the_descriptor(kind: str):
    box = LocalSandbox()
    tests = CallTests("f", (((3,), 7),)) if kind == "call" else AssertTests(("assert f(3) == 7",), ("f",))
    lines = [
        FORGED[0],
        FORGED[4],
        '{"value": NaN}',
        '{"value": {"dict": [[[], 1]]}}',
        '{"value": {"type": "eval"}}',
        "x",
    ]
    try:
        for data in [*[f"{line}\n".encode() for line in lines], b"\xff\xfe\n", b"\n\n\n"]:
            result = judged(box, WRITES.format(line=data), CodeProblem(tests))
            assert (result.value, result.status) == (0.0, "wrong"), data[:50]
            assert result.details["tests"][0] in ("wrong", "runtime_error"), data[:50]
    finally:
        box.close()
