import pytest

from cookbook.core.schedules import learning_rate_factor


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_factors(schedule, expected):
    assert [learning_rate_factor(schedule, step, 6, 2) for step in range(6)] == pytest.approx(expected)


def test_without_warmup_the_first_step_is_whole():
    assert learning_rate_factor("linear", 0, 10, 0) == 1.0
