"""The built-in losses against an independent float64 reference."""

import numpy as np
import pytest
import torch

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.types import Datum, ModelInput
from cookbook.losses.base import MetricSums, TokenBatch, check_inputs
from cookbook.losses.builtin import KNOWN_INPUTS, LOSSES, resolve_loss


def reference(
    name: str, lp: np.ndarray, q: np.ndarray, advantages: np.ndarray, weights: np.ndarray, low: float, high: float
) -> np.ndarray:
    """The documented terms, token by token, in float64."""
    terms = []
    for each_lp, each_q, advantage, weight in zip(lp, q, advantages, weights, strict=True):
        ratio = np.exp(each_lp - each_q)
        clipped = min(max(ratio, low), high)
        values = {
            "cross_entropy": each_lp,
            "importance_sampling": ratio * advantage,
            "ppo": min(ratio * advantage, clipped * advantage),
            "cispo": clipped * advantage * each_lp,
        }
        terms.append(-weight * values[name])
    return np.array(terms)


def reference_gradient(
    name: str, lp: np.ndarray, q: np.ndarray, advantages: np.ndarray, weights: np.ndarray, low: float, high: float
) -> np.ndarray:
    """Central differences; for cispo the clipped ratio is a constant, so there the derivative is written down."""
    if name == "cispo":
        return -weights * np.clip(np.exp(lp - q), low, high) * advantages
    rest, step = (q, advantages, weights, low, high), 1e-6
    return (reference(name, lp + step, *rest) - reference(name, lp - step, *rest)) / (2 * step)


def compute(
    name: str, lp: np.ndarray, q: np.ndarray, advantages: np.ndarray, weights: np.ndarray, config: dict | None = None
):
    loss, settings = resolve_loss(name, config)
    leaf = torch.tensor(lp, requires_grad=True)
    inputs = {
        key: torch.tensor(value) for key, value in (("logprobs", q), ("advantages", advantages), ("weights", weights))
    }
    output = loss.compute(TokenBatch(leaf, inputs, torch.zeros(len(lp), dtype=torch.int64)), settings)
    output.values.sum().backward()
    assert leaf.grad is not None
    return output, leaf.grad.numpy()


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
@pytest.mark.parametrize("bounds", [None, (0.95, 1.05)])
def test_value_and_gradient_agree_with_the_reference(name: str, bounds: tuple[float, float] | None) -> None:
    if bounds and name in ("cross_entropy", "importance_sampling"):
        pytest.skip("has no thresholds")
    generator = np.random.default_rng(3)
    lp = -generator.exponential(2, 200)
    q = lp + generator.normal(0, 1, 200)
    q[:50] = lp[:50] + generator.normal(0, 0.02, 50)  # ratios near 1, between the thresholds
    advantages, weights = generator.normal(size=200), generator.uniform(0, 2, 200)
    advantages[::7], weights[::5] = 0, 0
    defaults = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}.get(name, (0.0, 0.0))
    low, high = bounds or defaults
    config = {"clip_low_threshold": low, "clip_high_threshold": high} if bounds else None
    output, gradient = compute(name, lp, q, advantages, weights, config)
    assert output.values.sum().item() == pytest.approx(
        reference(name, lp, q, advantages, weights, low, high).sum(), rel=1e-12
    )
    np.testing.assert_allclose(
        gradient, reference_gradient(name, lp, q, advantages, weights, low, high), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_garbage_where_nothing_counts_contributes_exactly_zero(name: str) -> None:
    lp = np.array([-1.0, -2.0, -1.0, -3.0], np.float32)
    q = np.array([-np.inf, -1e30, -1.0, np.inf], np.float32)
    advantages = np.array([0.0, 1.0, 1.0, 0.0], np.float32)
    weights = np.array([1.0, 0.0, 1.0, 1.0], np.float32)
    output, gradient = compute(name, lp, q, advantages, weights)
    expected = {"importance_sampling": -1.0, "ppo": -1.0, "cispo": 1.0}[name]
    np.testing.assert_array_equal(output.values.detach().numpy(), [0, 0, expected, 0])
    np.testing.assert_array_equal(gradient, [0, 0, -1.0, 0])


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_an_overflowing_ratio_is_clipped_without_nan(name: str) -> None:
    one = np.ones(1, np.float32)
    output, gradient = compute(name, -one, -200 * one, one, one)
    assert output.values.item() == pytest.approx({"ppo": -1.2, "cispo": 4.0}[name])
    assert gradient[0] == pytest.approx({"ppo": 0.0, "cispo": -4.0}[name])


def test_clip_fraction_counts_tokens_whose_gradient_the_clip_removed() -> None:
    lp, q = np.log([2.0, 2.0, 0.5, 1.0]), np.zeros(4)
    output, _ = compute("ppo", lp, q, np.array([1.0, -1.0, -1.0, 1.0]), np.ones(4))
    sums = MetricSums()
    for part in (slice(0, 1), slice(1, 4)):
        sums.add({key: values[part] for key, values in output.metrics.items()})
    assert sums.reduce() == pytest.approx({"ratio:mean": 5.5 / 4, "ratio:max": 2.0, "clip_fraction:mean": 0.5})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("pp0", None, "did you mean ppo"),
        ("ppo", {"clip_low_treshold": 0.8}, "did you mean clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 2.0}, "above clip_high_threshold"),
        ("cross_entropy", {"temperature": 0.0}, "temperature is 0.0"),
        ("cross_entropy", {"temperature": float("nan")}, "finite"),
    ],
)
def test_wrong_settings_are_named(name: str, config: dict[str, float] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_loss(name, config)


def test_missing_and_misspelt_inputs_are_named() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "logprobs": [0, 0]})
    with pytest.raises(DataError, match=r"datum 0: loss 'ppo' needs .*'advantages' is missing"):
        check_inputs("ppo", LOSSES["ppo"], KNOWN_INPUTS, [datum])
    misspelt = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weight": [0, 1]})
    with pytest.raises(DataError, match="'weight' \\(did you mean weights"):
        check_inputs("cross_entropy", LOSSES["cross_entropy"], KNOWN_INPUTS, [misspelt])


def test_soft_targets_are_for_cross_entropy_and_have_a_weight_each() -> None:
    targets = [[2, 3], [4, 5]]
    soft = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": targets, "weights": [[0.5, 0.5], [1, 0]]})
    check_inputs("cross_entropy", LOSSES["cross_entropy"], KNOWN_INPUTS, [soft])
    hard = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "logprobs": [0, 0], "advantages": [1, 1]})
    policy = Datum(ModelInput.from_ints([1, 2]), {**hard.loss_fn_inputs, "target_tokens": targets})
    for name in LOSSES.keys() - {"cross_entropy"}:
        with pytest.raises(
            DataError, match=rf"datum 1: loss_fn_inputs\['target_tokens'\] has shape \(2, 2\), but loss '{name}'"
        ):
            check_inputs(name, LOSSES[name], KNOWN_INPUTS, [hard, policy])
    flat_weights = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": targets, "weights": [1, 0]})
    with pytest.raises(
        DataError, match=r"datum 1: loss_fn_inputs\['weights'\] has shape \(2,\), but target_tokens has \(2, 2\)"
    ):
        check_inputs("cross_entropy", LOSSES["cross_entropy"], KNOWN_INPUTS, [soft, flat_weights])
