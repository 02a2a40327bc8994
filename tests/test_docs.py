"""The documentation: links lead somewhere, the environment of the page runs, and the glossary explains every metric."""

import json
import re
import sys
from pathlib import Path

import pytest

from cookbook.cli import folders
from tests.conftest import SMALL, CommandLine

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/README.md")])
PREFERENCE = ("backend=fake", "loop.steps=2", "loop.batch_size=2", "eval.examples=2")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    files = [link.partition("#")[0] for link in links if "://" not in link]
    assert [file for file in files if file and not (page.parent / file).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_the_project_exist(page: Path):
    named = re.findall(r"`((?:cookbook|tests|benchmarks)/[\w./]+\.py)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_environment_of_the_page_runs_two_turns(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class TwoAttempts" in block)
    option = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert option is not None
    (tmp_path / "two_attempts.py").write_text(code)
    (tmp_path / "conf" / "env").mkdir(parents=True)
    (tmp_path / "conf" / "env" / "two_attempts.yaml").write_text(option[1])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        ran = cli("recipe=gsm8k_grpo", "env=two_attempts", *SMALL, "model.renderer=default", "run_dir=run")
    finally:
        sys.modules.pop("two_attempts", None)
        folders.use()
    assert ran.status == 0, ran.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    turns = [line["rollout/turns_per_trajectory"] for line in lines if "rollout/turns_per_trajectory" in line]
    assert turns == [2, 2]  # the fake model never answers correctly


@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=gsm8k_grpo", *SMALL, "loop.dynamic_sampling_rounds=1", "loop.importance_cap=2", "eval.every=1"),
        ("recipe=gsm8k_ppo", *SMALL, "loop.kl_penalty_coef=0.1"),
        ("recipe=chat_sft", *PREFERENCE),
        ("recipe=preference_dpo", *PREFERENCE),
        ("recipe=preference_kto", *PREFERENCE),
    ],
    ids=lambda overrides: overrides[0],
)
def test_the_glossary_explains_every_metric(overrides: tuple[str, ...], cli: CommandLine, tmp_path: Path):
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./<>]+)`", page))
    # "`reward/correct`, `partial`" names reward/partial too.
    named |= {
        f"{first.rpartition('/')[0]}/{other}"
        for first, rest in re.findall(r"`([\w/]+/\w+)`((?:, `\w+`)+)", page)
        for other in re.findall(r"`(\w+)`", rest)
    }
    ran = cli(*overrides, "model.renderer=default", "run_dir=run")
    assert ran.status == 0, ran.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = {key.removeprefix("eval/") for line in lines for key in line} - {"step", "examples"}
    families = ("train/", "reward/part/")
    stems = {name.removeprefix("eval/").removesuffix("/train") for name in named}
    unexplained = {key for key in keys if key.removesuffix("/train") not in stems and not key.startswith(families)}
    assert unexplained == set()
