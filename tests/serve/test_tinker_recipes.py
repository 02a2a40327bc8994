"""Unmodified recipes of tinker-cookbook on the server. They need an environment: see `benchmarks/tinker_recipes.py`."""

import os
from pathlib import Path

import pytest

from benchmarks import tinker_recipes

PYTHON = os.environ.get("TINKER_COOKBOOK_PYTHON", "")
"""The interpreter of an environment with tinker-cookbook."""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="TINKER_COOKBOOK_PYTHON does not name an interpreter with tinker-cookbook")
@pytest.mark.parametrize("name", ["sl_loop", "rl_loop"])
def test_a_recipe_runs_unmodified(tmp_path: Path, name: str) -> None:
    assert tinker_recipes.main(["--python", PYTHON, "--work", str(tmp_path / "work"), "--only", name]) == 0


def test_a_client_without_the_package_is_told_what_to_install() -> None:
    with pytest.raises(SystemExit, match=r"pip install 'tinker-cookbook\[math-rl\]"):
        tinker_recipes.check_client("/bin/false")


def test_a_recipe_that_stops_early_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tinker_recipes.recipes(20)[-1]
    risen, flat = [0.1] * 10 + [0.4] * 10, [0.2] * 20
    assert tinker_recipes.report([tinker_recipes.Outcome(recipe, 0, 1.0, risen)])
    for status, values in ((1, risen), (0, risen[1:]), (0, flat)):
        assert not tinker_recipes.report([tinker_recipes.Outcome(recipe, status, 1.0, values)])
