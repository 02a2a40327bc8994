"""The two-pass custom loss has the gradient of the one-pass one."""

import numpy as np
import pytest
import torch

from cookbook.backends.local import LocalService
from cookbook.core.types import Datum, ModelInput
from cookbook.losses.kl import with_kl_penalty
from cookbook.losses.preference import DPO, IPO, KTO, ORPO, SimPO
from cookbook.losses.spec import BuiltinLoss
from cookbook.losses.two_pass import forward_backward_two_pass


@pytest.fixture(scope="module")
def service():
    service = LocalService(device="cpu", dtype="float32")
    yield service
    service.stop()


def completions(extra):
    rng = np.random.default_rng(0)
    data = []
    for index, length in enumerate((9, 12, 7, 10)):
        tokens = rng.integers(10, 900, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": (np.arange(length) > 3) * 0.5}
        inputs |= {key: make(rng, index, length) for key, make in extra.items()}
        data.append(Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs))
    return data


REFERENCE = {"ref_logprobs": lambda rng, index, length: rng.normal(-7, 1, length)}
LABELS = {**REFERENCE, "desirable": lambda rng, index, length: np.full(length, index % 2)}
POLICY = {
    **REFERENCE,
    "logprobs": lambda rng, index, length: rng.normal(-7, 0.2, length),
    "advantages": lambda rng, index, length: np.full(length, rng.normal()),
}


@pytest.mark.parametrize(
    ("loss", "extra"),
    [
        (DPO(), REFERENCE),
        (IPO(), REFERENCE),
        (SimPO(), {}),
        (ORPO(), {}),
        (KTO(baseline="zero"), LABELS),
        (with_kl_penalty(BuiltinLoss("ppo"), "k3", 0.1), POLICY),
    ],
    ids=["dpo", "ipo", "simpo", "orpo", "kto", "ppo with k3"],
)
def test_the_gradient_is_that_of_one_pass(service, loss, extra):
    data = completions(extra)
    gradients, totals = [], []
    for run in (
        lambda client: client.forward_backward_custom(data, loss),
        lambda client: forward_backward_two_pass(client, data, loss),
    ):
        client = service.create_lora_training_client("tiny", rank=8, alpha=16, seed=3)
        totals.append(run(client).result(60).metrics["loss:sum"])
        gradients.append(torch.cat([part.flatten() for part in client._session._gradient]))
    one, two = gradients
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    assert one.norm() > 0
    assert float((one - two).norm() / one.norm()) < 1e-5
