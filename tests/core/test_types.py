import numpy as np
import pytest

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.types import AdamParams, Datum, ModelInput, SamplingParams

INPUT = ModelInput.from_ints([5, 6, 7])


def test_datum_stores_arrays_of_the_documented_types() -> None:
    datum = Datum(
        INPUT,
        {"target_tokens": np.array([6, 7, 8]), "weights": np.array([0, 1, 1]), "advantages": np.array([0.5, -1, 2])},
    )
    assert {key: array.dtype for key, array in datum.loss_fn_inputs.items()} == {
        "target_tokens": np.int64,
        "weights": np.float32,
        "advantages": np.float32,
    }
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7, 8]


@pytest.mark.parametrize("values", [np.ones(2), np.ones(4), np.ones(0), np.ones((1, 3)), np.ones(())])
def test_datum_names_the_array_of_another_shape_and_both_lengths(values: np.ndarray) -> None:
    with pytest.raises(DataError) as raised:
        Datum(INPUT, {"target_tokens": np.array([6, 7, 8]), "advantages": values})
    message = str(raised.value)
    assert "'advantages'" in message and str(values.shape) in message and "3 tokens" in message and "\n" not in message


def test_datum_takes_soft_targets_and_arrays_of_their_shape() -> None:
    targets = [[6, 1], [7, 2], [8, 3]]
    datum = Datum(INPUT, {"weights": np.ones((3, 2)), "target_tokens": targets, "advantages": np.ones(3)})
    assert (
        datum.loss_fn_inputs["target_tokens"].tolist() == targets
        and datum.loss_fn_inputs["weights"].dtype == np.float32
    )
    with pytest.raises(DataError, match=r"'weights'.* holds a NaN at position 1$"):
        Datum(INPUT, {"target_tokens": targets, "weights": np.where(np.arange(6) == 3, np.nan, 0).reshape(3, 2)})


@pytest.mark.parametrize(
    ("key", "inputs"),
    [
        ("target_tokens", {"target_tokens": np.ones((4, 2))}),  # another length
        ("target_tokens", {"target_tokens": np.ones((3, 0))}),  # no candidate
        ("target_tokens", {"target_tokens": np.ones((3, 2, 1))}),
        ("weights", {"target_tokens": np.ones((3, 2)), "weights": np.ones((3, 4))}),  # another number of candidates
        ("weights", {"target_tokens": np.ones((3, 2)), "weights": np.ones((2, 3))}),
        ("weights", {"target_tokens": np.ones(3), "weights": np.ones((3, 2))}),  # soft weights of hard targets
        ("weights", {"weights": np.ones((3, 2))}),
    ],
)
def test_datum_names_the_soft_array_that_does_not_fit(key: str, inputs: dict[str, np.ndarray]) -> None:
    with pytest.raises(DataError) as raised:
        Datum(INPUT, inputs)
    message = str(raised.value)
    assert f"{key!r}" in message and str(inputs[key].shape) in message and "3 tokens" in message and "\n" not in message


@pytest.mark.parametrize("values", [[[1, 2], [3], [4]], ["a", "b", "c"], [None, 1, 2]])
def test_datum_names_the_array_that_holds_no_numbers(values: list) -> None:
    with pytest.raises(DataError, match=r"'target_tokens'.* is not an array of numbers"):
        Datum(INPUT, {"target_tokens": values})  # pyright: ignore[reportArgumentType]


def test_datum_names_the_array_and_position_of_a_nan() -> None:
    with pytest.raises(DataError, match=r"'logprobs'.*position 1"):
        Datum(INPUT, {"logprobs": np.array([0.0, np.nan, 0.0])})


def test_datum_needs_a_token() -> None:
    with pytest.raises(DataError, match="model_input is empty"):
        Datum(ModelInput(()), {})


def test_model_input_equals_and_hashes_by_content() -> None:
    same = ModelInput.from_ints(np.array([5, 6]).tolist()).append([7])
    assert same == INPUT and hash(same) == hash(INPUT) and same.length == 3 and same.to_ints() == [5, 6, 7]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
    ],
)
def test_sampling_params_name_the_setting_out_of_range(setting: str, value: float) -> None:
    with pytest.raises(DataError, match=setting):
        SamplingParams(**{"max_tokens": 8, setting: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, "inf", "nan", "1e-3", None, True])
@pytest.mark.parametrize("name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_adam_params_are_finite_numbers_in_range(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^AdamParams\.{name}={value}: must be "):
        AdamParams(**{name: value})


def test_adam_params_at_the_borders_of_their_ranges() -> None:
    AdamParams(learning_rate=0, beta1=0, beta2=np.float32(0.5), weight_decay=0, grad_clip_norm=0)
    for name, value in (("beta1", 1.0), ("beta2", 1.0), ("eps", 0.0)):
        with pytest.raises(ConfigError, match=name):
            AdamParams(**{name: value})
    params = AdamParams()
    params.learning_rate = float("nan")
    with pytest.raises(ConfigError, match=r"AdamParams\.learning_rate=nan"):
        params.check()
