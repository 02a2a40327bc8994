import json
from pathlib import Path

import pytest

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion
from cookbook.core.types import StopReason
from rewards.math import GSM8K, extract_answer, normalize_number, with_changed_number
from tests.watchdog import processor_time

GSM8K_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def score(text: str, gold: str, stop_reason: StopReason = "eos") -> tuple[float, str]:
    result = GSM8K()(Completion(text, stop_reason, 1), Example("x/1", (), gold))
    return result.value, result.status


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("####42", "42"),
        ("####\n 42\n", "42"),
        ("so 7\n#### 42", "42"),
        # several markers: the last wins, whatever it is followed by
        ("#### 1\n#### 2", "2"),
        ("#### 5\n####", None),
        ("##### 5", "5"),
        # thousands
        ("#### 1,234,567", "1234567"),
        ("#### 12,34,567", "1234567"),
        ("#### 1,234.50", "1234.5"),
        ("#### 5, as shown", "5"),
        ("#### 1,5", None),
        ("#### 1234,567", None),
        ("#### 3,4,5", None),
        ("#### 1.000,5", None),
        # currency, percent, units, markdown
        ("#### $18", "18"),
        ("#### \\$18", "18"),
        ("#### $ 18", "18"),
        ("#### -$18", "-18"),
        ("#### $-18", "-18"),
        ("#### 18$", "18"),
        ("#### €18", "18"),
        ("#### 50%", "50"),
        ("#### **18**", "18"),
        ("**#### 18**", "18"),
        ("#### `18`", "18"),
        ("#### $18$", "18"),
        ("#### 18 apples", "18"),
        ("#### 18kg", "18"),
        ("#### 18/day", "18"),
        ("#### 18 (that is 6 * 3)", "18"),
        # signs
        ("#### -5", "-5"),
        ("#### +5", "5"),
        ("#### \u22125", "-5"),
        ("#### \u20135", "-5"),
        ("#### -0", "0"),
        ("#### -0.0", "0"),
        ("#### --5", None),
        ("#### +-5", None),
        ("####\n- 5", None),
        # decimals, trailing point, leading zeros
        ("#### 5.0", "5"),
        ("#### 5.", "5"),
        ("#### 5.\n", "5"),
        ("#### 5.00.", "5"),
        ("#### .5", "0.5"),
        ("#### -.50", "-0.5"),
        ("#### 007", "7"),
        ("#### 000", "0"),
        ("#### 0.10", "0.1"),
        ("#### .", None),
        # digits that are a part of something else
        ("#### 1/2", None),
        ("#### 1 / 2", None),
        ("#### 10 - 3 = 7", None),
        ("#### 3*4", None),
        ("#### 5 x 3", None),
        ("#### 2^10", None),
        ("#### 12:30", None),
        ("#### 1e3", None),
        ("#### 1E+3", None),
        ("#### 1e999999999", None),
        ("#### 1.2.3", None),
        ("#### 1_000", None),
        ("#### 1 000", None),
        ("#### 1\u202f000", None),
        ("#### 5 6 7", None),
        ("#### 5\n6", "5"),
        # not ASCII
        ("#### \uff11\uff0c\uff12\uff13\uff14\uff0e\uff15", "1234.5"),
        ("#### \uff0d\uff04\uff15", "-5"),
        ("#### \u0665", None),
        ("#### 5\u0665", None),
        ("#### ²", None),
        ("\uff03\uff03\uff03\uff03 5", None),
        # no number directly after the marker
        ("", None),
        ("42", None),
        ("### 42", None),
        ("#### the answer is 42", None),
        ("#### (5)", "5"),
        ("#### inf", None),
        ("#### nan", None),
    ],
)
def test_extract_answer(text: str, number: str | None):
    assert extract_answer(text) == number


def test_status_tells_wrong_from_malformed():
    assert score("#### 72", "72") == (1.0, "correct")
    assert score("#### 73", "72") == (0.0, "wrong")
    assert score("72", "72") == (0.0, "malformed")
    assert score("#### 72", "72", "length") == (1.0, "correct")


