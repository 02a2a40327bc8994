"""Drafts do not count: only what follows the thinking, or the final channel, is graded."""

import asyncio

import pytest

from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion
from rewards.code_extract import extract_program
from rewards.final_part import final_part
from rewards.math import GSM8K

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("plain", "plain"),
        ("", ""),
        # thinking
        ("<think>draft</think>answer", "answer"),
        ("\n<think>draft</think>\n\nanswer", "\n\nanswer"),
        ("draft</think>answer", "answer"),
        ("<think>draft", None),
        ("<think>", None),
        ("text <think>draft", None),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>a</think>b<think>c", None),
        ("<think>a <think>b</think>c", "c"),
        ("[THINK]draft[/THINK]answer", "answer"),
        ("[THINK]draft", None),
        ("◁think▷draft◁/think▷answer", "answer"),
        ("<seed:think>draft</seed:think>answer", "answer"),
        ("<|channel>thought\ndraft<channel|>answer", "answer"),
        ("<|channel>thought\ndraft", None),
        # channels
        (f"{ANALYSIS}draft{FINAL}answer", "answer"),
        (f"{ANALYSIS}draft{FINAL}answer<|return|>", "answer"),
        (f"{ANALYSIS}draft{FINAL}first{FINAL}second<|end|>", "second"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        (f"{ANALYSIS}draft", None),
        (f"{ANALYSIS}draft<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{{}}<|call|>", None),
        (f"{ANALYSIS}draft{FINAL}answer<|end|><|start|>assistant{ANALYSIS}more", "answer"),
        ("<|channel|>anal", None),
        # tags that are part of a program
        ("```python\nprint('</think>')\n```", "```python\nprint('</think>')\n```"),
        ("<think>x</think>\n```\n<think>\n```", "\n```\n<think>\n```"),
        ("```\nprint(0)\n</think>\n```python\nprint(1)\n```", "\n```python\nprint(1)\n```"),
        ("```\nprint(0)</think>\nanswer", "\nanswer"),
    ],
)
def test_final_part(text: str, final: str | None):
    assert final_part(text) == final


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("<think>#### 5", "malformed"),
        ("<think>#### 5</think>", "malformed"),
        ("<think>#### 5</think>#### 6", "wrong"),
        ("<think>#### 6</think>#### 5", "correct"),
        ("#### 6</think>\n#### 5", "correct"),
        (f"{ANALYSIS}#### 5", "malformed"),
        (f"{ANALYSIS}#### 5{FINAL}I do not know", "malformed"),
        (f"{ANALYSIS}#### 5{FINAL}#### 6", "wrong"),
        (f"{ANALYSIS}#### 6{FINAL}#### 5<|return|>", "correct"),
        ("<|channel|>final<|message|>#### 5", "correct"),
    ],
)
def test_a_draft_earns_nothing(text: str, status: str):
    assert GSM8K()(Completion(text, "eos", 1), Example("x/1", (), "5")).status == status


P = "print(1)\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"{ANALYSIS}```python\nprint(0)\n```{FINAL}```python\nprint(1)\n```", P),
        (f"{ANALYSIS}```python\nprint(0)\n```{FINAL}I do not know", None),
        (f"{ANALYSIS}```python\nprint(0)\n```", None),
        # a program that contains a tag
        ("```python\nprint('</think>')\n```", "print('</think>')\n"),
        ("<think>x</think>\n```python\nprint('</think>')\n```", "print('</think>')\n"),
        ("```python\nprint('<think>')\n```", "print('<think>')\n"),
        ("print('</think>')", "print('</think>')\n"),
        ('```python\nx = """\n</think>\n"""\n```', 'x = """\n</think>\n"""\n'),
        ("```python\nprint('<|channel|>')\n```", "print('<|channel|>')\n"),
        ("<think>\n```python\nprint(0)\n</think>\n```python\nprint(1)\n```", P),
        # the opening fence is missing: it is in the prompt, or was forgotten
        ("print(1)\n```", P),
        ("print(1)\n```\nThis prints one.", P),
        ("print(1)\n```\nIt prints:\n```\n1\n```", P),
        ("print(1)\n~~~\n", P),
        ("</think>print(1)\n```", P),
        ("Answer: below\n```\nprint(1)\n```", P),
        ("I do not know.\n```", None),
        # a byte-order mark, and other invisible characters
        ("\ufeff```python\nprint(1)\n```", P),
        ("\ufeffprint(1)", P),
        ("Here:\n\u200b```python\nprint(1)\n```", P),
        ("```python\n\ufeffprint(1)\n```", P),
        # fences inside a program
        ('```python\nx = """\n```\ny\n```\n"""\nprint(1)\n```', 'x = """\n```\ny\n```\n"""\nprint(1)\n'),
        ("```python\nprint(0)\n```\nno, ```python\nprint(1)\n```", "print(0)\n"),
        ("   ~~~~ python\n   print(1)\n   ~~~~", P),
        ("```python\nprint(1)", P),
    ],
)
def test_programs(text: str, program: str | None):
    extracted = extract_program(text, "python")
    assert (None if extracted is None else extracted.text) == program


def test_other_languages_before_a_lone_fence():
    extracted = extract_program("#include <cstdio>\nint main() {}\n```\nDone.", "cpp")
    assert extracted is not None and extracted.text == "#include <cstdio>\nint main() {}\n"


def test_the_whole_way_through_the_reward_of_a_program():
    from rewards.code import CodeReward
    from tests.rewards.code_cases import PROBLEMS, SECRET, example
    from tests.rewards.test_code import Scripted

    box = Scripted("ok")
    draft = f"{ANALYSIS}```python\nprint('{SECRET}')\n```"
    result = asyncio.run(CodeReward(sandbox=box)(Completion(draft, "length", 1), example(PROBLEMS["stdin"])))
    assert (result.status, box.runs) == ("malformed", 0)
