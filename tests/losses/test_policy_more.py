"""dro, gspo, gspo_token and PPO's dual clip against their formulas in float64 numpy loops, and the value loss."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from cookbook.backends.local.service import LocalService
from cookbook.core.errors import ConfigError
from cookbook.core.types import AdamParams, Datum, ModelInput
from cookbook.losses.base import TokenBatch
from cookbook.losses.builtin import LOSSES, resolve_loss
from cookbook.losses.value import VALUE

LENGTHS = (5, 1, 4, 3)
SEGMENTS = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "gspo_token")


def policy_inputs(seed: int = 0, spread: float = 0.5) -> dict[str, np.ndarray]:
    """Ratios on both sides of every clip, advantages of both signs and zero, masked positions, one datum all masked."""
    rng = np.random.default_rng(seed)
    n = len(SEGMENTS)
    logprobs = -rng.exponential(2.0, n)
    weights = rng.choice([0.0, 0.5, 1.0], n)
    weights[SEGMENTS == 3] = 0
    weights[:2] = 1
    advantages = rng.normal(0, 1, n)
    advantages[1] = 0
    return {
        "lp": logprobs,
        "logprobs": logprobs + rng.normal(0, spread, n),
        "advantages": advantages,
        "weights": weights,
    }


def run(
    name: str, inputs: Mapping[str, np.ndarray], config: Mapping[str, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Values and gradient, both per position."""
    loss, complete = resolve_loss(name, config)
    lp = torch.tensor(inputs["lp"], requires_grad=True)
    tensors = {key: torch.tensor(inputs[key]) for key in ("logprobs", "advantages", "weights")}
    losses = loss.compute(TokenBatch(lp, tensors, torch.tensor(SEGMENTS)), complete)
    losses.values.sum().backward()
    assert not any(torch.isnan(values).any() for values in losses.metrics.values())
    assert lp.grad is not None
    return losses.values.detach().numpy(), lp.grad.numpy()


