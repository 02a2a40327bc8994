"""The tracker, its files and report, redaction, and the loggers."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import hydra
import matplotlib.image
import numpy as np
import pytest
import wandb
from omegaconf import OmegaConf

from cookbook.core.errors import CheckpointError, ConfigError
from cookbook.core.examples import Example, Message
from cookbook.core.rollouts import Metrics, RewardResult, Trajectory, TrajectoryGroup, Transition
from cookbook.tracking import TensorBoardLogger, Tracker, WandbLogger, redact
from cookbook.tracking.loggers import require_package
from cookbook.tracking.records import append_lines, cut

STEPS = 5
SCRIPT = "<script src='http://evil.example/x.js'></script>"
HOSTILE = SCRIPT + "<img src=x onerror=alert(1)> & [/bold] \x1b[31m \u2028 {braces} \ud800"


def group(step: int, text: str = "so it is", rewards: tuple[float, ...] = (1.0, 0.25)) -> TrajectoryGroup:
    prompt = Message(role="user", content=f"question {step} {text}")
    transitions = [
        Transition(
            (1, 2),
            (3, 4, 5),
            (-0.5, -0.25, -1.0),
            "eos",
            f"{text} #{index}",
            RewardResult(reward, "partial", {"format": reward / 2}),
        )
        for index, reward in enumerate(rewards)
    ]
    return TrajectoryGroup(
        Example(f"id-{step}", (prompt,), text), tuple(Trajectory((transition,)) for transition in transitions)
    )


def train(run_dir: Path, next_step: int = 0, stop_before: int = STEPS) -> Tracker:
    """The loop's order: evaluate when due, train, log."""
    tracker = Tracker(run_dir, {"seed": 1}, [], STEPS, next_step=next_step)
    if next_step == 0:
        tracker.log_evaluation("before", 0, {"accuracy": 0.5, "time/eval": 1.5})
    for step in range(next_step, stop_before):
        if step > 0 and step % 2 == 0:
            tracker.log_evaluation("step", step, {"accuracy": 0.5 + step / 30})
        tracker.log_rollouts(step, [group(step)])
        tracker.log(
            step,
            {
                "reward/mean": math.sin(step),
                "kl/sample_train": 1e-7 / (step + 1),
                "tokens/sampled": 6,
                "time/step": 0.1,
            },
        )
    return tracker


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_metrics_lines_are_exact_ordered_and_strict_json(tmp_path: Path):
    tracker = Tracker(tmp_path, {}, [], 1)
    value = 0.1 + 0.2
    metrics: Metrics = {"z": value, "a": np.float32(0.1), "tokens": np.int64(7), "nan": math.nan, "inf": -math.inf}  # type: ignore[dict-item]
    tracker.log(0, metrics)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert list(json.loads(text)) == ["step", "a", "inf", "nan", "tokens", "z"]
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert record["z"] == value and record["a"] == float(np.float32(0.1))
    assert record["tokens"] == 7 and isinstance(record["tokens"], int)
    assert record["nan"] is None and record["inf"] is None


def test_files_cut_after_a_kill_at_any_byte_continue_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # thousands of them would take most of a minute
    train(tmp_path / "whole", stop_before=3)
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    records = lines(tmp_path / "whole" / "metrics.jsonl")
    path = tmp_path / "metrics.jsonl"
    for length in range(len(whole) + 1):
        written = whole[:length]
        # the last checkpoint may be as late as the last complete training line, or earlier
        latest = sum("reward/mean" in json.loads(line) for line in written.split(b"\n")[:-1])
        for next_step in {latest, max(0, latest - 2)}:
            path.write_bytes(written)
            cut(path, next_step)
            append_lines(path, [record for record in records if record["step"] >= next_step])
            assert path.read_bytes() == whole


@pytest.mark.parametrize("next_step", [0, 1, 3])
def test_resumed_run_leaves_the_same_files(tmp_path: Path, next_step: int):
    train(tmp_path / "whole")
    train(tmp_path / "killed", stop_before=4)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (tmp_path / "killed" / name).open("ab") as file:
            file.write(b'{"step": 4, "rewa')
    (tmp_path / "killed" / "summary.json").write_text("{}")
    console_before = (tmp_path / "killed" / "console.log").read_text()

    train(tmp_path / "killed", next_step=next_step)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "killed" / "console.log").read_text().startswith(console_before)
    assert not (tmp_path / "killed" / "summary.json").exists(), "a run that goes on must not look ended"


@pytest.mark.parametrize("damage", ['{"step": 0, "rew', '{"reward/mean": 1.0}', "[]"])
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path: Path, damage: str):
    path = tmp_path / "metrics.jsonl"
    content = f'{{"step": 0}}\n{damage}\n{{"step": 1}}\n'
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: line 2 "):
        Tracker(tmp_path, {}, [], STEPS, next_step=1)
    assert path.read_text() == content


