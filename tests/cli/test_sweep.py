"""Sweeps: names of jobs."""

from cookbook.cli.sweep import LONGEST_NAME, job_name


def test_a_name_depends_on_the_settings_and_not_on_their_order_or_on_where_they_are_written():
    name = job_name(
        [
            "recipe=gsm8k_grpo",
            "seed=1",
            "optim.learning_rate=0.0003",
            "run_dir=here",
            "resume=auto",
            "+sweep=learning_rate",
        ]
    )
    assert name == "optim.learning_rate=0.0003,seed=1"
    assert name == job_name(["optim.learning_rate=0.0003", "seed=1", "recipe=gsm8k_grpo", "debug=true"])
    assert job_name(["recipe=gsm8k_grpo", "scale=gpu", "+scale/gsm8k_grpo=gpu"]) == "scale=gpu"


def test_names_are_single_short_folders_and_never_collide():
    long = [f"dataset.path=/data/{'x' * 300}/{split}" for split in ("a", "b")]
    names = [job_name([setting]) for setting in (*long, "dataset.path=a/b", "dataset.path=a_b", "dataset.path=a b")]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) <= LONGEST_NAME + 9 for name in names)
