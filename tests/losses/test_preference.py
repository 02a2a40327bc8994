"""Every preference loss against its formula written out in float64 numpy, value and gradient."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.types import Datum, ModelInput
from cookbook.losses.preference import DPO, IPO, KTO, ORPO, SimPO
from cookbook.losses.spec import PreferenceLoss

Arrays = Sequence[np.ndarray]


def log_sigmoid(x: float) -> float:
    return -np.logaddexp(0.0, -x)


def gradient_of(leaf: torch.Tensor) -> np.ndarray:
    return np.zeros(len(leaf)) if leaf.grad is None else leaf.grad.numpy()


def sigmoid(x: float) -> float:
    return float(np.exp(log_sigmoid(x)))


class Batch:
    """Completions as arrays: logprobs, reference logprobs and masks, of which datums and torch logprobs can be made."""

    def __init__(self, lengths: Sequence[tuple[int, int]], weights: Sequence[float], seed: int = 0) -> None:
        """`lengths` are (prompt positions, completion tokens) of each datum."""
        rng = np.random.default_rng(seed)
        sizes = [prompt + completion for prompt, completion in lengths]
        self.masks = [np.arange(size) >= prompt for size, (prompt, _) in zip(sizes, lengths, strict=True)]
        self.logprobs: list[np.ndarray] = [-rng.exponential(2.0, size) for size in sizes]
        # What a datum stores is float32; the formulas see the same numbers.
        self.refs: list[np.ndarray] = [
            (-rng.exponential(2.0, size)).astype(np.float32).astype(np.float64) for size in sizes
        ]
        self.weights = [float(np.float32(weight)) for weight in weights]
        self.extra: list[dict[str, float]] = [{} for _ in sizes]

    def data(self, reference: bool = True) -> list[Datum]:
        return [
            Datum(
                ModelInput.from_ints([0] * len(mask)),
                {
                    "target_tokens": np.zeros(len(mask)),
                    "weights": mask * weight,
                    **({"ref_logprobs": ref} if reference else {}),
                    **{key: np.full(len(mask), value) for key, value in extra.items()},
                },
            )
            for mask, weight, ref, extra in zip(self.masks, self.weights, self.refs, self.extra, strict=True)
        ]

    def run(self, loss, dtype: torch.dtype = torch.float64) -> tuple[float, list[np.ndarray], dict[str, float]]:
        """Value, gradient by each logprob, metrics."""
        leaves = [torch.tensor(values, dtype=dtype, requires_grad=True) for values in self.logprobs]
        value, metrics = loss(self.data(loss.needs_reference), leaves)
        value.backward()
        return value.item(), [gradient_of(leaf) for leaf in leaves], metrics

    def sums(self, index: int) -> tuple[float, float, int]:
        """pi, ref and |y| of one completion."""
        mask = self.masks[index]
        return self.logprobs[index][mask].sum(), self.refs[index][mask].sum(), int(mask.sum())


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


def pairs(kind: str) -> Batch:
    if kind == "one_token":
        return Batch([(2, 1), (0, 1)], [1.0, 1.0])
    if kind == "empty_prompt":
        return Batch([(0, 4), (0, 2)], [0.3, 0.3])
    batch = Batch([(3, 5), (3, 7), (1, 2), (1, 9)], [0.25, 0.25, 0.75, 0.75])
    if kind == "equal":
        batch.logprobs = [ref.copy() for ref in batch.refs]
        batch.logprobs[1] = batch.refs[1] = np.append(batch.refs[0], [-1.0, -2.0])
    if kind == "chosen_far_above":
        batch.logprobs[1] = batch.logprobs[1] - 1e4
        batch.logprobs[2] = batch.logprobs[2] * 1e-6
    if kind == "rejected_far_above":
        batch.logprobs[0] = batch.logprobs[0] - 1e4
        batch.logprobs[3] = batch.logprobs[3] * 1e-4
    return batch


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


def kto_batch(kind: str = "random") -> Batch:
    batch = Batch([(3, 5), (0, 7), (1, 1), (2, 4), (3, 7), (0, 5)], [0.25, 0.25, 0.5, 0.125, 1.0, 1.0], seed=3)
    batch.extra = [
        {"desirable": 1},
        {"desirable": 0},
        {"desirable": 1},
        {"desirable": 0},
        {"mismatched": 1},
        {"mismatched": 1},
    ]
    if kind == "positive_baseline":
        batch.logprobs[4] = batch.refs[4] + 1.0
        batch.logprobs[5] = batch.refs[5] - 0.1
    if kind == "equal":
        batch.logprobs = [ref.copy() for ref in batch.refs]
    if kind == "extreme":
        batch.logprobs[0] = batch.refs[0] + 2e3
        batch.logprobs[1] = batch.refs[1] + 2e3
        batch.logprobs[3] = batch.refs[3] - 2e3
    return batch


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
        (KTO(), data[:4], "no datum is marked 'mismatched'"),
        (KTO(), data[4:], "no datum has an array 'desirable'"),
        (KTO(baseline="zero"), data, "datum 4 is marked 'mismatched'"),
        (KTO(), without(data, "desirable"), "datum 0: .* it has neither"),
        (KTO(), replaced(data, 2, desirable=np.array([1.0, 0.0])), "datum 2: .*'desirable' with"),
    ]:
        with pytest.raises(DataError, match=message):
            loss(broken, logprobs[: len(broken)])


@pytest.mark.parametrize(
    "make",
    [lambda: DPO(beta=0), lambda: DPO(label_smoothing=0.5), lambda: SimPO(gamma=-1), lambda: KTO(baseline="batch")],  # type: ignore[arg-type]
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigError, match=r"^loss\.\w+="):
        make()


# TRL's losses are the middle of its trainers' _compute_loss: it is called with a model that answers with given logprobs.


def padded(rows: Arrays) -> torch.Tensor:
    """One column more than the longest row, zero-padded on the right: TRL drops the first column of a mask when it shifts."""
    block = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.float64)
    for index, row in enumerate(rows):
        block[index, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.float64))
    return block


def trl_inputs(batch: Batch, order: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Masked per-token logprobs as TRL's fused head returns them, the tensors that stand for ids and masks, and the leaves."""
    leaves = [torch.tensor(batch.logprobs[index], requires_grad=True) for index in order]
    longest = max(map(len, leaves))
    rows = [
        torch.nn.functional.pad(leaf * torch.from_numpy(batch.masks[index]), (0, longest - len(leaf)))
        for leaf, index in zip(leaves, order, strict=True)
    ]
    mask = padded([np.concatenate([[0], batch.masks[index]]) for index in order]).long()
    return (
        torch.stack(rows),
        {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask},
        leaves,
    )


