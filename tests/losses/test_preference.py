"""Every preference loss against its formula written out in float64 numpy, value and gradient."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.types import Datum
from cookbook.losses.preference import DPO, IPO, KTO, ORPO, SimPO
from cookbook.losses.spec import PreferenceLoss
from tests.losses.preference_batches import Batch, gradient_of, kto_batch, pairs


def log_sigmoid(x: float) -> float:
    return -np.logaddexp(0.0, -x)


def sigmoid(x: float) -> float:
    return float(np.exp(log_sigmoid(x)))


# Each formula takes (pi, ref, length) of chosen and rejected, and returns the loss and its derivatives by the two pi.
Formula = Callable[[tuple[float, float, int], tuple[float, float, int]], tuple[float, float, float]]


def dpo(beta: float, smoothing: float) -> Formula:
    def formula(chosen, rejected):
        margin = beta * ((chosen[0] - chosen[1]) - (rejected[0] - rejected[1]))
        value = -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)
        slope = beta * (smoothing * sigmoid(margin) - (1 - smoothing) * sigmoid(-margin))
        return value, slope, -slope

    return formula


def ipo(beta: float, average: bool) -> Formula:
    def formula(chosen, rejected):
        n, m = (chosen[2], rejected[2]) if average else (1, 1)
        gap = (chosen[0] - chosen[1]) / n - (rejected[0] - rejected[1]) / m - 1 / (2 * beta)
        return gap**2, 2 * gap / n, -2 * gap / m

    return formula


def simpo(beta: float, gamma: float) -> Formula:
    def formula(chosen, rejected):
        margin = beta / chosen[2] * chosen[0] - beta / rejected[2] * rejected[0] - gamma
        return -log_sigmoid(margin), -sigmoid(-margin) * beta / chosen[2], sigmoid(-margin) * beta / rejected[2]

    return formula


def orpo(lam: float) -> Formula:
    def formula(chosen, rejected):
        means = [chosen[0] / chosen[2], rejected[0] / rejected[2]]
        odds = [mean - np.log(-np.expm1(mean)) for mean in means]
        odds_slopes = [1 / -np.expm1(mean) for mean in means]
        value = -means[0] - lam * log_sigmoid(odds[0] - odds[1])
        outer = -lam * sigmoid(odds[1] - odds[0])
        return value, (-1 + outer * odds_slopes[0]) / chosen[2], -outer * odds_slopes[1] / rejected[2]

    return formula


PAIRED = [
    pytest.param(DPO(0.1), dpo(0.1, 0.0), id="dpo"),
    pytest.param(DPO(0.5, label_smoothing=0.2), dpo(0.5, 0.2), id="cdpo"),
    pytest.param(IPO(0.1), ipo(0.1, False), id="ipo"),
    pytest.param(IPO(0.3, average_logprobs=True), ipo(0.3, True), id="ipo_average"),
    pytest.param(SimPO(2.5, 0.7), simpo(2.5, 0.7), id="simpo"),
    pytest.param(ORPO(0.4), orpo(0.4), id="orpo"),
]


KINDS = ["random", "one_token", "empty_prompt", "equal", "chosen_far_above", "rejected_far_above"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("loss", "formula"), PAIRED)
def test_pair_losses_are_their_formulas(loss, formula: Formula, kind: str):
    batch = pairs(kind)
    value, gradients, _ = batch.run(loss)
    expected = 0.0
    for c in range(0, len(batch.masks), 2):
        term, *slopes = formula(batch.sums(c), batch.sums(c + 1))
        expected += batch.weights[c] * term
        for index, slope in zip((c, c + 1), slopes, strict=True):
            expected_gradient = batch.weights[c] * slope * batch.masks[index]
            np.testing.assert_allclose(gradients[index], expected_gradient, rtol=1e-6, atol=1e-6)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("loss", "formula"), PAIRED)
def test_float32_agrees_at_extremes_too(loss, formula: Formula, kind: str):
    """Backends compute logprobs in float32: nothing overflows there."""
    value, gradients, metrics = pairs(kind).run(loss, torch.float32)
    expected, expected_gradients, _ = pairs(kind).run(loss)
    assert value == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-3, atol=1e-5)
    assert np.isfinite(list(metrics.values())).all()
    assert all(key.count(":") == 1 for key in metrics)


@pytest.mark.parametrize("kind", ["random", "positive_baseline", "equal", "extreme"])
@pytest.mark.parametrize("baseline", ["mismatched", "zero"])
def test_kto_is_its_formula(kind: str, baseline: str):
    batch = kto_batch(kind)
    beta, weights = 0.2, {1: 1.5, 0: 0.8}
    z0 = max(0.0, float(np.mean([pi - ref for pi, ref, _ in map(batch.sums, (4, 5))])))
    if baseline == "zero":
        z0 = 0.0
        for values in (batch.masks, batch.logprobs, batch.refs, batch.weights, batch.extra):
            del values[4:]
    value, gradients, metrics = batch.run(KTO(beta, desirable_weight=1.5, undesirable_weight=0.8, baseline=baseline))
    expected = 0.0
    for index in range(4):
        pi, ref, _ = batch.sums(index)
        desirable = batch.extra[index]["desirable"]
        sign = 1 if desirable else -1
        z = beta * sign * (pi - ref - z0)
        scale = batch.weights[index] * weights[int(desirable)]
        expected += scale * (1 - sigmoid(z))
        slope = -scale * beta * sign * sigmoid(z) * sigmoid(-z)
        np.testing.assert_allclose(gradients[index], slope * batch.masks[index], rtol=1e-6, atol=1e-6)
    for gradient in gradients[4:]:
        assert not gradient.any(), "the baseline carries no gradient"
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert metrics["kl_baseline:mean"] == pytest.approx(z0)
    assert (z0 > 0) == (kind == "positive_baseline" and baseline == "mismatched")


@pytest.mark.parametrize("loss", [DPO(), IPO(), SimPO(), ORPO(), KTO(baseline="zero")])
def test_any_split_over_calls_gives_the_same_value_and_gradient(loss):
    batch = pairs("random")
    if loss.kind != "pairs":
        batch.extra = [{"desirable": 1}, {"desirable": 0}] * 2
    value, gradients, _ = batch.run(loss)
    parts = []
    for part in (slice(0, 2), slice(2, 4)):
        leaves = [torch.tensor(values, requires_grad=True) for values in batch.logprobs[part]]
        term, _ = loss(batch.data()[part], leaves)
        term.backward()
        parts.append((term.item(), [gradient_of(leaf) for leaf in leaves]))
    assert value == pytest.approx(parts[0][0] + parts[1][0])
    for whole, part in zip(gradients, parts[0][1] + parts[1][1], strict=True):
        np.testing.assert_allclose(part, whole)


def test_metrics_of_pairs():
    batch = Batch([(0, 2)] * 6, [1.0] * 6)
    batch.refs = [np.array([-1.0, -2.0])] * 6
    gaps = [1.0, -1.0, -1.0, 2.0, 0.5, 0.5]  # of chosen and rejected in turn: right, wrong, tied
    batch.logprobs = [np.array([-1.0, -2.0 + gap]) for gap in gaps]
    *_, metrics = batch.run(DPO(beta=0.5))
    assert metrics == pytest.approx(
        {
            "reward_chosen:mean": 0.5 * (1 - 1 + 0.5) / 3,
            "reward_rejected:mean": 0.5 * (-1 + 2 + 0.5) / 3,
            "margin:mean": 0.5 * (2 - 3 + 0) / 3,
            "accuracy:mean": 0.5,
            "kl_reference:mean": np.mean([[0, gap**2 / 2] for gap in gaps]),
        }
    )


def test_metrics_of_kto_leave_out_a_label_that_is_absent():
    batch = kto_batch("positive_baseline")
    batch.extra[1] = batch.extra[3] = {"desirable": 1}
    *_, metrics = batch.run(KTO())
    assert "reward_desirable:mean" in metrics
    assert not {"reward_undesirable:mean", "margin:mean"} & metrics.keys()


def test_orpo_is_finite_where_the_model_is_certain():
    batch = Batch([(0, 2), (0, 2)], [1.0, 1.0])
    for certain in (0, 1):
        batch.logprobs = [np.array([-1.0, -1.0]), np.array([-1.0, -1.0])]
        batch.logprobs[certain] = np.zeros(2)
        value, gradients, _ = batch.run(ORPO(), torch.float32)
        assert np.isfinite(value) and all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("loss", [DPO(), IPO(), SimPO(), ORPO(), KTO()])
def test_measuring_gives_the_loss_and_its_metrics(loss: PreferenceLoss):
    batch = pairs("random") if loss.kind == "pairs" else kto_batch()
    value, _, metrics = batch.run(loss)
    assert loss.measure(batch.data(), batch.logprobs) == {"loss:sum": value, **metrics}
    assert (loss.needs_reference, loss.needs_mismatched) == (not isinstance(loss, SimPO | ORPO), isinstance(loss, KTO))
    assert not KTO(baseline="zero").needs_mismatched


def without(data: list[Datum], key: str) -> list[Datum]:
    return [
        Datum(d.model_input, {name: values for name, values in d.loss_fn_inputs.items() if name != key}) for d in data
    ]


def replaced(data: list[Datum], index: int, **arrays: np.ndarray) -> list[Datum]:
    changed = Datum(data[index].model_input, {**data[index].loss_fn_inputs, **arrays})
    return [*data[:index], changed, *data[index + 1 :]]


def test_the_baseline_of_kto_is_zero_where_a_batch_has_no_mismatched_completion():
    batch = kto_batch("positive_baseline")
    data, logprobs = batch.data()[:4], [torch.tensor(values) for values in batch.logprobs][:4]
    assert KTO().measure(data, [values.numpy() for values in logprobs]) == KTO(baseline="zero").measure(
        data, [values.numpy() for values in logprobs]
    )


def test_malformed_datums_are_refused():
    batch = pairs("random")
    data, logprobs = batch.data(), [torch.tensor(values) for values in batch.logprobs]
    for broken, message in [
        (data[:3], "even number"),
        (without(data, "ref_logprobs"), "datum 0: .*'ref_logprobs'"),
        (replaced(data, 1, weights=np.zeros(10)), "datum 1: its weights are all zero"),
        (replaced(data, 1, weights=np.arange(10)), "datum 1: its weights range from 1 to 9"),
        (replaced(data, 2, weights=np.full(3, 0.5)), "datums 2 and 3 are a pair with weights 0.5 and 0.75"),
    ]:
        with pytest.raises(DataError, match=message):
            DPO()(broken, logprobs[: len(broken)])
    batch = kto_batch()
    data, logprobs = batch.data(), [torch.tensor(values) for values in batch.logprobs]
    for loss, broken, message in [
        (KTO(), data[4:], "no datum has an array 'desirable'"),
        (KTO(baseline="zero"), data, "datum 4 is marked 'mismatched'"),
        (KTO(), without(data, "desirable"), "datum 0: .* it has neither"),
        (KTO(), replaced(data, 2, desirable=np.array([1.0, 0.0])), "datum 2: .*'desirable' with"),
    ]:
        with pytest.raises(DataError, match=message):
            loss(broken, logprobs[: len(broken)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: DPO(beta=0),
        lambda: DPO(label_smoothing=0.5),
        lambda: SimPO(gamma=-1),
        lambda: KTO(baseline="batch"),  # type: ignore[arg-type]
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigError, match=r"^loss\.\w+="):
        make()
