"""Answers in LaTeX that math-verify alone misreads: percent, money, ratios, times, repeating decimals, drafts."""

import importlib.util

import pytest

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion
from rewards.latex import MathVerify

pytestmark = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra `math`")

"""Pairs of a completion and a gold answer."""
CORRECT = [
    (r"\boxed{25\%}", r"25\%"), (r"\boxed{25 %}", r"25\%"), (r"\boxed{0.25}", r"25\%"), (r"\boxed{25}", r"25\%"),
    (r"\boxed{\frac14}", r"25\%"), (r"\boxed{28\%}", "28"), (r"\boxed{28\%}", "0.28"),
    (r"\boxed{33\frac{1}{3}\%}", r"33\frac{1}{3}\%"), (r"\boxed{33\frac{1}{3}}", r"33\frac{1}{3}\%"),
    (r"\boxed{\frac13}", r"33\frac{1}{3}\%"), (r"\boxed{50\text{ percent}}", r"50\%"), (r"\boxed{50 percent}", "50"),
    (r"\boxed{\$32,\!000}", r"\$32,\!000"), (r"\boxed{32000}", r"\$32,\!000"), (r"\boxed{32,000}", r"\$32,\!000"),
    (r"\boxed{\$0.35}", r"\$0.35"), (r"\boxed{0.35}", r"\$0.35"), (r"\boxed{\$5.50}", "5.5"),
    (r"\boxed{\frac13}", r"0.\overline{3}"), (r"\boxed{0.\overline{3}}", r"\frac13"),
    (r"\boxed{0.1\overline{6}}", r"\frac16"), (r"\boxed{0.\dot{3}}", r"\frac13"),
    (r"\boxed{0.\dot{1}4285\dot{7}}", r"\frac17"), (r"\boxed{2.\overline{3}}", r"\frac73"),
    (r"\boxed{-0.\overline{3}}", r"-\frac13"), (r"\boxed{12:00}", "12:00"),
    (r"\boxed{2:30\text{ p.m.}}", r"2:30\text{ p.m.}"), (r"\boxed{2:30}", r"2:30\text{ p.m.}"),
    (r"\boxed{\text{7:15}}", "7:15"), (r"\boxed{3:2}", "3:2"), (r"\boxed{6:4}", "3:2"), (r"\boxed{\frac32}", "3:2"),
    (r"\boxed{1:2:3}", "1:2:3"), (r"\boxed{2:4:6}", "1:2:3"), (r"\boxed{3 3/4}", r"3\frac{3}{4}"),
    (r"\boxed{3 3/4}", r"\frac{15}{4}"), (r"\boxed{3½}", "3.5"), (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{3 \frac{1}{2}}", "3.5"), (r"\boxed{3\dfrac{1}{2}}", "3.5"), (r"\boxed{3\ \tfrac12}", "3.5"),
    (r"\boxed{-3 3/4}", "-3.75"), (r"\boxed{1\,250}", "1250"), (r"\boxed{1{,}250}", "1250"),
    (r"\boxed{1 250}", "1250"), (r"\boxed{1{,}250{,}000}", "1250000"), (r"\boxed{12,\!345}", "12345"),
    (r"\boxed{1,250}", "1250"), (r"\boxed{7⁄8}", "7/8"), (r"\boxed{10⁶}", "1000000"), (r"\boxed{10¹²}", "10^{12}"),
    (r"\boxed{10**6}", "10^6"), (r"\boxed{2^10}", "1024"), (r"\boxed{2 \times 7}", "14"), (r"\boxed{2*7}", "14"),
    (r"\boxed{5 million}", "5000000"), (r"\boxed{5\text{ dollars}}", "5"), (r"\boxed{11\text{ cm}^2}", "11"),
    (r"\boxed{10101_2}", "10101_2"), (r"\boxed{10101}", "10101_2"), ("\\boxed{\u0663}", "3"), ("\\boxed{\uff13}", "3"),
    ("the answer is 3 3/4.", "3.75"), ("answer: 5 apples", "5"), ("it costs $5", "5"),
    ("between $5 and $6 it is 6", "6"), ("the answer is $5$", "5"), ("x = 2 + 3 = 5", "5"),
    (r"we get \(\frac{1}{2}\).", "0.5"), (r"\[x\]", "x"), (r"\boxed{5}</think>\boxed{6}", "6"),

    (r"<|channel|>analysis<|message|>\boxed{6}<|end|><|start|>assistant<|channel|>final<|message|>\boxed{5}", "5"),
    (r"\boxed{90^\circ}", "90"), (r"\boxed{90°}", "90"), (r"\boxed{(3,4)}", "(3,4)"), (r"\boxed{x=5}", "5"),
    (r"\boxed{5}", "x=5"), (r"\boxed{5!}", "120"), (r"\boxed{\text{even}}", r"\text{even}"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\boxed{\text{(A)}}", "A"), (r"\boxed{1 \text{ and } 2}", "1,2"), (r"\boxed{5}", "$5$"),
    (r"\boxed{5}", r"\boxed{5}"), (r"\boxed{\$5}", "5"), (r"\boxed{$5$}", "5"),
    (r"\boxed{\left(3,\frac{1}{2}\right)}", "(3,1/2)"), (r"\boxed{1.5\times 10^3}", "1500"),
    (r"\boxed{1.5e3}", "1500"), (r"\boxed{3-3/4}", "2.25"), (r"\boxed{25\ \%}", "25"), (r"\boxed{25\,\%}", "0.25"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"), (r"\boxed{\pi}", "π"), (r"\boxed{-5}", "−5"), (r"\boxed{3,4,5}", "3,4,5"),
    (r"\boxed{5\%}", "5"), (r"\boxed{1,234,567}", "1234567"), (r"\boxed{\frac{1}{2}\%}", "0.005"),
]  # fmt: skip
WRONG = [
    (r"\boxed{2500\%}", r"25\%"), (r"\boxed{29\%}", "28"), (r"\boxed{0.28}", "28"), (r"\boxed{0.36}", r"\$0.35"),
    (r"\boxed{0.3}", r"0.\overline{3}"), (r"\boxed{0.333}", r"0.\overline{3}"), (r"\boxed{12:01}", "12:00"),
    (r"\boxed{12}", "12:00"), (r"\boxed{12:00}", "12"), (r"\boxed{2:30\text{ a.m.}}", r"2:30\text{ p.m.}"),
    (r"\boxed{3}", "3:2"), (r"\boxed{3:2}", "3"), (r"\boxed{2:3}", "3:2"), (r"\boxed{1:6}", "1:2:3"),
    (r"\boxed{3 3/4}", "3"), (r"\boxed{3½}", "3"), (r"\boxed{1\,250}", "1"), (r"\boxed{7⁄8}", "7"),
    (r"\boxed{10⁶}", "10"), (r"\boxed{10**6}", "10"), (r"\boxed{9 : 4}", "9"), (r"\boxed{2 \times 7}", "2"),
    (r"\boxed{5 k}", "5"), (r"\boxed{5\text{ million}}", "5"), (r"\boxed{10_2}", "10"),
    (r"\boxed{10101_{3}}", "10101_2"), (r"\boxed{10₂}", "10"), (r"\boxed{12_{10}}", "12"),
    ("the answer is 3 3/4", "3"), ("the answer is 10**6", "10"), ("so 3½", "3"), ("10⁶", "10"), ("it is 7⁄8", "7"),
    ("it is 9 : 4", "9"), (r"<think>\boxed{5}</think> \boxed{6}", "5"),
    (r"<|channel|>analysis<|message|>\boxed{5}<|end|><|start|>assistant<|channel|>final<|message|>\boxed{6}", "5"),
    (r"\boxed{5!}", "5"),
]  # fmt: skip
MALFORMED = [
    (r"\boxed{0.333...}", r"\frac13"), (r"\boxed{1:0}", "1:2"), (r"\boxed{10\,00}", "10"),
    (r"\boxed{5\text{ k}}", "5"), (r"\boxed{5\text{ and a half}}", "5"), (r"\boxed{5\text{ ft }6\text{ in}}", "5"),
    (r"\boxed{③}", "3"), ("answer: 5x", "5"), ("answer: 5 million", "5"), ("no", "5"), (r"<think> \boxed{5}", "5"),
    (r"<think>\boxed{5}</think> I do not know", "5"), (r"<|channel|>analysis<|message|>\boxed{5}", "5"),
]  # fmt: skip


@pytest.fixture(scope="module")
def reward():
    reward = MathVerify(timeout_s=20, workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("text", "gold", "status"),
    [
        (*pair, status)
        for status, pairs in (("correct", CORRECT), ("wrong", WRONG), ("malformed", MALFORMED))
        for pair in pairs
    ],
)
def test_whole_answers_are_judged(reward: MathVerify, text: str, gold: str, status: str):
    result = reward(Completion(text, "eos", 1), Example("x/1", (), gold))
    assert (result.value, result.status) == (float(status == "correct"), status)


GOLDS = [
    r"25\%", "25 %", r"\$32,\!000", r"\$0.35", r"0.\overline{3}", "12:00", r"2:30\text{ p.m.}", "3:2", "1:2:3",
    r"33\frac{1}{3}\%",
    r"10{,}000", r"10\,000", "3 3/4", "10101_2", r"\frac{3}{4}", "(3, 4)", r"x^2 + 1", r"\$18.90", r"11\text{ cm}^2",
]  # fmt: skip


@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_answer_is_judged(reward: MathVerify, gold: str):
    example = Example("x/1", (), gold)
    reward.check_gold(example)
    assert reward(Completion(f"\\boxed{{{gold}}}", "eos", 1), example).value == 1.0
    assert reward(Completion("\\boxed{77}", "eos", 1), example).value == 0.0


@pytest.mark.parametrize(
    "gold", ["", r"5\text{ and a half}", "0.333...", "1:0", r"5\text{ ft }6\text{ in}", r"10\,00", "③"]
)
def test_a_gold_answer_that_cannot_be_read_whole_is_named_before_a_run(reward: MathVerify, gold: str):
    with pytest.raises(DataError, match=r"of x/1 cannot be judged: it|of x/1 cannot be judged: '"):
        reward.check_gold(Example("x/1", (), gold))