def test_comparison_is_exact():
    assert score("#### 0.1", ".10") == (1.0, "correct")
    assert score("#### 0.1000000000000000001", "0.1") == (0.0, "wrong")
    assert score("#### 9007199254740993", "9007199254740992") == (0.0, "wrong")
    assert score("#### 1234", "$1,234.00 dollars") == (1.0, "correct")


def test_the_whole_completion_is_searched():
    assert score("#### 5" + " and so on" * 100_000, "5") == (1.0, "correct")


def test_a_gold_answer_without_a_number_is_a_dataset_fault():
    with pytest.raises(DataError, match=r"'many' of x/1 is not a number"):
        score("#### 5", "many")


@pytest.mark.parametrize(
    "text",
    [
        "#### " + "9" * 1_000_000,
        "#### " + "0" * 1_000_000 + "5.x",
        "#### 0." + "0" * 1_000_000 + "1",
        "#### " + "1," * 1_000_000,
        "#### " + ",123" * 1_000_000,
        "#### 1" + ",123" * 1_000_000 + ",",
        "#### " + "1." * 1_000_000,
        "#### 1e999999999",
        "#" * 1_000_000,
        "#### " * 1_000_000,
        "#### 1 " * 1_000_000,
        "#### " + " " * 1_000_000 + "x",
        "#### " + "$" * 1_000_000,
        "#### " + "-" * 1_000_000,
        "#### " + "*-" * 1_000_000,
        "#### 5" + " " * 1_000_000 + "x",
        "#### 5 -" + " " * 1_000_000 + "x",
        "#### 5" + "*" * 1_000_000,
        "#### 5" + "\x00" * 1_000_000,
        "#### \ud800",
        "#### " + "\uff15" * 1_000_000,
    ],
    ids=lambda text: f"{text[:12]!a}...{len(text)}",
)
def test_hostile_text_takes_bounded_time(text: str):
    with processor_time():
        value, _ = score(text, "72")
    assert value == 0.0


def test_a_million_digits_compare_exactly():
    digits = "9" * 1_000_000
    assert score(f"#### {digits}", digits) == (1.0, "correct")
    assert score(f"#### {digits[:-1]}8", digits) == (0.0, "wrong")


def test_changing_the_number_always_changes_it():
    for solution in ("#### 0", "#### 9", "#### -9", "#### -1", "#### 0.9", "x\n#### 1,999"):
        changed = extract_answer(with_changed_number(solution))
        assert changed is not None and changed != extract_answer(solution)


@pytest.mark.skipif(not GSM8K_FOLDER.is_dir(), reason="needs shared/data/gsm8k beside the repository")
def test_every_gold_answer_scores_one_and_with_its_number_changed_zero():
    examples = []
    for split in ("train", "test"):
        for line in (GSM8K_FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            solution = json.loads(line)["answer"]
            # The gold number read independently of the code under test.
            gold = solution.split("####")[1].strip().replace(",", "")
            examples.append(Example(f"{split}/{len(examples)}", (), gold, {"solution": solution}))
    assert len(examples) == 7473 + 1319
    GSM8K().validate(examples)


def test_validate_names_the_row_whose_answer_does_not_fit():
    fits = Example("a/0", (), "72", {"solution": "#### 72"})
    with pytest.raises(DataError, match=r"a/1 .* scores 0 \(wrong\) instead of 1"):
        GSM8K().validate([fits, Example("a/1", (), "73", {"solution": "#### 72"})])


def test_validate_writes_the_answer_where_the_dataset_has_no_marker():
    GSM8K().validate([Example("a/0", (), "72"), Example("a/1", (), "72", {"solution": "72"})])
    with pytest.raises(DataError, match=r"a/2 .* scores 0 \(malformed\)"):
        GSM8K().validate([Example("a/2", (), "72", {"solution": "#### many"})])


def test_normalize_number_reads_what_the_text_begins_with():
    assert normalize_number(" $1,000.0 ") == "1000"
    assert normalize_number("about 5") is None