def reference(
    name: str, inputs: Mapping[str, np.ndarray], config: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The documented values, and the gradient of their sum."""
    lp, q, advantages, weights = (inputs[key] for key in ("lp", "logprobs", "advantages", "weights"))
    n = len(lp)
    values, gradient = np.zeros(n), np.zeros(n)
    for i in range(n):
        w, a = weights[i], advantages[i]
        if w == 0:
            continue
        if name == "dro":
            values[i] = -w * (a * lp[i] - config["beta"] / 2 * (lp[i] - q[i]) ** 2)
            gradient[i] = -w * (a - config["beta"] * (lp[i] - q[i]))
            continue
        sequence = [j for j in range(n) if SEGMENTS[j] == SEGMENTS[i] and weights[j] != 0]
        ratio = np.exp(lp[i] - q[i]) if name == "ppo" else np.exp(np.mean([lp[j] - q[j] for j in sequence]))
        clipped = min(max(ratio, config["clip_low_threshold"]), config["clip_high_threshold"])
        surrogate = min(ratio * a, clipped * a)
        follows_ratio = surrogate == ratio * a
        if config.get("dual_clip") and a < 0 and surrogate < config["dual_clip"] * a:
            surrogate, follows_ratio = config["dual_clip"] * a, False
        values[i] = -w * surrogate
        if follows_ratio and name == "gspo":
            for j in sequence:
                gradient[j] -= w * a * ratio / len(sequence)
        elif follows_ratio:
            gradient[i] -= w * a * ratio
    return values, gradient


CASES = [
    ("dro", {"beta": 0.05}),
    ("dro", {"beta": 2.0}),
    ("gspo", {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}),
    ("gspo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
    ("gspo_token", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
    ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 0.0}),
    ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 1.5}),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "config"), CASES)
def test_losses_are_their_formulas(name: str, config: dict[str, float], seed: int):
    inputs = policy_inputs(seed)
    expected_values, expected_gradient = reference(name, inputs, config)
    values, gradient = run(name, inputs, config)
    np.testing.assert_allclose(values, expected_values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


def test_default_settings():
    assert LOSSES["dro"].defaults == {"beta": 0.05}
    assert LOSSES["ppo"].defaults["dual_clip"] == 0
    assert (
        LOSSES["gspo"].defaults
        == LOSSES["gspo_token"].defaults
        == {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_what_is_masked_is_never_seen(name: str):
    inputs = policy_inputs()
    values, gradient = run(name, inputs)
    masked = inputs["weights"] == 0
    wild = {
        key: np.where(masked, extreme, inputs[key])
        for key, extreme in [("lp", -np.inf), ("logprobs", -np.inf), ("advantages", 1e9)]
    }
    wild_values, wild_gradient = run(name, {**inputs, **wild, "lp": np.where(masked, -1e30, inputs["lp"])})
    np.testing.assert_array_equal(wild_values[~masked], values[~masked])
    np.testing.assert_array_equal(wild_gradient, gradient)
    assert not wild_values[masked].any() and not gradient[masked].any()


@pytest.mark.parametrize("name", ["ppo", "gspo", "gspo_token"])
def test_an_overflowing_ratio_that_is_clipped_leaves_no_nan(name: str):
    inputs = policy_inputs()
    inputs["advantages"] = np.abs(inputs["advantages"])
    inputs["logprobs"] = inputs["lp"] - 1e4
    values, gradient = run(name, inputs)
    assert np.isfinite(values).all() and not gradient.any()


def test_dual_clip_keeps_an_overflowing_ratio_finite():
    inputs = policy_inputs()
    inputs["advantages"] = -np.abs(inputs["advantages"])
    inputs["logprobs"] = inputs["lp"] - 1e4
    values, gradient = run("ppo", inputs, {"dual_clip": 3.0})
    np.testing.assert_allclose(values, -3.0 * inputs["weights"] * inputs["advantages"])
    assert not gradient.any()


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
def test_dual_clip_must_be_off_or_above_one(dual_clip: float):
    with pytest.raises(ConfigError, match="dual_clip"):
        run("ppo", policy_inputs(), {"dual_clip": dual_clip})


def test_gspo_and_gspo_token_agree_where_w_times_a_is_constant():
    inputs = policy_inputs()
    inputs["weights"] = np.where(inputs["weights"] == 0, 0.0, 1.0)
    inputs["advantages"] = np.array([0.7, -1.2, 2.0, 0.3])[SEGMENTS]
    wide = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    for mine, other in zip(run("gspo", inputs, wide), run("gspo_token", inputs, wide), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12)
    inputs["advantages"][0] = -0.7
    gradients = [run(name, inputs, wide)[1] for name in ("gspo", "gspo_token")]
    assert np.abs(gradients[0] - gradients[1]).max() > 0.01


@pytest.mark.parametrize("name", ["ppo", "cispo", "dro", "gspo_token"])
def test_on_policy_the_gradient_is_that_of_importance_sampling(name: str):
    inputs = policy_inputs(spread=0)
    np.testing.assert_allclose(run(name, inputs)[1], run("importance_sampling", inputs)[1], rtol=1e-12)


def test_on_policy_gspo_has_the_gradient_of_importance_sampling_for_outcome_rewards():
    inputs = policy_inputs(spread=0)
    inputs["weights"] = (inputs["weights"] != 0) * np.array([0.2, 0.5, 0.1, 1.0])[SEGMENTS]
    inputs["advantages"] = np.array([0.7, -1.2, 2.0, 0.3])[SEGMENTS]
    np.testing.assert_allclose(run("gspo", inputs)[1], run("importance_sampling", inputs)[1], rtol=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "dro"])
def test_local_backend_sees_whole_sequences_however_it_batches(name: str):
    """Tokens with advantage zero still count in the sequence ratio (and have dro's penalty), and no micro-batch cuts a
    datum."""
    config = {} if name == "dro" else {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    results = []
    for token_budget in (4096, 8):
        service = LocalService(token_budget=token_budget)
        try:
            client, rng = service.create_lora_training_client("tiny", rank=4, seed=0), np.random.default_rng(0)
            data, expected = [], 0.0
            for n, prompt in [(7, 0), (3, 0), (12, 5)]:
                tokens = ModelInput.from_ints(rng.integers(3, 900, n).tolist())
                inputs = {"target_tokens": rng.integers(3, 900, n), "weights": np.arange(n) >= prompt}
                output = client.forward([Datum(tokens, inputs)], "cross_entropy").result(60).loss_fn_outputs[0]
                lp, w = output["logprobs"].astype(np.float64), inputs["weights"]
                q, advantages = (
                    (lp + rng.normal(0.1, 0.5, n)).astype(np.float32),
                    rng.normal(0, 1, n) * (np.arange(n) % 3 > 0),
                )
                data.append(Datum(tokens, {**inputs, "logprobs": q, "advantages": advantages}))
                if name == "dro":
                    expected -= float((w * (advantages * lp - 0.05 / 2 * (lp - q) ** 2)).sum())
                else:
                    s = np.exp((lp - q)[w].mean())
                    expected -= float((w * np.minimum(s * advantages, np.clip(s, 0.5, 2.0) * advantages)).sum())
            total = client.forward_backward(data, name, config).result(60).metrics["loss:sum"]
            assert total == pytest.approx(expected, rel=1e-3, abs=1e-3)  # float32 logprobs of unlikely tokens
            results.append((total, client.optim_step(AdamParams()).result(60).metrics["grad_norm"]))
        finally:
            service.stop()
    assert results[0] == pytest.approx(results[1], rel=1e-3)


@pytest.mark.parametrize("clip_range", [0.0, 0.2])
def test_value_loss_is_its_formula(clip_range: float):
    rng = np.random.default_rng(0)
    n = 40
    values, returns = rng.normal(0, 1, n), rng.normal(0, 1, n)
    old_values, weights = values + rng.normal(0, 0.3, n), rng.choice([0.0, 0.5, 1.0], n)
    old_values[0], returns[1] = values[0], values[1]
    expected, expected_gradient = np.zeros(n), np.zeros(n)
    for i in range(n):
        clipped = old_values[i] + min(max(values[i] - old_values[i], -clip_range), clip_range)
        plain, bounded = (values[i] - returns[i]) ** 2, (clipped - returns[i]) ** 2
        binds = clip_range > 0 and bounded > plain
        expected[i] = weights[i] * (bounded if binds else plain) / 2
        expected_gradient[i] = 0.0 if binds else weights[i] * (values[i] - returns[i])
    assert clip_range == 0 or 0 < np.mean(expected_gradient == 0) < 1
    masked = weights == 0
    predicted = torch.tensor(values, requires_grad=True)
    inputs = {
        "values": predicted,
        "old_values": torch.tensor(np.where(masked, np.inf, old_values)),
        "returns": torch.tensor(np.where(masked, np.inf, returns)),
        "weights": torch.tensor(weights),
    }
    losses = VALUE.compute(
        TokenBatch(torch.zeros(n), inputs, torch.zeros(n, dtype=torch.int64)), {"clip_range": clip_range}
    )
    losses.values.sum().backward()
    assert predicted.grad is not None
    np.testing.assert_allclose(losses.values.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(predicted.grad.numpy(), expected_gradient, rtol=1e-12)
    assert ("value_clip_fraction:mean" in losses.metrics) == (clip_range > 0)
