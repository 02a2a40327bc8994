import numpy as np
import pytest

from cookbook.core.errors import ConfigError
from cookbook.core.types import Datum, ModelInput
from cookbook.rl.advantages import RLOO, MeanCentered
from cookbook.rl.gae import ReinforcePP, discounted_sums, gae, group_token_advantages, whiten
from cookbook.rl.importance import truncated_importance_sampling


def slow_gae(rewards, values, gamma: float, lam: float) -> list[float]:
    """Equation 16 as it stands: a double loop."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(t, len(rewards)):
            following = values[k + 1] if k + 1 < len(values) else 0.0
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * following - values[k])
        advantages.append(total)
    return advantages


@pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 100])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.0, 1.0)])
def test_gae_is_its_definition(length: int, gamma: float, lam: float):
    rng = np.random.default_rng(length)
    rewards, values = rng.normal(0, 1, length), rng.normal(0, 1, length)
    advantages, returns = gae(rewards, values, gamma, lam)
    np.testing.assert_allclose(advantages, slow_gae(rewards, values, gamma, lam), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(returns, advantages + values)


def test_with_lambda_and_gamma_one_advantages_are_returns_minus_values():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(0, 1, 37).astype(np.float32), rng.normal(0, 1, 37).astype(np.float32)
    advantages, returns = gae(rewards, values, gamma=1.0, lam=1.0)
    rewards_to_go = [rewards[t:].astype(np.float64).sum() for t in range(37)]
    np.testing.assert_allclose(returns, rewards_to_go)
    np.testing.assert_allclose(advantages, np.array(rewards_to_go) - values)
    perfect, _ = gae(rewards, np.array(rewards_to_go), gamma=1.0, lam=1.0)
    np.testing.assert_allclose(perfect, 0, atol=1e-12)


def test_inputs_are_left_alone():
    rewards, values = np.ones(4), np.zeros(4)
    gae(rewards, values)
    discounted_sums(rewards, 0.5)
    np.testing.assert_array_equal(rewards, np.ones(4))


@pytest.mark.parametrize(("variance", "ddof"), [("sample", 1), ("population", 0)])
def test_whitening_is_over_all_tokens(variance, ddof: int):
    arrays = [np.array([1.0, 2.0, 5.0]), np.array([-3.0]), np.array([])]
    flat = np.concatenate(arrays)
    white = whiten(arrays, variance)
    assert [len(array) for array in white] == [3, 1, 0]
    np.testing.assert_allclose(np.concatenate(white), (flat - flat.mean()) / flat.std(ddof=ddof), rtol=1e-7)
    kept = np.concatenate(whiten(arrays, variance, shift_mean=False))
    np.testing.assert_allclose(kept, np.concatenate(white) + flat.mean())


@pytest.mark.parametrize("variance", ["sample", "population"])
def test_whitening_without_spread_is_zero(variance):
    assert whiten([np.array([3.0])], variance)[0] == pytest.approx([0.0])
    assert whiten([np.full(3, 7.0)], variance)[0] == pytest.approx([0.0] * 3)


def test_reinforce_pp_whitens_the_returns_from_each_token_on():
    rewards = [np.array([-0.1, -0.2, 1.0]), np.array([0.5, 0.0])]
    returns = [np.array([-0.1 + 0.9 * (-0.2 + 0.9 * 1.0), -0.2 + 0.9 * 1.0, 1.0]), np.array([0.5, 0.0])]
    for got, expected in zip(ReinforcePP(gamma=0.9)(rewards), whiten(returns, "sample"), strict=True):
        np.testing.assert_allclose(got, expected)
    assert sum(array.sum() for array in ReinforcePP()(rewards)) == pytest.approx(0.0)
    for settings in ({"gamma": 1.1}, {"variance": "biased"}):
        with pytest.raises(ConfigError, match=r"^advantage\."):
            ReinforcePP(**settings)


def test_group_advantages_are_the_same_for_all_tokens_of_a_trajectory():
    rewards = [np.array([0.0, 1.0]), np.array([-0.25]), np.array([0.0, 0.0, 0.5])]
    for advantage in (RLOO(), MeanCentered()):
        expected = advantage([1.0, -0.25, 0.5])
        for got, value, rewards_T in zip(group_token_advantages(rewards, advantage), expected, rewards, strict=True):
            np.testing.assert_allclose(got, np.full(len(rewards_T), value))


def datum(sampling: list[float], weights: list[float]) -> Datum:
    n = len(sampling)
    inputs = {
        "target_tokens": np.zeros(n),
        "advantages": np.ones(n),
        "logprobs": np.array(sampling),
        "weights": np.array(weights),
    }
    return Datum(ModelInput.from_ints([0] * n), inputs)


@pytest.mark.parametrize(
    ("level", "ratios"),
    [
        ("token", [2.0, np.exp(-0.5), 1.0]),  # the first is capped
        ("sequence", [np.exp(0.5)] * 3),
        ("geometric_mean", [np.exp(0.5 / 3)] * 3),
    ],
)
def test_truncated_importance_weights(level, ratios: list[float]):
    data = [datum([0.0, -2.0, -1.0, -3.0], [0.0, 0.5, 0.5, 0.5])]
    training = [np.array([-9.0, -1.0, -1.5, -3.0], dtype=np.float32)]
    (changed,), metrics = truncated_importance_sampling(data, training, cap=2.0, level=level)
    np.testing.assert_allclose(changed.loss_fn_inputs["weights"], [0.0, *(0.5 * ratio for ratio in ratios)], rtol=1e-6)
    np.testing.assert_allclose(changed.loss_fn_inputs["logprobs"], [0.0, -1.0, -1.5, -3.0])
    assert metrics["importance/weight_mean"] == pytest.approx(np.mean(ratios))
    assert metrics["importance/capped"] == pytest.approx(1 / 3 if level == "token" else 0.0)
    np.testing.assert_allclose(data[0].loss_fn_inputs["weights"], [0.0, 0.5, 0.5, 0.5])


def test_a_vanishing_importance_weight_keeps_its_token_in_the_mask():
    (changed,), _ = truncated_importance_sampling([datum([0.0, 0.0], [1.0, 1.0])], [np.array([-500.0, 0.0])], cap=2.0)
    assert changed.loss_fn_inputs["weights"][0] > 0
    for cap, level in ((0.9, "token"), (2.0, "word")):
        with pytest.raises(ConfigError):
            truncated_importance_sampling([], [], cap=cap, level=level)  # type: ignore[arg-type]
