from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion
from cookbook.core.types import StopReason
from rewards.format import EndsProperly, MatchesPattern
from tests.watchdog import processor_time

EXAMPLE = Example("x/1", (), "5", {"solution": "2 + 3 = <<2+3=5>>5\n#### 5"})


def shipped_pattern() -> str:
    conf = Path(__file__).parents[2] / "conf" / "reward" / "gsm8k_with_format.yaml"
    return OmegaConf.load(conf).components.format.pattern


def value(reward, text: str, stop_reason: StopReason = "eos") -> float:
    result = reward(Completion(text, stop_reason, 1), EXAMPLE)
    assert result.status == ("correct" if result.value else "malformed")
    return result.value


def test_ends_properly_by_eos_or_stop_but_not_by_length():
    assert [value(EndsProperly(), "x", reason) for reason in ("eos", "stop", "length")] == [1.0, 1.0, 0.0]
    EndsProperly().validate([EXAMPLE])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 5", 1.0),
        ("a\nb\n#### -1,234.50\n", 1.0),
        ("a\n#### $5", 1.0),
        ("a #### 5", 0.0),
        ("#### 5\nand so on", 0.0),
        ("#### five", 0.0),
        ("", 0.0),
    ],
)
def test_the_shipped_pattern_wants_a_last_answer_line(text: str, expected: float):
    assert value(MatchesPattern(shipped_pattern()), text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "#" * 1_000_000,
        "\n#### " * 200_000,
        "\n#### 1" * 200_000 + "x",
        "#### " + "1" * 1_000_000 + "x",
        "\n" * 1_000_000,
    ],
    ids=lambda text: ascii(text[:8]),
)
def test_the_shipped_pattern_takes_linear_time(text: str):
    with processor_time():
        assert value(MatchesPattern(shipped_pattern(), timeout_s=3600), text) == 0.0


def test_an_exponential_pattern_is_given_up():
    with processor_time():
        assert value(MatchesPattern(r"(a|aa)+(b|bb)+c", timeout_s=0.2), "a" * 10_000 + "b" * 10_000) == 0.0


def test_bad_settings_and_a_pattern_that_does_not_fit_are_named():
    with pytest.raises(ConfigError, match="is not a regular expression"):
        MatchesPattern("(")
    with pytest.raises(ConfigError, match=r"timeout_s=0"):
        MatchesPattern("x", timeout_s=0)
    with pytest.raises(DataError, match=r"x/1 .* scores 0"):
        MatchesPattern("yes").validate([EXAMPLE])
    with pytest.raises(DataError, match=r"x/1 .* scores 1"):
        MatchesPattern("(?s).*").validate([EXAMPLE])
    with pytest.raises(DataError, match="x/2 has no worked answer"):
        MatchesPattern("yes").validate([Example("x/2", (), "5")])
