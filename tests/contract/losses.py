"""Built-in losses and custom ones: the documented sums and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cookbook.core.callables import callable_name
from cookbook.core.clients import APIFuture, CustomLoss, ServiceClient, TrainingClient
from cookbook.core.errors import LossError
from cookbook.core.types import Datum, ForwardBackwardOutput
from tests.contract.broken_losses import BROKEN_LOSSES
from tests.contract.harness import ContractHarness, NewClient, assert_close, assert_differ, with_inputs

if TYPE_CHECKING:
    import torch

LOSS_NAMES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "gspo_token")
CLIPS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004), "gspo_token": (0.9997, 1.0004)}
DRO_BETA = 0.05

Inputs = Mapping[str, np.ndarray]

RunCustom = Callable[[TrainingClient, Sequence[Datum], CustomLoss], APIFuture[ForwardBackwardOutput]]


def in_one_call(client: TrainingClient, data: Sequence[Datum], loss: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
    return client.forward_backward_custom(data, loss)


def in_two_passes(client: TrainingClient, data: Sequence[Datum], loss: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
    from cookbook.losses.two_pass import forward_backward_two_pass

    return forward_backward_two_pass(client, data, loss)


WAYS = (in_one_call, in_two_passes)
"""The two ways to run a custom loss. The second asks a backend for cross_entropy only."""


def reference_loss(loss_fn: str, logprobs: np.ndarray, inputs: Inputs) -> float:
    """The documented sum over one datum's tokens, in float64."""
    weights = inputs.get("weights", np.ones(len(logprobs))).astype(np.float64)
    logprobs = logprobs.astype(np.float64)
    if loss_fn == "cross_entropy":
        return float(-(weights * logprobs).sum())
    advantages, log_ratio = inputs["advantages"].astype(np.float64), logprobs - inputs["logprobs"]
    if loss_fn == "dro":
        return float(-(weights * (advantages * logprobs - DRO_BETA / 2 * log_ratio**2)).sum())
    if loss_fn in ("gspo", "gspo_token"):
        log_ratio = np.full(len(logprobs), log_ratio[weights != 0].mean())
    ratio = np.exp(log_ratio)
    if loss_fn == "importance_sampling":
        return float(-(weights * ratio * advantages).sum())
    clipped = np.clip(ratio, *CLIPS[loss_fn])
    if loss_fn in ("ppo", "gspo", "gspo_token"):
        return float(-(weights * np.minimum(ratio * advantages, clipped * advantages)).sum())
    return float(-(weights * clipped * advantages * logprobs).sum())


