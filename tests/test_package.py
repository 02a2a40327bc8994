"""What is installed: the wheel holds everything that a run reads, and an editable installation is the checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import cookbook
import recipes
import rewards
from tests.conftest import SMALL

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", folder, REPOSITORY], check=True, capture_output=True)
    [file] = folder.glob("*.whl")
    return file


def shipped(folder: str) -> set[str]:
    """The files below a folder of the checkout."""
    files = (path for path in (REPOSITORY / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(REPOSITORY).as_posix() for path in files}


def test_the_wheel_holds_the_packages_with_their_data_and_conf(wheel: Path):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = shipped("cookbook") | shipped("recipes") | shipped("rewards")
    assert {"cookbook/py.typed", "cookbook/assets/tiny/model.safetensors", "rewards/py.typed"} <= expected
    assert held == expected | {f"cookbook/{name}" for name in shipped("conf")}


@pytest.mark.slow
def test_the_wheel_runs_a_recipe_in_another_folder(wheel: Path, tmp_path: Path):
    """In a new environment, whose only link to this one is a path to the packages that the cookbook depends on."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # A folder that is named in a .pth file has its own .pth files ignored, so the checkout is not on the path.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*command: str | Path) -> str:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run(command, cwd=elsewhere, env=environ, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    program = "import cookbook, rewards; print(cookbook.__file__, rewards.__file__, sep='\\n')"
    assert all(Path(file).is_relative_to(site_packages) for file in run(python, "-c", program).splitlines())
    run(environment / "bin" / "cookbook", "run", "recipe=gsm8k_grpo", *SMALL, "run_dir=run")
    assert (elsewhere / "run" / "summary.json").exists()
    assert "gsm8k_grpo" in run(environment / "bin" / "cookbook", "help")


def test_what_is_imported_here_is_the_checkout():
    for package in (cookbook, recipes, rewards):
        assert Path(str(package.__file__)).parent.parent == REPOSITORY
    assert not (Path(sysconfig.get_path("purelib")) / "cookbook").exists()
