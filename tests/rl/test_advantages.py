import numpy as np
import pytest

from cookbook.rl.advantages import RLOO, MeanCentered, StdNormalized, has_signal

REWARDS = [1.0, 0.0, 0.25, 1.0]


def test_mean_centered():
    assert MeanCentered()(REWARDS) == pytest.approx([0.4375, -0.5625, -0.3125, 0.4375])


def test_std_normalized_uses_the_sample_standard_deviation():
    spread = np.std(REWARDS, ddof=1)
    assert StdNormalized(eps=1e-4)(REWARDS) == pytest.approx(
        [(reward - 0.5625) / (spread + 1e-4) for reward in REWARDS]
    )


def test_rloo_compares_each_reward_with_the_mean_of_the_others():
    expected = [
        reward - np.mean([other for j, other in enumerate(REWARDS) if j != i]) for i, reward in enumerate(REWARDS)
    ]
    assert RLOO()(REWARDS) == pytest.approx(expected)


@pytest.mark.parametrize("advantage", [MeanCentered(), StdNormalized(), RLOO()])
def test_a_group_of_one_has_no_advantage(advantage):
    assert advantage([0.7]) == [0.0]


def test_signal_is_judged_over_the_whole_group_with_tolerance():
    assert has_signal([0.0, 0.0, 1.0])
    assert not has_signal([0.1 + 0.2, 0.3])  # differ by rounding alone
    assert not has_signal([1.0])