def test_rollout_lines_hold_the_trajectory(tmp_path: Path):
    tracker = Tracker(tmp_path, {}, [], 1)
    first = Transition((1,), (2, 3), (0.0, 0.0), "stop", "call", RewardResult(0.5, "partial", {"tool": 1.0}))
    second = Transition((1, 2, 3, 4), (5,), (0.0,), "length", "", RewardResult(math.nan, "error", {"tool": 2.0}))
    tracker.log_rollouts(
        3, [group(3, rewards=(0.25,)), TrajectoryGroup(group(3).example, (Trajectory((first, second)),))]
    )
    single, several = lines(tmp_path / "rollouts.jsonl")
    assert single == {
        "step": 3, "example": "id-3", "sample": 0,
        "prompt": "question 3 so it is", "answer": "so it is", "completion": "so it is #0",
        "reward": 0.25, "parts": {"format": 0.125}, "status": "partial", "stop_reason": "eos", "tokens": 3,
    }  # fmt: skip
    assert several["reward"] is None and several["status"] == "error" and several["stop_reason"] == "length"
    assert several["parts"] == {"tool": 3.0} and several["tokens"] == 3
    assert [turn["completion"] for turn in several["turns"]] == ["call", ""]


OWN_TAGS = "html head meta title style body h1 h2 table tr th td img p pre details summary"


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_end_of_run_leaves_summary_curves_and_a_harmless_report(tmp_path: Path):
    config = {"note": HOSTILE, HOSTILE: 1, "judge": {"api_key": "sk-do-not-show"}}
    tracker = Tracker(tmp_path, config, [], 2, headline=("reward/mean", "kl/x", HOSTILE))
    tracker.log_evaluation("before", 0, {"accuracy": 0.5})
    for step in range(2):
        tracker.log_rollouts(step, [group(step, HOSTILE, rewards=(0.125, 1.0, -3.0, 0.25, 0.5))])
        tracker.log(step, {"reward/mean": step})
    tracker.finish({"status": "completed", "recipe": HOSTILE, "eval": {"before": {"accuracy": np.float64(0.5)}}})

    assert json.loads((tmp_path / "summary.json").read_text())["eval"] == {"before": {"accuracy": 0.5}}
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["accuracy.png", "reward.png"]
    for name in ("accuracy.png", "reward.png"):
        image = matplotlib.image.imread(tmp_path / name)
        assert image.shape[:2] == (480, 840) and image.std() > 0.01

    page = Page((tmp_path / "report.html").read_text())
    assert {tag for tag, _ in page.tags} == {*OWN_TAGS.split()}, "a tag came from user text"
    assert all(str(attrs["src"]).startswith("data:image/png;base64,") for tag, attrs in page.tags if tag == "img")
    assert not any(name.startswith("on") or name == "href" for _, attrs in page.tags for name in attrs)
    assert page.text.count(SCRIPT) >= 10
    assert "sk-do-not-show" not in page.text
    shown = [index for index in range(5) if f"#{index}" in page.text]
    assert shown == [0, 1, 2, 4], "the two best (1, 4) and the two worst (0, 2) of the last step"
    assert "question 1 " in page.text and "question 0 " not in page.text
    assert not list(tmp_path.glob(".*.tmp"))


def test_supervised_run_has_its_own_curve_and_no_rollouts(tmp_path: Path):
    tracker = Tracker(tmp_path, {}, [], 2, headline=("nll/train", "eval/nll"))
    tracker.log(0, {"nll/train": 2.0})
    tracker.log_evaluation("after", 1, {"nll": 1.5})
    tracker.finish({"status": "completed"})
    assert [path.name for path in tmp_path.glob("*.png")] == ["nll.png"]
    assert "Rollouts" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("disk [full]"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_exception_ends_the_run_with_its_status(tmp_path: Path, error: BaseException, status: str):
    with pytest.raises(type(error)), train(tmp_path, stop_before=2):
        raise error
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"steps": 2, "status": status, "error": f"{type(error).__name__}: {error}"}


def test_fail_keeps_what_is_known_and_is_not_overwritten(tmp_path: Path):
    error = RuntimeError("no")
    with pytest.raises(RuntimeError), train(tmp_path, stop_before=2) as tracker:
        tracker.fail(error, {"status": "running", "recipe": "r", "steps": 7})
        raise error
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "steps": 7,
        "status": "failed",
        "recipe": "r",
        "error": "RuntimeError: no",
    }


def test_secrets_are_redacted_and_ordinary_keys_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "tml-0123456789")
    ordinary = {
        "max_tokens": 5,
        "tokens": [1],
        "tokenizer": "t",
        "eos_token": "</s>",
        "pad_token": "<p>",
        "key": "answer",
        "api_key": None,
    }
    assert redact(OmegaConf.create(ordinary)) == ordinary
    names = "api_key OPENAI_API_KEY hf_token token password client_secret accessToken Authorization secretKey"
    secret: dict[str, object] = {name: "a" for name in names.split()}
    secret |= {"private_key": {"nested": "a"}, "pass_phrase_credentials": ["a"], "auth": 1}
    assert set(redact(secret).values()) == {"***"}
    assert redact(
        {"a": [{"url": "https://me:pw@host/x?api_key=abc&n=1"}, "using tml-0123456789 now"], "n": (1, 2)}
    ) == {
        "a": [{"url": "https://***@host/x?api_key=***&n=1"}, "using *** now"],
        "n": [1, 2],
    }


