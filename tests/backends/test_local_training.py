"""Training on the local backend: the gradient does not depend on how a batch is split, and is the right one."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from cookbook.backends.local import LocalService
from cookbook.backends.local import model as local_model
from cookbook.backends.local.model import output_layer
from cookbook.core.datums import only_inputs
from cookbook.core.errors import BackendError, ConfigError, DataError, LossError
from cookbook.core.types import AdamParams, Datum, ModelInput, SamplingParams
from cookbook.losses.two_pass import forward_backward_two_pass
from tests.backends.local_model import (
    accumulated_gradient,
    disturb,
    gradient_gap,
    policy_data,
    random_tokens,
    soft_data,
)

ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    service = LocalService(device="cpu")
    yield service
    service.stop()


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
@pytest.mark.parametrize("rank", [4, None])
def test_gradient_does_not_depend_on_the_split(random_model: str, loss_fn: str, rank: int | None) -> None:
    data = policy_data()
    gradients, outputs = [], []
    for token_budget in (1000, 333, 1):  # all together, a third, one datum at a time
        service = LocalService(device="cpu", token_budget=token_budget)
        client = service.create_lora_training_client(random_model, rank=rank, alpha=8, seed=0)
        if rank is not None:
            disturb(client)
        outputs.append(client.forward_backward(data, loss_fn, {"temperature": 0.8}).result())
        gradients.append(accumulated_gradient(client))
        service.stop()
    for gradient, output in zip(gradients[1:], outputs[1:], strict=True):
        assert gradient_gap(gradients[0], gradient) < 1e-5
        assert output.metrics == pytest.approx(outputs[0].metrics, rel=1e-5)


def test_calls_accumulate_to_the_gradient_of_one_call(service: LocalService, random_model: str) -> None:
    data = policy_data()
    whole, parts = (service.create_lora_training_client(random_model, rank=4, seed=0) for _ in range(2))
    for client in (whole, parts):
        disturb(client)
    whole.forward_backward(data, "ppo").result()
    parts.forward_backward(data[:4], "ppo")
    parts.forward_backward(data[4:], "ppo").result()
    assert gradient_gap(accumulated_gradient(whole), accumulated_gradient(parts)) < 1e-5


def test_step_equals_plain_peft_and_torch(service: LocalService, random_model: str) -> None:
    """Logits everywhere, one datum at a time, torch's AdamW and clipping: the same weights after three steps."""
    client = service.create_lora_training_client(random_model, rank=4, alpha=8, seed=0)
    session = client._session
    assert session is not None
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    peer = get_peft_model(AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32), config)
    theirs = {name.replace(".default", ""): values for name, values in peer.named_parameters() if values.requires_grad}
    assert sorted(theirs) == sorted(session.weights.parameters)
    with torch.no_grad():
        for name, values in theirs.items():
            values.copy_(session.weights.parameters[name])
    optimizer = torch.optim.AdamW(
        theirs.values(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, foreach=False, fused=False
    )
    params = AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=5.0)
    for step in range(3):
        data = policy_data(step)
        client.forward_backward(data, "cross_entropy", {"temperature": 0.7})
        metrics = client.optim_step(params).result().metrics
        optimizer.zero_grad()
        for datum in data:
            logits = peer(input_ids=torch.tensor([datum.model_input.tokens])).logits[0] / 0.7
            targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
            logprobs = logits.log_softmax(-1)[torch.arange(len(targets)), targets]
            (-(logprobs * torch.from_numpy(datum.loss_fn_inputs["weights"])).sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 5.0)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4) and norm > 5
        optimizer.step()
    for name, values in theirs.items():
        torch.testing.assert_close(session.weights.parameters[name], values, rtol=1e-3, atol=2e-5)


