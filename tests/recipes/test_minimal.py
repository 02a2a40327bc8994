"""The two flat examples run, learn, and stay short enough to read in five minutes."""

from pathlib import Path

from recipes import minimal_grpo, minimal_sft


def test_minimal_grpo_raises_accuracy(capsys):
    arguments = ["--steps", "3", "--problems", "16", "--samples", "4", "--eval-examples", "40", "--max-tokens", "64"]
    accuracy = minimal_grpo.main(minimal_grpo.parser.parse_args(arguments))
    assert accuracy["after"] >= accuracy["before"] + 0.15
    assert "step  3/3" in capsys.readouterr().out


def test_minimal_sft_lowers_the_held_out_loss():
    loss = minimal_sft.main(
        minimal_sft.parser.parse_args(["--steps", "6", "--batch-size", "16", "--eval-examples", "16"])
    )
    assert loss["after"] < 0.7 * loss["before"]


def test_the_grpo_example_is_at_most_150_lines():
    assert len(Path(minimal_grpo.__file__).read_text().splitlines()) <= 150
