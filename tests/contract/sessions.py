"""Saving and loading, errors, the end of a client, and futures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cookbook.core.clients import ServiceClient, TrainingClient
from cookbook.core.errors import BackendError, CookbookError
from cookbook.core.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    import torch

from tests.contract.harness import (
    ContractHarness,
    NewClient,
    assert_close,
    assert_differ,
    known,
    logprobs_of,
    with_inputs,
)


class SessionContract(ContractHarness):
    def test_what_is_trained_is_told_or_not_known(self, client: TrainingClient) -> None:
        trainable = client.trainable
        if trainable is not None:
            assert 0 < trainable.trained == sum(trainable.kinds.values()) <= trainable.total
            assert all(f"{kind} {count:,}" in str(trainable) for kind, count in trainable.kinds.items())

    def test_load_with_and_without_optimizer(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum]
    ) -> None:
        for batch in (data[:1], data[1:2]):
            self.train(client, batch)
        path = client.save_state("two-steps").result(60).path
        saved = self.logprobs(client, data)
        self.train(client, data[2:])
        continued = self.logprobs(client, data)

        client.load_state_with_optimizer(path)
        np.testing.assert_array_equal(self.logprobs(client, data), saved, "weights after load_state_with_optimizer")
        self.train(client, data[2:])
        assert_close(self.logprobs(client, data), continued, self.tolerance / 10, "training continues exactly")

        client.load_state(path)
        np.testing.assert_array_equal(self.logprobs(client, data), saved, "weights after load_state")
        self.train(client, data[2:])
        reset = self.logprobs(client, data)
        assert_differ(reset, continued, self.tolerance, "load_state resets the optimizer")

        for with_optimizer, expected in ((True, continued), (False, reset)):
            with service.create_training_client_from_state(path, with_optimizer=with_optimizer) as restored:
                np.testing.assert_array_equal(
                    self.logprobs(restored, data), saved, "weights of a client made from a state"
                )
                self.train(restored, data[2:])
                assert_close(
                    self.logprobs(restored, data),
                    expected,
                    self.tolerance / 10,
                    f"next step, with_optimizer={with_optimizer}",
                )

    def test_saves_are_snapshots_and_replace_their_namesake(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum]
    ) -> None:
        first_save = client.save_state("same-name")
        client.forward_backward(data, "cross_entropy")
        client.optim_step(self.smooth_adam())
        sampler_save = client.save_weights_for_sampler("same-name")
        trained = self.logprobs(client, data)
        base_prompt = ModelInput.from_ints([*data[0].model_input.tokens])
        sampler = service.create_sampling_client(model_path=sampler_save.result(60).path)
        assert_close(
            known(sampler.compute_logprobs(base_prompt).result(60)),
            trained[: base_prompt.length - 1],
            self.tolerance,
            "sampler",
        )
        client.load_state_with_optimizer(first_save.result(60).path)
        assert_differ(
            self.logprobs(client, data), trained, self.tolerance, "a sampler save does not replace a state of that name"
        )
        self.train(client, data)
        second_path = client.save_state("same-name").result(60).path
        with service.create_training_client_from_state(second_path) as restored:
            assert_close(
                self.logprobs(restored, data),
                self.logprobs(client, data),
                self.tolerance / 10,
                "the later save of a name counts",
            )

    def test_states_outlive_their_service(
        self, service: ServiceClient, client: TrainingClient, state_dir: Path, data: list[Datum]
    ) -> None:
        self.train(client, data)
        path = client.save_state("outlives").result(60).path
        successor = self.make_service(state_dir)
        with successor.create_training_client_from_state(path, with_optimizer=True) as restored:
            assert_close(
                self.logprobs(restored, data),
                self.logprobs(client, data),
                self.tolerance / 10,
                "restored by another service",
            )
        successor.stop()

    def test_errors_come_through_futures_and_leave_the_session_usable(
        self, new_client: NewClient, data: list[Datum], tmp_path: Path
    ) -> None:
        client, undisturbed = new_client(), new_client()
        targetless = [Datum(datum.model_input, {"weights": np.ones(datum.model_input.length)}) for datum in data]
        failing = {
            "cros_entropy": client.forward_backward(data, "cros_entropy"),
            "target_tokens": client.forward_backward(targetless, "cross_entropy"),
            "advantages": client.forward_backward(
                [with_inputs(d, logprobs=np.zeros(d.model_input.length)) for d in data], "importance_sampling"
            ),
            "temprature": client.forward_backward(data, "cross_entropy", {"temprature": 1.0}),
            "nowhere": client.load_state(str(tmp_path / "nowhere")),
        }
        client.forward_backward(data, "cross_entropy")
        client.optim_step(self.smooth_adam()).result(60)
        for named, future in failing.items():
            with pytest.raises(CookbookError, match=named) as raised:
                future.result(60)
            assert "\n" not in str(raised.value), "an error is one line"
        self.train(undisturbed, data)
        assert_close(
            self.logprobs(client, data),
            self.logprobs(undisturbed, data),
            self.tolerance,
            "failed operations leave no trace",
        )

    def test_custom_loss_error_comes_through_the_future(
        self, service: ServiceClient, client: TrainingClient, data: list[Datum]
    ) -> None:
        def failing(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            raise ZeroDivisionError("in the loss")

        future = client.forward_backward_custom(data, failing)
        with pytest.raises(Exception, match="in the loss" if service.capabilities.custom_loss else "custom"):
            future.result(60)
        assert np.isfinite(self.logprobs(client, data)).all()

    def test_use_after_stop(self, service: ServiceClient, data: list[Datum], prompt: ModelInput) -> None:
        with service.create_lora_training_client(self.base_model, rank=8, alpha=16, seed=7) as client:
            self.logprobs(client, data)
        client.stop()  # again: idempotent
        operations: list[Callable[[], object]] = [
            lambda: client.forward(data, "cross_entropy").result(60),
            lambda: client.forward_backward(data, "cross_entropy").result(60),
            lambda: client.optim_step(self.adam()).result(60),
            lambda: client.save_state("late").result(60),
            lambda: client.save_weights_for_sampler("late").result(60),
            lambda: client.save_weights_and_get_sampling_client().compute_logprobs(prompt).result(60),
        ]
        for operation in operations:
            with pytest.raises(BackendError):
                operation()

    def test_service_stop_stops_its_clients(self, tmp_path: Path, data: list[Datum], prompt: ModelInput) -> None:
        service = self.make_service(tmp_path)
        client = service.create_lora_training_client(self.base_model, rank=8, alpha=16, seed=7)
        sampler = client.save_weights_and_get_sampling_client()
        pending = client.forward(data, "cross_entropy")
        pending.result(60)
        service.stop()
        service.stop()
        operations: list[Callable[[], object]] = [
            lambda: client.forward(data, "cross_entropy").result(60),
            lambda: sampler.compute_logprobs(prompt).result(60),
            lambda: service.create_lora_training_client(self.base_model),
            lambda: service.create_sampling_client(base_model=self.base_model).compute_logprobs(prompt).result(60),
        ]
        for operation in operations:
            with pytest.raises(BackendError):
                operation()

    def test_futures_can_be_awaited(self, client: TrainingClient, data: list[Datum], prompt: ModelInput) -> None:
        sampler = client.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=6, seed=0)

        async def everything() -> tuple[list[np.ndarray], list[int], list[int]]:
            forwards = [client.forward(data, "cross_entropy") for _ in range(3)]
            samples = [sampler.sample(prompt, 2, params) for _ in range(8)]
            scores = [sampler.compute_logprobs(datum.model_input) for datum in data]
            sampled = await asyncio.gather(*samples)
            scored = await asyncio.gather(*scores)
            outputs = await asyncio.gather(*forwards)
            return [logprobs_of(o) for o in outputs], [len(s.sequences) for s in sampled], [len(s) for s in scored]

        outputs, sample_counts, score_lengths = asyncio.run(asyncio.wait_for(everything(), 60))
        for output in outputs:
            assert_close(output, self.logprobs(client, data), self.tolerance, "awaited and blocking results agree")
        assert sample_counts == [2] * 8
        assert score_lengths == [datum.model_input.length for datum in data]

    def test_awaited_future_raises_its_error(self, client: TrainingClient, data: list[Datum]) -> None:
        async def fail() -> None:
            await client.forward(data, "nonsense")

        with pytest.raises(CookbookError, match="nonsense"):
            asyncio.run(fail())
