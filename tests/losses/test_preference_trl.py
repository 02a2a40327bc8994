"""DPO, IPO and KTO against TRL.

TRL's losses are part of `_compute_loss` of its trainers: it is called with a model that answers with given logprobs.
"""

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cookbook.losses.preference import DPO, IPO, KTO
from tests.losses.preference_batches import Batch, gradient_of, kto_batch

Arrays = Sequence[np.ndarray]


def padded(rows: Arrays) -> torch.Tensor:
    """Zero-padded on the right to one column more than the longest row: TRL drops the first column of a mask."""
    block = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.float64)
    for index, row in enumerate(rows):
        block[index, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.float64))
    return block


def trl_inputs(batch: Batch, order: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Masked per-token logprobs as TRL's fused head returns them, its tensors of ids and masks, and the leaves."""
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
