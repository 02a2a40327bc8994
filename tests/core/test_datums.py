import numpy as np
import pytest

from cookbook.core.datums import policy_datums, scale_weights, with_inputs
from cookbook.core.rollouts import RewardResult, Trajectory, Transition


def turn(prompt, completion, logprobs=None):
    return Transition(
        prompt_tokens=tuple(prompt),
        completion_tokens=tuple(completion),
        sampling_logprobs=tuple(logprobs or [-0.5 - token for token in completion]),
        stop_reason="eos",
        text="",
        reward=RewardResult(1.0, "correct"),
    )


def test_single_turn_is_shifted_by_one_and_trains_the_stop_token():
    (datum,) = policy_datums(Trajectory((turn([1, 2, 3], [7, 8, 9], [-0.1, -0.2, -0.3]),)), 0.5)
    assert datum.model_input.to_ints() == [1, 2, 3, 7, 8]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 7, 8, 9]
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 0, 1, 1, 1]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0, 0, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(datum.loss_fn_inputs["logprobs"], [0, 0, -0.1, -0.2, -0.3], rtol=1e-6)


def test_turns_that_continue_the_tokens_share_a_datum():
    (datum,) = policy_datums(Trajectory((turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6]))), 1.0)
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4, 5, 6]
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 1, 1, 0, 1]


def test_a_broken_prefix_starts_a_new_datum():
    first, second = policy_datums(Trajectory((turn([1, 2], [3, 4]), turn([1, 2, 9, 5], [6]))), 1.0)
    assert first.model_input.to_ints() == [1, 2, 3]
    assert second.model_input.to_ints() == [1, 2, 9, 5]
    assert second.loss_fn_inputs["weights"].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("loss_agg", "expected"),
    [("token_mean", [1 / 4, 1 / 4]), ("sequence_mean", [1 / 2, 1 / 6]), ("constant", [1 / 20, 1 / 20])],
)
def test_scale_weights_makes_the_named_mean(loss_agg, expected):
    data = [policy_datums(Trajectory((turn([1, 2], completion),)), 1.0)[0] for completion in ([3], [3, 4, 5])]
    scaled = scale_weights(data, loss_agg, max_tokens=10)
    for datum, weight in zip(scaled, expected, strict=True):
        weights = datum.loss_fn_inputs["weights"]
        np.testing.assert_allclose(weights[weights != 0], weight, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss_agg", "expected"), [("token_mean", 1 / 2), ("sequence_mean", 1 / 4), ("constant", 1 / 20)]
)
def test_a_datum_that_is_masked_everywhere_has_no_weight_and_is_counted(loss_agg: str, expected: float):
    (trained,) = policy_datums(Trajectory((turn([1, 2], [3, 4]),)), 1.0)
    masked = with_inputs(trained, weights=np.zeros(3))
    scaled, unscaled = scale_weights([trained, masked], loss_agg, max_tokens=10)
    np.testing.assert_allclose(scaled.loss_fn_inputs["weights"], [0, expected, expected], rtol=1e-6)
    np.testing.assert_array_equal(unscaled.loss_fn_inputs["weights"], [0, 0, 0])
    (alone,) = scale_weights([masked], loss_agg, max_tokens=10)
    np.testing.assert_array_equal(alone.loss_fn_inputs["weights"], [0, 0, 0])
