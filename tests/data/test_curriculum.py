"""Curricula: what is chosen after which rewards, and that a saved one continues exactly."""

import json
from collections.abc import Callable, Sequence

import pytest

from cookbook.core.errors import ConfigError, CookbookError, DataError
from cookbook.core.examples import Example
from cookbook.data.curriculum import Curriculum, CurriculumMaker, Difficulty, InOrder, RewardDriven, Shuffled
from cookbook.data.generated.word_problems import WordProblems
from cookbook.data.order import order_index


def examples(*steps: int | str | None) -> list[Example]:
    return [
        Example(f"made/{index}", (), "", {} if value is None else {"steps": value}) for index, value in enumerate(steps)
    ]


TWELVE = examples(*[1 + index % 3 for index in range(12)])


def study(curriculum: Curriculum, counts: Sequence[int], reward: Callable[[int], float]) -> list[int]:
    """Choose and record; returns all that was chosen. Groups are of two, both with the same reward."""
    drawn = []
    for count in counts:
        indices = curriculum.choose(count)
        assert len(indices) == count
        curriculum.record(indices, [[reward(index)] * 2 for index in indices])
        drawn += indices
    return drawn


def test_shuffled_draws_what_the_loops_have_always_drawn():
    curriculum = Shuffled()(TWELVE, 3)
    indices = [index for count in (5, 5, 5, 1, 4, 20) for index in curriculum.choose(count)]
    assert indices == [order_index(position, len(TWELVE), 3) for position in range(40)]


def test_in_order_follows_the_dataset():
    curriculum = InOrder()(TWELVE, 3)
    assert curriculum.choose(5) + curriculum.choose(9) == [*range(12), 0, 1]


def test_difficulty_opens_a_bucket_after_so_many_groups():
    problems = WordProblems(train_size=300).train
    curriculum = Difficulty(open_after=40)(problems, 0)
    easiest, easy, all_open = (study(curriculum, [20, 20], lambda index: 0.0) for _ in range(3))
    steps = [{problems[index].extra["steps"] for index in drawn} for drawn in (easiest, easy, all_open)]
    assert steps == [{1}, {1, 2}, {1, 2, 3}]
    assert len(set(easiest)) == 40  # a shuffle: none comes twice before all have come
    assert curriculum.metrics() == {"curriculum/buckets_open": 3, "curriculum/buckets": 3}


def test_difficulty_opens_a_bucket_when_the_open_ones_go_well():
    curriculum = Difficulty(open_after=None, open_at=0.5, window=4)(TWELVE, 0)
    study(curriculum, [4] * 10, lambda index: 0.4)
    assert curriculum.metrics()["curriculum/buckets_open"] == 1
    study(curriculum, [2], lambda index: 0.6)  # the window holds two old ones: 0.5
    assert curriculum.metrics()["curriculum/buckets_open"] == 2
    study(curriculum, [3], lambda index: 1.0)  # three are no full window
    assert curriculum.metrics()["curriculum/buckets_open"] == 2
    curriculum.record([0], [[]])  # nothing was graded, nothing is known
    assert curriculum.metrics()["curriculum/buckets_open"] == 2
    study(curriculum, [1], lambda index: 1.0)
    assert curriculum.metrics()["curriculum/buckets_open"] == 3


def test_difficulty_sorts_texts_by_length_into_equal_buckets():
    curriculum = Difficulty(buckets=3, open_after=3)(examples("ccc", "a", "eeeee", "dddd", "bb", "ffffff"), 0)
    assert set(study(curriculum, [4], lambda index: 0.0)) == {1, 4}
    assert set(study(curriculum, [4], lambda index: 0.0)) == {1, 4, 0, 3}


def test_solved_problems_are_dropped_and_hopeless_ones_postponed():
    curriculum = RewardDriven(visits=2, postpone=10)(TWELVE, 0)

    def reward(index: int) -> float:
        return {0: 1.0, 1: 0.0}.get(index, 0.5)

    study(curriculum, [6] * 4, reward)  # two visits of each
    assert curriculum.metrics() == {"curriculum/solved": 1, "curriculum/postponed": 1, "curriculum/restarts": 0}
    assert not {0, 1} & {*study(curriculum, [5, 5], reward)}
    later = study(curriculum, [5] * 4, reward)
    assert 1 in later and 0 not in later
    assert curriculum.metrics()["curriculum/restarts"] == 0