def trl_model(log_probs: torch.Tensor):
    zeros = torch.zeros_like(log_probs)
    return lambda **_: SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def trl_trainer(**settings):
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor
    )
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        **settings,
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_and_ipo_agree_with_trl(loss_type: str):
    trl = pytest.importorskip("trl", minversion="1.16", reason="TRL 1.16 or later is not installed")
    batch = Batch([(3, 5), (3, 7), (1, 2), (1, 9)], [0.5] * 4)  # TRL takes the mean over the 2 pairs
    loss = DPO(0.3) if loss_type == "sigmoid" else IPO(0.3, average_logprobs=True)
    value, gradients, metrics = batch.run(loss)
    order = [0, 2, 1, 3]  # TRL: all chosen, then all rejected
    log_probs, inputs, leaves = trl_inputs(batch, order)
    refs = torch.tensor([batch.sums(index)[1] for index in order])
    inputs |= {"ref_chosen_logps": refs[:2], "ref_rejected_logps": refs[2:]}
    trainer = trl_trainer(
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.3,
        use_weighting=False,
    )
    trl_value = trl.DPOTrainer._compute_loss(trainer, trl_model(log_probs), inputs, return_outputs=False)
    trl_value.backward()
    assert value == pytest.approx(trl_value.item(), rel=1e-6)
    for index, leaf in zip(order, leaves, strict=True):
        np.testing.assert_allclose(gradients[index], gradient_of(leaf), rtol=1e-6, atol=1e-9)
    if loss_type == "sigmoid":
        assert metrics["margin:mean"] == pytest.approx(trainer._metrics["train"]["rewards/margins"][-1], rel=1e-5)


@pytest.mark.parametrize("kind", ["random", "positive_baseline", "extreme"])
def test_kto_agrees_with_trl(kind: str):
    trl = pytest.importorskip("trl", minversion="1.16", reason="TRL 1.16 or later is not installed")
    batch = kto_batch(kind)
    batch.weights = [0.25] * 4 + [1.0] * 2  # TRL takes the mean over the 4 examples
    value, gradients, metrics = batch.run(KTO(0.3, desirable_weight=1.2, undesirable_weight=0.9))
    log_probs, inputs, leaves = trl_inputs(batch, range(4))
    inputs |= {
        "label": torch.tensor([True, False, True, False]),
        "ref_logps": torch.tensor([batch.sums(index)[1] for index in range(4)]),
        "ref_KL_logps": torch.tensor([batch.sums(index)[1] for index in (4, 5)]),
    }
    trainer = trl_trainer(calculate_KL=True, loss_type="kto", beta=0.3, desirable_weight=1.2, undesirable_weight=0.9)
    trainer._compute_kl_logps = lambda model, batch_: torch.tensor([batch.sums(index)[0] for index in (4, 5)])
    trl_value = trl.KTOTrainer._compute_loss(trainer, trl_model(log_probs), inputs, return_outputs=False)
    trl_value.backward()
    assert value == pytest.approx(trl_value.item(), rel=1e-6)
    assert metrics["kl_baseline:mean"] == pytest.approx(trainer._metrics["train"]["kl"][-1], rel=1e-6)
    for gradient, leaf in zip(gradients[:4], leaves, strict=True):
        np.testing.assert_allclose(gradient, gradient_of(leaf), rtol=1e-6, atol=1e-9)