def torch_loss(
    loss_fn: str,
) -> Callable[[Sequence[Datum], Sequence[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]:
    """The same sums as a custom loss."""
    import torch

    def one(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        tensors = {key: torch.from_numpy(np.array(values)).to(logprobs) for key, values in inputs.items()}
        weights = tensors.get("weights", torch.ones_like(logprobs))
        if loss_fn == "cross_entropy":
            return -(weights * logprobs).sum()
        log_ratio, advantages = logprobs - tensors["logprobs"], tensors["advantages"]
        if loss_fn == "dro":
            return -(weights * (advantages * logprobs - DRO_BETA / 2 * log_ratio.square())).sum()
        if loss_fn in ("gspo", "gspo_token"):
            sequence = log_ratio[weights != 0].mean()
            log_ratio = sequence if loss_fn == "gspo" else sequence.detach() + logprobs - logprobs.detach()
        ratio = log_ratio.exp()
        if loss_fn == "importance_sampling":
            return -(weights * ratio * advantages).sum()
        clipped = ratio.clamp(*CLIPS[loss_fn])
        if loss_fn in ("ppo", "gspo", "gspo_token"):
            return -(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum()
        return -(weights * clipped.detach() * advantages * logprobs).sum()

    def total(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses = [
            one(datum_logprobs, datum.loss_fn_inputs) for datum, datum_logprobs in zip(data, logprobs, strict=True)
        ]
        return torch.stack(losses).sum(), {"datums": float(len(data))}

    return total


class LossContract(ContractHarness):
    def policy_data(self, client: TrainingClient, data: Sequence[Datum]) -> list[Datum]:
        """Data for every policy loss: ratios on both sides of every clip, both signs of advantages, masked
        positions."""
        rng = np.random.default_rng(0)
        output = client.forward(data, "cross_entropy").result(60)
        return [
            with_inputs(
                datum,
                logprobs=datum_output["logprobs"] + rng.normal(0, 0.5, datum.model_input.length),
                advantages=rng.normal(0, 1, datum.model_input.length),
                weights=rng.choice([0.0, 0.5, 1.0], datum.model_input.length),
            )
            for datum, datum_output in zip(data, output.loss_fn_outputs, strict=True)
        ]

    @pytest.mark.parametrize("loss_fn", LOSS_NAMES)
    def test_loss_is_the_documented_sum(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum], loss_fn: str
    ) -> None:
        self.need_loss(service, loss_fn)
        policy_data = self.policy_data(client, data)
        unweighted = [
            Datum(datum.model_input, {key: values for key, values in datum.loss_fn_inputs.items() if key != "weights"})
            for datum in policy_data
        ]
        current = [output["logprobs"] for output in client.forward(data, "cross_entropy").result(60).loss_fn_outputs]
        for batch in (policy_data, unweighted):
            expected = sum(
                reference_loss(loss_fn, lp, datum.loss_fn_inputs) for lp, datum in zip(current, batch, strict=True)
            )
            for operation in (client.forward, client.forward_backward):
                output = operation(batch, loss_fn).result(60)
                assert output.metrics["loss:sum"] == pytest.approx(
                    expected, rel=10 * self.tolerance, abs=10 * self.tolerance
                )
                for datum, datum_output, lp in zip(batch, output.loss_fn_outputs, current, strict=True):
                    assert (
                        datum_output["logprobs"].shape == (datum.model_input.length,)
                        and datum_output["logprobs"].dtype == np.float32
                    )
                    counted = datum.loss_fn_inputs.get("weights", np.ones(len(lp))) != 0
                    assert_close(datum_output["logprobs"][counted], lp[counted], self.tolerance, "returned logprobs")

    @pytest.mark.parametrize("loss_fn", LOSS_NAMES)
    def test_step_favours_what_had_a_positive_advantage(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum], loss_fn: str
    ) -> None:
        self.need_loss(service, loss_fn)
        before = [output["logprobs"] for output in client.forward(data[:2], "cross_entropy").result(60).loss_fn_outputs]
        signs = (1.0, 1.0) if loss_fn == "cross_entropy" else (1.0, -1.0)
        batch = [
            with_inputs(d, logprobs=lp, advantages=np.full(len(lp), sign))
            for d, lp, sign in zip(data, before, signs, strict=False)
        ]
        client.forward_backward(batch, loss_fn)
        client.optim_step(self.adam(learning_rate=self.learning_rate / 10)).result(60)
        after = [output["logprobs"] for output in client.forward(data[:2], "cross_entropy").result(60).loss_fn_outputs]
        gains = [float(new.sum() - old.sum()) for new, old in zip(after, before, strict=True)]
        assert all(gain * sign > 0 for gain, sign in zip(gains, signs, strict=True)), (
            f"changes of the summed logprob: {gains}"
        )

    @pytest.mark.parametrize("loss_fn", LOSS_NAMES)
    def test_masked_positions_have_no_effect(
        self, service: ServiceClient, new_client: NewClient, data: list[Datum], loss_fn: str
    ) -> None:
        self.need_loss(service, loss_fn)
        clean, wild = new_client(), new_client()
        policy_data = self.policy_data(clean, data)
        wild_data = []
        for datum in policy_data:
            masked = datum.loss_fn_inputs["weights"] == 0
            changes = {
                "logprobs": np.where(masked, -200.0, datum.loss_fn_inputs["logprobs"]),
                "advantages": np.where(masked, 1e6, datum.loss_fn_inputs["advantages"]),
                "target_tokens": np.where(masked, datum.model_input.tokens[0], datum.loss_fn_inputs["target_tokens"]),
            }
            wild_data.append(with_inputs(datum, **changes))
        outputs = [
            client.forward_backward(batch, loss_fn).result(60)
            for client, batch in ((clean, policy_data), (wild, wild_data))
        ]
        assert outputs[1].metrics["loss:sum"] == pytest.approx(
            outputs[0].metrics["loss:sum"], rel=self.tolerance, abs=self.tolerance
        )
        for client in (clean, wild):
            client.optim_step(self.smooth_adam())
        assert_close(
            self.logprobs(wild, data), self.logprobs(clean, data), self.tolerance, "what is masked does not matter"
        )

    @pytest.mark.parametrize("loss_fn", LOSS_NAMES)
    def test_custom_loss_equals_the_built_in(
        self, service: ServiceClient, new_client: NewClient, data: list[Datum], loss_fn: str
    ) -> None:
        self.need_loss(service, loss_fn)
        if not service.capabilities.custom_loss:
            pytest.skip("no custom losses")
        built_in, custom = new_client(), new_client()
        policy_data = self.policy_data(built_in, data)
        expected = built_in.forward_backward(policy_data, loss_fn).result(60)
        output = custom.forward_backward_custom(policy_data, torch_loss(loss_fn)).result(60)
        assert output.metrics["datums:mean"] == len(data)
        assert output.metrics["loss:sum"] == pytest.approx(
            expected.metrics["loss:sum"], rel=10 * self.tolerance, abs=10 * self.tolerance
        )
        before = self.logprobs(custom, data)
        for client in (built_in, custom):
            client.optim_step(self.smooth_adam())
        assert_close(
            self.logprobs(custom, data), self.logprobs(built_in, data), self.tolerance, "the step after either loss"
        )
        assert_differ(self.logprobs(custom, data), before, self.tolerance, "the custom loss has an effect")

    @pytest.mark.parametrize("run", WAYS)
    def test_custom_metrics_need_no_reduction(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum], run: RunCustom
    ) -> None:
        def loss(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> Any:
            total = -sum(each.sum() for each in logprobs)
            return total, {"entropy": 0.5, "length:max": np.float32(7), "datums:sum": len(data), "loss:sum": 1e9}

        self.need_custom_loss(service, run)
        metrics = run(client, data, loss).result(60).metrics
        expected = client.forward(data, "cross_entropy").result(60).metrics["loss:sum"]
        assert metrics.pop("loss:sum") == pytest.approx(expected, rel=self.tolerance), (
            "the loss itself, not the function's metric"
        )
        assert metrics == {"entropy:mean": 0.5, "length:max": 7.0, "datums:sum": len(data)}
        assert {type(value) for value in metrics.values()} == {float}

    @pytest.mark.parametrize("run", WAYS)
    @pytest.mark.parametrize(("loss", "says"), BROKEN_LOSSES)
    def test_a_broken_custom_loss_is_one_line_and_adds_nothing(
        self,
        service: ServiceClient,
        new_client: NewClient,
        data: list[Datum],
        run: RunCustom,
        loss: CustomLoss,
        says: str,
    ) -> None:
        self.need_custom_loss(service, run)
        client, untouched = new_client(), new_client()
        with pytest.raises(LossError, match=says) as raised:
            run(client, data, loss).result(60)
        assert f"loss {callable_name(loss)}" in str(raised.value)
        assert "\n" not in str(raised.value)
        for each in (client, untouched):
            self.train(each, data)
        assert_close(
            self.logprobs(client, data), self.logprobs(untouched, data), self.tolerance, "the failed call had no effect"
        )

    def need_custom_loss(self, service: ServiceClient, run: RunCustom) -> None:
        if run is in_one_call and not service.capabilities.custom_loss:
            pytest.skip("no custom losses")

    def need_loss(self, service: ServiceClient, loss_fn: str) -> None:
        if loss_fn not in service.capabilities.losses:
            pytest.skip(f"{loss_fn} is not built in")