def test_the_console_shows_the_run_in_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_PASSWORD", "hunter2hunter2")
    tracker = train(tmp_path, stop_before=1)
    tracker.say(f"{HOSTILE} {'long ' * 50}[bold]text[/bold] hunter2hunter2")
    tracker.log_evaluation("after", 5, {"accuracy": 0.75})
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == [
        "evaluation before training:  accuracy 0.5",
        "step 1/5  reward 0  kl/sample_train 1e-07  tokens/sampled 6  0.1 s",
    ]
    assert "evaluation after training:  accuracy 0.75\n" in out
    assert "\x1b" not in out and "\\x1b[31m" in out and "[bold]text[/bold] ***\n" in out
    assert (tmp_path / "console.log").read_text() == out


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_bar_that_goes_away_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with pytest.raises(ZeroDivisionError), train(tmp_path, stop_before=2) as tracker:
        tracker.say("naïve")
        raise ZeroDivisionError
    shown = terminal.getvalue()
    assert "2/5" in shown and "held-out accuracy 0.5" in shown and "na\\xefve" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is visible again"
    assert "naïve" in (tmp_path / "console.log").read_text()
    assert "2/5  " not in (tmp_path / "console.log").read_text().splitlines()[-1]


def test_every_logger_yaml_builds():
    names = {path.stem: path for path in (Path(__file__).parents[2] / "conf" / "logger").glob("*.yaml")}
    assert set(names) >= {"none", "wandb", "tensorboard", "trackio"}
    for path in names.values():
        logger = hydra.utils.instantiate(OmegaConf.load(path))
        for method in ("check", "start", "log", "finish"):
            assert callable(getattr(logger, method))


def test_a_missing_package_is_an_error_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "looks_installed").mkdir()  # as ./wandb does, the folder that W&B itself makes
    for package in ("not_there_at_all", "looks_installed"):
        with pytest.raises(ConfigError, match=r"is not installed; install it with: pip install -e '\.\[extra\]'"):
            require_package(package, "pip install -e '.[extra]'")


@pytest.fixture
def no_wandb_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No login; yields the path where the netrc file would be."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield tmp_path / "netrc"


def test_wandb_mode_follows_the_login(no_wandb_login: Path, monkeypatch: pytest.MonkeyPatch):
    assert WandbLogger("p").resolved_mode() == "offline"
    WandbLogger("p").check()
    with pytest.raises(ConfigError, match="wandb login"):
        WandbLogger("p", mode="online").check()
    with pytest.raises(ConfigError, match="auto, online or offline"):
        WandbLogger("p", mode="of").check()  # type: ignore[arg-type]
    no_wandb_login.write_text("machine other.example login user password x\n")
    assert WandbLogger("p").resolved_mode() == "offline"
    no_wandb_login.write_text("machine api.wandb.ai login user password x\n")
    assert WandbLogger("p").resolved_mode() == "online"
    WandbLogger("p", mode="online").check()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert WandbLogger("p").resolved_mode() == "offline"
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ConfigError, match="WANDB_MODE"):
        WandbLogger("p").check()
    monkeypatch.delenv("WANDB_MODE")
    no_wandb_login.write_text("machine\n")
    with pytest.raises(ConfigError, match="netrc"):
        WandbLogger("p").check()


def test_wandb_offline_run_is_written_and_continued(
    tmp_path: Path, no_wandb_login: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    run_dir = tmp_path / "run"
    files: list[Path] = []
    for next_step in (0, 1):
        tracker = Tracker(
            run_dir,
            {"seed": 3, "judge": {"api_key": "sk-do-not-show"}},
            [WandbLogger("cookbook")],
            2,
            next_step=next_step,
        )
        for step in range(next_step, 2):
            tracker.log(step, {"reward/mean": step + 1000.25})
        tracker.finish({"status": "completed", "cost_usd": 0.0})
        wandb.teardown()  # ends the background process that writes the file
        files += sorted({*run_dir.glob("wandb/offline-run-*/*.wandb")} - {*files})
    run_id = (run_dir / "wandb_run_id").read_text().strip()
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    assert "W&B: offline" in capsys.readouterr().out

    first, second = (path.read_bytes() for path in files)
    for content, values in ((first, (b"1000.25", b"1001.25")), (second, (b"1001.25",))):
        assert content.count(b"reward/mean") >= len(values) and all(value in content for value in values)
        assert b"sk-do-not-show" not in content and b"api_key" in content
    assert b"1000.25" not in second


def test_tensorboard_events_read_back_without_those_logged_again(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    TensorBoardLogger().check()
    for next_step, offset in ((0, 100.0), (1, 0.25)):
        tracker = Tracker(
            tmp_path, {"judge": {"api_key": "sk-do-not-show"}}, [TensorBoardLogger()], 3, next_step=next_step
        )
        for step in range(next_step, 3):
            tracker.log(step, {"reward/mean": step + offset})
        tracker.finish({"status": "completed"})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 100.0), (1, 1.25), (2, 2.25)]
    assert all(b"sk-do-not-show" not in path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