def test_logits_in_chunks_give_the_same_gradient(
    service: LocalService, random_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [service.create_lora_training_client(random_model, rank=4, seed=0) for _ in range(2)]
    for client in clients:
        disturb(client)
    clients[0].forward_backward(policy_data(), "cispo").result()
    monkeypatch.setattr(local_model, "_LOGIT_ELEMENTS", 97 * 10)
    clients[1].forward_backward(policy_data(), "cispo").result()
    assert gradient_gap(*map(accumulated_gradient, clients)) < 1e-5


@pytest.mark.parametrize("token_budget", [1000, 50, 1])
@pytest.mark.parametrize("logit_elements", [1 << 24, 97 * 10])
def test_soft_targets_equal_a_float64_reference(
    random_model: str, token_budget: int, logit_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside hard targets, of several widths, however they are batched: the logprobs, the loss and the gradient of
    every weight."""
    monkeypatch.setattr(local_model, "_LOGIT_ELEMENTS", logit_elements)
    data = soft_data()
    peer = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float64)
    total, expected = torch.zeros((), dtype=torch.float64), []
    for datum in data:
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"]).reshape(datum.model_input.length, -1)
        weights = torch.from_numpy(datum.loss_fn_inputs.get("weights", np.ones(targets.shape))).reshape(targets.shape)
        logprobs = (peer(input_ids=torch.tensor([datum.model_input.tokens])).logits[0] / 0.7).log_softmax(-1)
        chosen = torch.stack([logprobs[t, targets[t]] for t in range(len(targets))])
        total = total - (weights * chosen).sum()
        expected.append(torch.where(weights != 0, chosen, 0.0).detach().numpy())
    total.backward()
    service = LocalService(device="cpu", token_budget=token_budget)
    client = service.create_lora_training_client(random_model, rank=None)
    forward = client.forward(data, "cross_entropy", {"temperature": 0.7}).result()
    backward = client.forward_backward(data, "cross_entropy", {"temperature": 0.7}).result()
    for output in (forward, backward):
        assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
        for datum, reference, values in zip(data, expected, output.loss_fn_outputs, strict=True):
            assert (
                values["logprobs"].dtype == np.float32
                and values["logprobs"].shape == datum.loss_fn_inputs["target_tokens"].shape
            )
            np.testing.assert_allclose(values["logprobs"].reshape(reference.shape), reference, rtol=1e-5, atol=1e-5)
    gradient = {name: values.grad for name, values in peer.named_parameters()}
    assert gradient_gap(gradient, accumulated_gradient(client)) < 1e-5
    service.stop()


def test_one_soft_target_is_a_hard_one(service: LocalService, random_model: str) -> None:
    hard, soft = (service.create_lora_training_client(random_model, rank=None) for _ in range(2))
    data = [only_inputs(datum, ("target_tokens", "weights")) for datum in policy_data()]
    columns = [
        Datum(datum.model_input, {key: values[:, None] for key, values in datum.loss_fn_inputs.items()})
        for datum in data
    ]
    expected, actual = (
        client.forward_backward(given, "cross_entropy").result() for client, given in ((hard, data), (soft, columns))
    )
    assert actual.metrics == expected.metrics
    for ours, theirs in zip(actual.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(ours["logprobs"], theirs["logprobs"][:, None])
    assert gradient_gap(accumulated_gradient(hard), accumulated_gradient(soft)) == 0


def test_soft_targets_share_one_pass_and_padding_costs_nothing(service: LocalService, random_model: str) -> None:
    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    session = client._session
    assert session is not None
    rows: list[int] = []
    count = output_layer(session.weights.model).register_forward_hook(
        lambda layer, given, logits: rows.append(len(logits))
    )
    client.forward_backward(soft_data(), "cross_entropy").result()
    count.remove()
    positions = 0
    for datum in soft_data():
        weights = datum.loss_fn_inputs.get("weights", np.ones(datum.model_input.length))
        positions += int((weights.reshape(len(weights), -1) != 0).any(1).sum())
    assert sum(rows) == positions


@pytest.mark.parametrize("token_budget", [1000, 1])
def test_custom_loss_over_soft_targets(random_model: str, token_budget: int) -> None:
    """A loss that couples all logprobs, in one operation and in the two passes of cross_entropy that a remote client
    makes."""

    def squared_sum(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        terms = [(each * torch.arange(1, each.numel() + 1).reshape(each.shape)).mean() for each in logprobs]
        return torch.stack(terms).sum().square(), {}

    data = [only_inputs(datum, ("target_tokens",)) for datum in soft_data()]
    service = LocalService(device="cpu", token_budget=token_budget)
    built_in, remote = (service.create_lora_training_client(random_model, rank=None) for _ in range(2))
    ours = built_in.forward_backward_custom(data, squared_sum).result()
    theirs = forward_backward_two_pass(remote, data, squared_sum).result()
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
    assert [output["logprobs"].shape for output in ours.loss_fn_outputs] == [
        datum.loss_fn_inputs["target_tokens"].shape for datum in data
    ]
    assert gradient_gap(accumulated_gradient(built_in), accumulated_gradient(remote)) < 1e-5
    service.stop()


def test_only_positions_that_count_are_computed(service: LocalService, random_model: str) -> None:
    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    data = policy_data()
    everything = client.forward(
        [Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in data], "cross_entropy"
    ).result()
    forward, backward = client.forward(data, "ppo").result(), client.forward_backward(data, "ppo").result()
    assert forward.metrics["loss:sum"] == pytest.approx(backward.metrics["loss:sum"], rel=1e-6)
    for datum, full, first, second in zip(
        data, everything.loss_fn_outputs, forward.loss_fn_outputs, backward.loss_fn_outputs, strict=True
    ):
        assert (full["logprobs"] < 0).all()
        weighed = datum.loss_fn_inputs["weights"] != 0
        np.testing.assert_allclose(first["logprobs"], full["logprobs"] * weighed, atol=1e-5)
        np.testing.assert_allclose(
            second["logprobs"], full["logprobs"] * weighed * (datum.loss_fn_inputs["advantages"] != 0), atol=1e-5
        )


@pytest.mark.parametrize("token_budget", [1000, 60])
def test_custom_loss_equals_the_built_in_one(random_model: str, token_budget: int) -> None:
    def importance_sampling(
        data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        terms = []
        for datum, each in zip(data, logprobs, strict=True):
            q, advantages, weights = (
                torch.from_numpy(datum.loss_fn_inputs[key]) for key in ("logprobs", "advantages", "weights")
            )
            terms.append(-(weights * torch.where(weights == 0, 0.0, each - q).exp() * advantages).sum())
        return torch.stack(terms).sum(), {"datums:sum": float(len(data))}

    service = LocalService(device="cpu", token_budget=token_budget)
    custom, built_in = (service.create_lora_training_client(random_model, rank=4, seed=0) for _ in range(2))
    for client in (custom, built_in):
        disturb(client)
    ours = custom.forward_backward_custom(policy_data(), importance_sampling).result()
    theirs = built_in.forward_backward(policy_data(), "importance_sampling").result()
    assert (
        ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
        and ours.metrics["datums:sum"] == 9
    )
    assert gradient_gap(accumulated_gradient(built_in), accumulated_gradient(custom)) < 1e-5
    service.stop()


def test_custom_loss_couples_datums_across_micro_batches(random_model: str) -> None:
    """A loss of differences between datums, as DPO has: split into micro-batches of one, and kept as a single graph."""

    def paired(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        sums = torch.stack([each.sum() for each in logprobs])
        return -torch.nn.functional.logsigmoid(0.1 * (sums[:, None] - sums[None, :])).sum(), {}

    gradients = []
    for token_budget in (1000, 1):
        service = LocalService(device="cpu", token_budget=token_budget)
        client = service.create_lora_training_client(random_model, rank=4, seed=0)
        disturb(client)
        client.forward_backward_custom(policy_data(), paired).result()
        gradients.append(accumulated_gradient(client))
        service.stop()
    assert gradient_gap(*gradients) < 1e-5


def test_a_failed_operation_leaves_the_gradient_as_it_was(service: LocalService, random_model: str) -> None:
    def broken(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        raise ZeroDivisionError("in the custom loss")

    def not_a_number(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return logprobs[0].sum() * float("nan"), {}

    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    data = policy_data()
    client.forward_backward(data, "ppo").result()
    before = {name: values.clone() for name, values in accumulated_gradient(client).items()}
    infinite = [Datum(data[0].model_input, {**data[0].loss_fn_inputs, "logprobs": np.full(7, -np.inf)})]
    outside = [Datum(ModelInput.from_ints([5, 97]), {"target_tokens": [1, 2]})]
    soft_outside = [Datum(ModelInput.from_ints([5, 6]), {"target_tokens": [[1, 2], [98, 0]]})]
    soft = {"target_tokens": [[1, 2], [3, 4]], "logprobs": [0, 0], "advantages": [1, 1]}
    policy_soft = [Datum(ModelInput.from_ints([5, 6]), soft)]
    flat_weights = [Datum(ModelInput.from_ints([5, 6]), {"target_tokens": [[1, 2], [3, 4]], "weights": [0, 1]})]
    failures = [
        (
            client.forward_backward_custom(data, broken),
            LossError,
            "broken raised ZeroDivisionError: in the custom loss",
        ),
        (client.forward_backward_custom(data, not_a_number), BackendError, "loss .*not_a_number is nan"),
        (
            client.forward_backward(data + infinite, "importance_sampling"),
            BackendError,
            "loss 'importance_sampling' is",
        ),
        (client.forward_backward(outside, "cross_entropy"), DataError, "token 97 is outside the vocabulary"),
        (client.forward_backward(soft_outside, "cross_entropy"), DataError, "token 98 is outside the vocabulary"),
        (
            client.forward_backward(data + policy_soft, "ppo"),
            DataError,
            "datum 9: .*'target_tokens'.* takes one target per position",
        ),
        (client.forward_backward(flat_weights, "cross_entropy"), DataError, "datum 0: .*'weights'.* one weight each"),
        (
            client.forward_backward_custom(flat_weights, not_a_number),
            DataError,
            "datum 0: .*'weights'.* one weight each",
        ),
        (client.forward_backward(data, "pp0"), ConfigError, "did you mean ppo"),
    ]
    for future, kind, message in failures:
        with pytest.raises(kind, match=message):
            future.result()
    for name, values in accumulated_gradient(client).items():
        torch.testing.assert_close(values, before[name], rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_is_dropped(service: LocalService, random_model: str) -> None:
    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    datum = policy_data()[0]
    before = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    huge = Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": np.full(7, 1e36)})
    client.forward_backward([huge], "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics == {"grad_norm": 0.0, "skipped_steps": 1.0}
    assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0.0
    np.testing.assert_array_equal(
        client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"], before
    )


def test_adapters_do_not_disturb_one_another(service: LocalService, random_model: str) -> None:
    data = policy_data()

    def logprobs(client) -> np.ndarray:
        return np.concatenate(
            [output["logprobs"] for output in client.forward(data, "cross_entropy").result().loss_fn_outputs]
        )

    alone = service.create_lora_training_client(random_model, rank=4, seed=1)
    disturb(alone)
    expected = logprobs(alone)
    first = service.create_lora_training_client(random_model, rank=4, seed=1)
    second = service.create_lora_training_client(random_model, rank=8, seed=2)
    full = service.create_lora_training_client(random_model, rank=None)
    for step in range(2):  # the steps of `disturb`, interleaved
        for client in (first, second, full):
            client.forward_backward(policy_data(5 + step), "cross_entropy")
        second.optim_step(AdamParams(learning_rate=1e-1))
        full.optim_step(AdamParams(learning_rate=1e-2))
        first.optim_step(AdamParams(learning_rate=2e-2))
        second.save_weights_and_get_sampling_client().sample(
            ModelInput.from_ints([5, 6]), 1, SamplingParams(max_tokens=3)
        ).result()
    np.testing.assert_array_equal(logprobs(first), expected)
    assert np.abs(logprobs(second) - expected).max() > 0.1 and np.abs(logprobs(full) - expected).max() > 0.1


def test_initialisation_is_a_function_of_the_seed_and_draws_nothing_global(
    service: LocalService, random_model: str
) -> None:
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    clients = [service.create_lora_training_client(random_model, rank=4, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(1), expected)
    first, same, other = ([values for values in client._session.weights.parameters.values()] for client in clients)  # pyright: ignore[reportOptionalMemberAccess]
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_full_parameter_training_lowers_the_loss(service: LocalService, random_model: str) -> None:
    tokens = random_tokens(0, 30)
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    with service.create_lora_training_client(random_model, rank=None) as client:
        losses = []
        for _ in range(15):
            losses.append(client.forward_backward([datum], "cross_entropy"))
            client.optim_step(ADAM)
        values = [loss.result().metrics["loss:sum"] for loss in losses]
    assert values[-1] < 0.2 * values[0]


def test_what_cannot_be_made_is_refused(service: LocalService, random_model: str) -> None:
    with pytest.raises(ConfigError, match="lora rank is 0"):
        service.create_lora_training_client(random_model, rank=0)
    with pytest.raises(ConfigError, match="device='warp'"):
        LocalService(device="warp")
