import numpy as np
import pytest

from cookbook.core.datums import scale_weights, supervised_datum
from cookbook.core.errors import DataError

TOKENS = [10, 11, 12, 13, 14, 15]
LOSS_MASK = [False, False, True, True, False, True]


def test_weights_stand_at_the_targets_that_are_trained_on():
    datum = supervised_datum(TOKENS, LOSS_MASK, max_length=6, truncation="drop")
    assert datum is not None
    assert datum.model_input.to_ints() == [10, 11, 12, 13, 14]
    np.testing.assert_array_equal(datum.loss_fn_inputs["target_tokens"], [11, 12, 13, 14, 15])
    np.testing.assert_array_equal(datum.loss_fn_inputs["weights"], [0, 1, 1, 0, 1])
    (scaled,) = scale_weights([datum], "token_mean", max_tokens=1)
    assert scaled.loss_fn_inputs["weights"].sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("truncation", "max_length", "tokens", "weights"),
    [
        ("right", 4, [10, 11, 12, 13], [0, 1, 1]),
        ("left", 4, [12, 13, 14, 15], [1, 0, 1]),  # 12 is in the mask, but nothing before it is left to predict it
        ("left", 2, [14, 15], [1]),
    ],
)
def test_truncation(truncation, max_length: int, tokens: list[int], weights: list[int]):
    datum = supervised_datum(TOKENS, LOSS_MASK, max_length, truncation)
    assert datum is not None
    assert [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"][-1]] == tokens
    np.testing.assert_array_equal(datum.loss_fn_inputs["weights"], weights)


def test_none_where_nothing_is_left_to_learn():
    assert supervised_datum(TOKENS, LOSS_MASK, max_length=5, truncation="drop") is None
    assert supervised_datum(TOKENS, LOSS_MASK, max_length=2, truncation="right") is None
    assert supervised_datum(TOKENS, [True] + [False] * 5, max_length=6, truncation="drop") is None
    assert supervised_datum([10], [True], max_length=6, truncation="drop") is None


def test_what_does_not_fit_together_is_an_error():
    with pytest.raises(DataError, match="6 tokens and a loss_mask of 5"):
        supervised_datum(TOKENS, LOSS_MASK[1:], max_length=6, truncation="drop")
    with pytest.raises(DataError, match="max_length is 1"):
        supervised_datum(TOKENS, LOSS_MASK, max_length=1, truncation="left")