def test_a_problem_is_judged_by_its_last_visits_only():
    curriculum = RewardDriven(visits=2, solved=0.9)(TWELVE, 0)
    curriculum.record([0, 0], [[0.0, 1.0], [1.0, 1.0]])
    assert curriculum.metrics()["curriculum/solved"] == 0
    curriculum.record([0], [[]])
    assert curriculum.metrics()["curriculum/solved"] == 0
    curriculum.record([0], [[1.0, 1.0]])
    assert curriculum.metrics()["curriculum/solved"] == 1


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.5])
def test_reward_driven_never_starves_and_repeats_nothing_within_a_step(reward: float):
    curriculum = RewardDriven(visits=1, postpone=1000)(TWELVE, 0)
    for _ in range(12):
        indices = curriculum.choose(5)
        assert len(set(indices)) == 5
        curriculum.record(indices, [[reward, reward]] * 5)
    # 60 draws of 12 problems; solved ones start afresh whenever fewer than 5 are left, hopeless ones only come back.
    assert (curriculum.metrics()["curriculum/restarts"] > 3) == (reward == 1.0)
    everything = curriculum.choose(30)  # more than there are
    assert {everything.count(index) for index in range(12)} <= {2, 3}


def test_the_postponed_come_back_before_the_solved():
    curriculum = RewardDriven(visits=1, postpone=1000)(TWELVE, 0)
    study(curriculum, [12], lambda index: float(index < 6))
    assert {*curriculum.choose(4)} <= {*range(6, 12)}
    assert curriculum.metrics() == {"curriculum/solved": 6, "curriculum/postponed": 0, "curriculum/restarts": 0}
    assert {*curriculum.choose(8)} >= {*range(6, 12)}
    assert curriculum.metrics()["curriculum/restarts"] == 1


MAKERS = [
    InOrder(),
    Shuffled(),
    Difficulty(open_after=7),
    Difficulty(open_at=0.3, window=3),
    RewardDriven(visits=1, postpone=9),
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: type(make).__name__)
def test_a_restored_curriculum_goes_on_as_the_saved_one_would_have(make: CurriculumMaker):
    def reward(index: int) -> float:
        return index % 4 / 3

    for saved_at in range(8):
        original, restored = make(TWELVE, 5), make(TWELVE, 5)
        study(original, [3, 2] * saved_at, reward)
        state = original.state()
        text = json.dumps(state)
        rest = study(original, [3, 2] * 8, reward)
        assert json.dumps(state) == text  # a state is a copy
        restored.restore(json.loads(text))
        assert study(restored, [3, 2] * 8, reward) == rest
        assert (restored.state(), restored.metrics()) == (original.state(), original.metrics())


@pytest.mark.parametrize(
    "make", [maker for maker in MAKERS if not isinstance(maker, InOrder)], ids=lambda make: type(make).__name__
)
def test_the_seed_decides(make: CurriculumMaker):
    assert make(TWELVE, 0).choose(4) != make(TWELVE, 1).choose(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: Difficulty(buckets=0), "curriculum.buckets=0"),
        (lambda: Difficulty(open_after=0), "curriculum.open_after=0"),
        (lambda: Difficulty(window=0), "curriculum.window=0"),
        (lambda: Difficulty(open_after=None), "only the first bucket would ever open"),
        (lambda: RewardDriven(visits=0), "curriculum.visits=0"),
        (lambda: RewardDriven(postpone=0), "curriculum.postpone=0"),
        (lambda: RewardDriven(solved=0.5, hopeless=0.5), "hopeless must be below solved"),
        (lambda: Difficulty(buckets=13)(TWELVE, 0), "curriculum.buckets=13: there are only 12"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        settings()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Difficulty()(examples(1, None), 0), "curriculum.key=steps: made/1 has None there"),
        (lambda: Difficulty(key="stepps")(examples(1), 0), "choose one of its keys: steps"),
        *[(lambda maker=maker: maker([], 0), "no training examples") for maker in MAKERS],
    ],
)
def test_unsuitable_data_are_refused_in_one_line(make: Callable[[], object], message: str):
    with pytest.raises(CookbookError, match=message) as raised:
        make()
    assert isinstance(raised.value, DataError) and "\n" not in str(raised.value)
