"""Order of operations, accumulation, the optimizer, and sessions beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cookbook.core.clients import ServiceClient, TrainingClient
from cookbook.core.errors import CapabilityError, CookbookError
from cookbook.core.types import Datum, ModelInput

if TYPE_CHECKING:
    import torch

from tests.contract.harness import (
    ContractHarness,
    Memoriser,
    NewClient,
    assert_close,
    assert_differ,
    known,
    logprobs_of,
    with_inputs,
)


class TrainingContract(ContractHarness):
    def test_lists_its_base_model(self, service: ServiceClient) -> None:
        assert self.base_model in service.list_base_models()

    def test_fresh_policy_is_the_base_model(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum], prompt: ModelInput
    ) -> None:
        base = service.create_sampling_client(base_model=self.base_model)
        expected = known(base.compute_logprobs(prompt).result(60))
        fresh = client.save_weights_and_get_sampling_client()
        assert_close(
            known(fresh.compute_logprobs(prompt).result(60)),
            expected,
            self.tolerance,
            "a fresh adapter changes nothing",
        )

    def test_sampling_client_wants_exactly_one_source(self, service: ServiceClient) -> None:
        with pytest.raises(CookbookError):
            service.create_sampling_client()
        with pytest.raises(CookbookError):
            service.create_sampling_client(base_model=self.base_model, model_path="x")

    def test_refuses_what_its_capabilities_deny(self, service: ServiceClient) -> None:
        if not service.capabilities.critic:
            with pytest.raises(CapabilityError):
                service.create_lora_training_client(self.base_model, role="critic")
        if not service.capabilities.full_parameter:
            with pytest.raises(CapabilityError):
                service.create_lora_training_client(self.base_model, rank=None)

    def test_sessions_do_not_touch_one_another(
        self, service: ServiceClient, new_client: NewClient, data: list[Datum]
    ) -> None:
        base = service.create_sampling_client(base_model=self.base_model)
        base_prompt = ModelInput.from_ints([*data[0].model_input.tokens])
        base_before = known(base.compute_logprobs(base_prompt).result(60))
        alone_first, alone_second = new_client(), new_client()
        self.train(alone_first, data[:1])
        self.train(alone_second, data[1:])
        first, second, idle = new_client(), new_client(), new_client()
        before = self.logprobs(idle, data)
        first.forward_backward(data[:1], "cross_entropy")
        second.forward_backward(data[1:], "cross_entropy")
        first.optim_step(self.smooth_adam())
        second.optim_step(self.smooth_adam())
        assert_close(
            self.logprobs(first, data),
            self.logprobs(alone_first, data),
            self.tolerance,
            "first of two interleaved sessions",
        )
        assert_close(
            self.logprobs(second, data),
            self.logprobs(alone_second, data),
            self.tolerance,
            "second of two interleaved sessions",
        )
        assert_close(self.logprobs(idle, data), before, self.tolerance, "a session that nobody trained")
        assert_close(
            known(base.compute_logprobs(base_prompt).result(60)), base_before, self.tolerance, "the base model"
        )
        assert_differ(self.logprobs(first, data), before, self.tolerance, "training has an effect")

    def test_full_parameter_session_leaves_the_base_alone(self, service: ServiceClient, data: list[Datum]) -> None:
        if not service.capabilities.full_parameter:
            pytest.skip("no full-parameter training")
        base = service.create_sampling_client(base_model=self.base_model)
        base_prompt = ModelInput.from_ints([*data[0].model_input.tokens])
        base_before = known(base.compute_logprobs(base_prompt).result(60))
        with service.create_lora_training_client(self.base_model, rank=None, seed=7) as client:
            untrained = self.logprobs(client, data)
            self.train(client, data)
            trained = self.logprobs(client, data)
            assert_differ(trained, untrained, self.tolerance, "full-parameter training has an effect")
            path = client.save_state("full").result(60).path
            sampler = client.save_weights_and_get_sampling_client()
            assert_close(
                known(sampler.compute_logprobs(base_prompt).result(60)),
                self.logprobs(client, data[:1])[:-1],
                self.tolerance,
                "sampler",
            )
            self.train(client, data)
            continued = self.logprobs(client, data)
        assert_close(
            known(base.compute_logprobs(base_prompt).result(60)), base_before, self.tolerance, "the base model"
        )
        with service.create_training_client_from_state(path, with_optimizer=True) as restored:
            assert_close(self.logprobs(restored, data), trained, self.tolerance, "restored weights")
            self.train(restored, data)
            assert_close(self.logprobs(restored, data), continued, self.tolerance, "the next step after a restore")

    def test_operations_run_in_call_order(self, new_client: NewClient, data: list[Datum]) -> None:
        enqueued, stepwise = new_client(), new_client()
        before = enqueued.forward(data, "cross_entropy")
        backward = enqueued.forward_backward(data, "cross_entropy")
        step = enqueued.optim_step(self.smooth_adam())
        after = enqueued.forward(data, "cross_entropy")
        enqueued.forward_backward(data, "cross_entropy")
        enqueued.optim_step(self.smooth_adam())
        last = enqueued.forward(data, "cross_entropy")
        results = [
            logprobs_of(future.result(60)) for future in (last, after, before, backward)
        ]  # awaited in another order
        step.result(60)
        assert step.done()
        expected_before = self.logprobs(stepwise, data)
        self.train(stepwise, data)
        expected_after = self.logprobs(stepwise, data)
        self.train(stepwise, data)
        assert_close(results[0], self.logprobs(stepwise, data), self.tolerance, "forward after the second step")
        assert_close(results[1], expected_after, self.tolerance, "forward after the first step")
        assert_close(results[2], expected_before, self.tolerance, "forward before any step")
        assert_close(results[3], expected_before, self.tolerance, "forward_backward before any step")
        assert_differ(results[1], results[2], self.tolerance, "a step changes logprobs")

    def test_gradients_accumulate_until_optim_step(self, new_client: NewClient, data: list[Datum]) -> None:
        whole, halves, with_forward = new_client(), new_client(), new_client()
        self.train(whole, data)
        halves.forward_backward(data[:1], "cross_entropy")
        self.train(halves, data[1:])
        with_forward.forward_backward(data, "cross_entropy")
        with_forward.forward(data[:1], "cross_entropy")
        with_forward.optim_step(self.smooth_adam())
        expected = self.logprobs(whole, data)
        assert_close(self.logprobs(halves, data), expected, self.tolerance, "two halves are one whole")
        assert_close(self.logprobs(with_forward, data), expected, self.tolerance, "forward adds no gradient")

    def test_soft_targets_are_the_sum_over_their_columns(self, new_client: NewClient, data: list[Datum]) -> None:
        rng = np.random.default_rng(0)
        soft, columns = [], []
        for datum in data:
            targets = np.stack(
                [datum.loss_fn_inputs["target_tokens"], datum.model_input.tokens, datum.model_input.tokens[::-1]],
                axis=1,
            )
            weights = rng.normal(0.3, 1, targets.shape)
            weights[::3], weights[1::3, 2] = 0, 0  # some positions, and the padding of others
            soft.append(Datum(datum.model_input, {"target_tokens": targets, "weights": weights}))
            columns += [
                Datum(datum.model_input, {"target_tokens": t, "weights": w})
                for t, w in zip(targets.T, weights.T, strict=True)
            ]
        by_soft, by_columns = new_client(), new_client()
        mixed = [*soft, *columns[:2]]
        output = by_soft.forward_backward(mixed, "cross_entropy").result(60)
        expected = by_columns.forward_backward([*columns, *columns[:2]], "cross_entropy").result(60)
        assert output.metrics["loss:sum"] == pytest.approx(
            expected.metrics["loss:sum"], rel=self.tolerance, abs=self.tolerance
        )
        for index, datum in enumerate(soft):
            logprobs = output.loss_fn_outputs[index]["logprobs"]
            assert logprobs.shape == datum.loss_fn_inputs["target_tokens"].shape and logprobs.dtype == np.float32
            theirs = np.stack([expected.loss_fn_outputs[3 * index + column]["logprobs"] for column in range(3)], axis=1)
            counted = datum.loss_fn_inputs["weights"] != 0
            assert_close(logprobs[counted], theirs[counted], self.tolerance, f"logprobs of datum {index}")
        for client in (by_soft, by_columns):
            client.optim_step(self.smooth_adam()).result(60)
        assert_close(self.logprobs(by_soft, data), self.logprobs(by_columns, data), self.tolerance, "after a step")
        assert_differ(
            self.logprobs(by_soft, data),
            self.logprobs(new_client(), data),
            self.tolerance,
            "soft targets teach something",
        )
        unweighted = [
            Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in soft
        ]
        forward = by_soft.forward(unweighted, "cross_entropy").result(60)
        everything = sum(float(output["logprobs"].astype(np.float64).sum()) for output in forward.loss_fn_outputs)
        assert forward.metrics["loss:sum"] == pytest.approx(-everything, rel=self.tolerance)

    def test_soft_targets_that_cannot_be_trained_are_refused(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum]
    ) -> None:
        ones = np.ones(data[0].model_input.length)
        targets = np.stack([data[0].loss_fn_inputs["target_tokens"]] * 2, axis=1)
        policy = Datum(data[0].model_input, {"target_tokens": targets, "logprobs": -ones, "advantages": ones})
        for loss_fn in service.capabilities.losses - {"cross_entropy"}:
            with pytest.raises(CookbookError, match=r"datum 0.*target_tokens"):
                client.forward_backward([policy], loss_fn).result(60)
        with pytest.raises(CookbookError, match="weights"):
            client.forward_backward(
                [Datum(data[0].model_input, {"target_tokens": targets, "weights": ones})], "cross_entropy"
            ).result(60)
        if service.capabilities.critic:
            value = Datum(data[0].model_input, {"target_tokens": targets, "old_values": ones, "returns": ones})
            critic = service.create_lora_training_client(self.base_model, role="critic")
            with critic, pytest.raises(CookbookError, match=r"datum 0.*target_tokens"):
                critic.forward_backward([value], "value").result(60)

    def test_custom_loss_over_soft_targets(
        self, service: ServiceClient, new_client: NewClient, data: list[Datum]
    ) -> None:
        if not service.capabilities.custom_loss:
            pytest.skip("no custom losses")
        import torch

        def contrast(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            return (0.5 * torch.cat(list(logprobs))[:, 1] - torch.cat(list(logprobs))[:, 0]).sum(), {}

        custom, built_in = new_client(), new_client()
        targets = [
            np.stack([datum.loss_fn_inputs["target_tokens"], datum.model_input.tokens], axis=1) for datum in data
        ]
        soft = [Datum(datum.model_input, {"target_tokens": each}) for datum, each in zip(data, targets, strict=True)]
        weighted = [with_inputs(datum, weights=np.tile([1, -0.5], (datum.model_input.length, 1))) for datum in soft]
        output = custom.forward_backward_custom(soft, contrast).result(60)
        expected = built_in.forward_backward(weighted, "cross_entropy").result(60)
        assert output.metrics["loss:sum"] == pytest.approx(
            expected.metrics["loss:sum"], rel=self.tolerance, abs=self.tolerance
        )
        for client in (custom, built_in):
            client.optim_step(self.smooth_adam()).result(60)
        assert_close(self.logprobs(custom, data), self.logprobs(built_in, data), self.tolerance, "after a step")
        assert_differ(
            self.logprobs(custom, data), self.logprobs(new_client(), data), self.tolerance, "the step has an effect"
        )

    def test_optim_step_clears_the_gradient(self, client: TrainingClient, data: list[Datum]) -> None:
        self.train(client, data)
        after = self.logprobs(client, data)
        masked = [with_inputs(datum, weights=np.zeros(datum.model_input.length)) for datum in data]
        self.train(client, masked, self.adam(beta1=0.0))  # without momentum a zero gradient moves nothing
        assert_close(self.logprobs(client, data), after, self.tolerance / 10, "the second step had no gradient left")

    def test_zero_gradient_and_no_decay_leave_the_weights(self, client: TrainingClient, data: list[Datum]) -> None:
        before = self.logprobs(client, data)
        masked = [with_inputs(datum, weights=np.zeros(datum.model_input.length)) for datum in data]
        output = client.forward_backward(masked, "cross_entropy").result(60)
        client.optim_step(self.adam()).result(60)
        assert output.metrics["loss:sum"] == 0
        assert_close(self.logprobs(client, data), before, self.tolerance / 10, "nothing to learn, nothing changed")

    def test_weight_decay_is_decoupled(self, client: TrainingClient, data: list[Datum]) -> None:
        before = self.logprobs(client, data)
        self.train(client, data)
        assert_differ(self.logprobs(client, data), before, self.tolerance, "a step changes logprobs")
        masked = [with_inputs(datum, weights=np.zeros(datum.model_input.length)) for datum in data]
        self.train(client, masked, self.adam(learning_rate=0.1, weight_decay=10.0, beta1=0.0))
        assert_close(
            self.logprobs(client, data),
            before,
            self.tolerance,
            "decay by learning_rate * weight_decay = 1 ends at the base model",
        )

    def test_gradient_clipping_scales_by_the_global_norm(self, new_client: NewClient, data: list[Datum]) -> None:
        probe, clipped, halved = new_client(), new_client(), new_client()
        probe.forward_backward(data, "cross_entropy")
        metrics = probe.optim_step(self.smooth_adam()).result(60).metrics
        if "grad_norm" not in metrics:
            pytest.skip("no gradient norm reported")
        self.train(clipped, data, self.smooth_adam(grad_clip_norm=metrics["grad_norm"] / 2))
        self.train(halved, [with_inputs(datum, weights=np.full(datum.model_input.length, 0.5)) for datum in data])
        assert_close(
            self.logprobs(clipped, data),
            self.logprobs(halved, data),
            self.tolerance,
            "clipped to half is half the gradient",
        )
        assert_differ(
            self.logprobs(clipped, data), self.logprobs(probe, data), self.tolerance, "clipping has an effect"
        )

    def test_learns_a_sequence(self, memoriser: Memoriser) -> None:
        losses = memoriser.losses
        assert losses[30] < 0.5 * losses[0], f"30 steps took the loss from {losses[0]:.2f} only to {losses[30]:.2f}"
