"""Unmodified recipes of the published tinker-cookbook on the session server, offline, with the bundled `tiny` model.

    python benchmarks/tinker_recipes.py --python CLIENT/bin/python [--only NAME ...] [--work DIR] [--learning-steps N]

CLIENT is a separate environment: python -m venv CLIENT; CLIENT/bin/pip install 'tinker-cookbook[math-rl]==0.6.1'

The recipes find models and data by relative path, so they run in a folder made for them. It has the tokenizer of tiny
under two model names that tinker-cookbook knows, and a few generated rows under the names of the data sets. The server
serves tiny under these model names.

Every recipe must end with status 0 and log as many steps as requested. `learning`, a longer `math_rl`, must also raise
its reward. Exit status 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.backends.base_models import base_model_source
from cookbook.data.generated.word_problems import WordProblems

REPOSITORY = Path(__file__).resolve().parent.parent
CHAT_MODEL, BASE_MODEL = "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B-Base"
"""To tinker-cookbook these are a ChatML model, which stops at a token, and a base model, which stops at a text."""

SPELLING = {
    "<|user|>": "<|im_start|>user\n",
    "<|assistant|>": "<|im_start|>assistant\n",
    "<|end|>": "<|im_end|>",
    "####": "\\boxed",
}
"""New texts for some of tiny's tokens, with the same ids: turns become ChatML, and `#### 28` becomes `\\boxed 28`."""

AVERAGED_STEPS = 5
"""How many of the first and of the last rewards are averaged."""

MIN_RISE = 0.1

LEARNING = "learning"


@dataclass(frozen=True)
class Recipe:
    """A run of one module of tinker_cookbook.recipes; `metric` is the metric of its log to show."""

    name: str
    module: str
    settings: dict[str, object]
    steps: int
    metric: str
    log: str = ""
    """Folder of the log, if it is not the name."""

    @property
    def log_path(self) -> str:
        return f"logs/{self.log or self.name}"

    def command(self, python: str) -> list[str]:
        settings = {**self.settings, "log_path": self.log_path}
        return [
            python,
            "-m",
            f"tinker_cookbook.recipes.{self.module}",
            *(f"{key}={value}" for key, value in settings.items()),
        ]


@dataclass(frozen=True)
class Outcome:
    recipe: Recipe
    status: int
    seconds: float
    values: list[float]
    """The metric of every step."""

    @property
    def problem(self) -> str | None:
        if self.status != 0:
            return f"ended with status {self.status}"
        if len(self.values) != self.recipe.steps:
            return f"logged {len(self.values)} steps of {self.recipe.steps}"
        return None


def recipes(learning_steps: int) -> list[Recipe]:
    small = {"lora_rank": 8, "learning_rate": 1e-3, "save_every": 2}
    on_policy = {"max_steps": 3, "loss_fn": "importance_sampling"}
    chat_sl = {**small, "model_name": CHAT_MODEL, "dataset": "no_robots", "batch_size": 4}
    dpo = {"model_name": BASE_MODEL, "dataset": "hhh", "batch_size": 4, "learning_rate": 1e-3}
    rl_loop = {**small, **on_policy, "model_name": CHAT_MODEL, "batch_size": 4, "group_size": 4, "max_tokens": 48}
    math_rl = {**small, **on_policy, "group_size": 4, "groups_per_batch": 4}
    arithmetic = {"model_name": BASE_MODEL, "env": "arithmetic", "max_tokens": 12}
    ppo = {"model_name": CHAT_MODEL, "env": "gsm8k", "loss_fn": "ppo", "max_tokens": 48, "eval_every": 2}
    longer = {
        "model_name": CHAT_MODEL,
        "env": "polaris",
        "max_tokens": 48,
        "groups_per_batch": 24,
        "group_size": 8,
        "learning_rate": 3e-3,
    }
    longer |= {"max_steps": learning_steps, "save_every": 0, "lora_rank": 32}
    nll, reward, rewards = "train_mean_nll", "reward/total", "env/all/reward/total"
    return [
        Recipe("sl_loop", "sl_loop", {**small, "model_name": CHAT_MODEL, "batch_size": 4}, 3, nll),
        Recipe("chat_sl", "chat_sl.train", {**chat_sl, "eval_every": 1}, 3, nll),
        # The same log and one more epoch: it continues from the last checkpoint, with the optimizer.
        Recipe(
            "resume",
            "chat_sl.train",
            {**chat_sl, "num_epochs": 2, "behavior_if_log_dir_exists": "resume"},
            6,
            nll,
            log="chat_sl",
        ),
        Recipe("dpo", "preference.dpo.train", dpo, 3, "dpo_loss"),
        Recipe("rl_loop", "rl_loop", rl_loop, 3, reward),
        Recipe("arithmetic", "math_rl.train", {**math_rl, **arithmetic}, 3, rewards),
        Recipe("gsm8k_ppo", "math_rl.train", {**math_rl, **ppo}, 3, rewards),
        # This environment puts no example before the question: tiny cannot copy numbers in longer contexts.
        Recipe(LEARNING, "math_rl.train", {**math_rl, **longer}, learning_steps, rewards),
    ]


def prepare(work: Path) -> None:
    """Fill the folder in which the recipes run."""
    source = Path(base_model_source("tiny"))
    for name in (CHAT_MODEL, BASE_MODEL):
        folder = work / name
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.jinja", "README.md"))
        if name == CHAT_MODEL:
            _respell(folder)

    chats = [_chat(f"Say {number}.", str(number)) for number in range(12)]
    _write_rows(work / "HuggingFaceH4/no_robots/train.jsonl", chats)
    _write_rows(work / "HuggingFaceH4/no_robots/test.jsonl", chats[:2])

    sides = (("chosen", 0), ("rejected", 1))
    pairs = [{side: f"\n\nHuman: 5 + {a}?\n\nAssistant: {5 + a + error}" for side, error in sides} for a in range(14)]
    _write_rows(work / "Anthropic/hh-rlhf/train.jsonl", pairs[:12])
    _write_rows(work / "Anthropic/hh-rlhf/test.jsonl", pairs[12:])

    problems = WordProblems(train_size=2000).train
    polaris = [{"problem": example.messages[0]["content"], "answer": example.answer} for example in problems]
    _write_rows(work / "POLARIS-Project/Polaris-Dataset-53K/train.jsonl", polaris)
    # The example that the recipes put before these questions has the answer 3. Tiny repeats it, so some samples earn a
    # reward.
    rows = [{"question": e.messages[0]["content"], "answer": e.extra["solution"]} for e in problems if e.answer == "3"]
    _write_rows(work / "openai/gsm8k/train.jsonl", rows[4:])
    _write_rows(work / "openai/gsm8k/test.jsonl", rows[:4])
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (work / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")


def _respell(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) not in SPELLING]
    # Added tokens match exactly, and `lstrip` includes the line break that ChatML has between turns.
    flags = {"single_word": False, "rstrip": False, "normalized": False}
    kept = [token for token in added if token["content"] not in SPELLING]
    respelled = [
        {
            "id": model["vocab"].pop(old),
            "content": new,
            "lstrip": "im_start" in new,
            "special": new != SPELLING["####"],
            **flags,
        }
        for old, new in SPELLING.items()
    ]
    model["vocab"] |= {token["content"]: token["id"] for token in respelled}
    tokenizer["added_tokens"] = sorted(kept + respelled, key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["eos_token"] = SPELLING[config["eos_token"]]
    config["extra_special_tokens"] = [SPELLING.get(token, token) for token in config["extra_special_tokens"]]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def server(work: Path) -> Iterator[str]:
    """The URL of a `python -m cookbook.serve` that serves tiny under both names; its log is `server.log`."""
    models = [argument for name in (CHAT_MODEL, BASE_MODEL) for argument in ("--base-model", f"{name}=tiny")]
    command = [sys.executable, "-m", "cookbook.serve", "--port", "0", "--state-dir", str(work / "state"), *models]
    log = work / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY)
    try:
        while (found := re.search(r" at (http://\S+) ", log.read_text())) is None:
            if process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def run(recipe: Recipe, python: str, work: Path, url: str, timeout_s: float) -> Outcome:
    """Run a recipe; its output is `<name>.log`."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any", "TINKER_TELEMETRY": "0"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command, log = recipe.command(python), work / f"{recipe.name}.log"
    print("$", *command, flush=True)
    start = time.perf_counter()
    with log.open("w") as output:
        try:
            status = subprocess.run(
                command, cwd=work, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124  # as with timeout(1)
    outcome = Outcome(
        recipe, status, time.perf_counter() - start, _logged(work / recipe.log_path / "metrics.jsonl", recipe.metric)
    )
    if outcome.problem is not None:
        print(f"{recipe.name} {outcome.problem}; the end of {log}:\n{log.read_text()[-3000:]}", flush=True)
    return outcome


def _logged(metrics: Path, name: str) -> list[float]:
    if not metrics.exists():
        return []
    return [row[name] for row in map(json.loads, metrics.open()) if name in row]


def rise(values: Sequence[float]) -> float:
    """The difference between the means over the last and the first `AVERAGED_STEPS` steps."""
    return statistics.mean(values[-AVERAGED_STEPS:]) - statistics.mean(values[:AVERAGED_STEPS])


def check_client(python: str) -> None:
    """Raises SystemExit, which says what to install."""
    if shutil.which(python) is None:
        raise SystemExit(f"--python {python}: is not a program")
    probe = subprocess.run(
        [python, "-c", "import tinker_cookbook.recipes.math_rl.math_grading; print(tinker_cookbook.__version__)"],
        capture_output=True,
        text=True,
    )
    if probe.returncode != 0:
        raise SystemExit(
            f"{python} has no tinker-cookbook with the extra math-rl: make an environment (python -m venv CLIENT; "
            "CLIENT/bin/pip install 'tinker-cookbook[math-rl]==0.6.1') and use --python CLIENT/bin/python\n"
            f"{probe.stderr[-500:]}"
        )
    print(f"tinker-cookbook {probe.stdout.strip()}")


def report(outcomes: Sequence[Outcome]) -> bool:
    """Print the table. Whether every recipe succeeded."""
    succeeded = True
    print(f"{'recipe':16} {'status':>6} {'seconds':>7} {'steps':>5}  metric, first to last")
    for outcome in outcomes:
        recipe, values = outcome.recipe, outcome.values
        shown = f"{recipe.metric} {values[0]:.3f} to {values[-1]:.3f}" if values else recipe.metric
        numbers = f"{outcome.status:6} {outcome.seconds:7.1f} {len(values):5}"
        print(f"{recipe.name:16} {numbers}  {shown} {outcome.problem or ''}")
        succeeded &= outcome.problem is None
        if recipe.name == LEARNING and values:
            print("reward of every step:", *(f"{value:.2f}" for value in values))
            print(f"the mean of {AVERAGED_STEPS} rose by {rise(values):.3f}; at least {MIN_RISE} is required")
            succeeded &= rise(values) >= MIN_RISE
    return succeeded


def main(argv: Sequence[str] | None = None) -> int:
    names = [recipe.name for recipe in recipes(1)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment with tinker-cookbook")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"recipes to run, of {', '.join(names)}"
    )
    parser.add_argument("--work", type=Path, help="a new folder, which is kept (default: a temporary one)")
    parser.add_argument("--learning-steps", type=int, default=20)
    parser.add_argument("--timeout-s", type=float, default=600, help="time limit of a recipe")
    args = parser.parse_args(argv)
    check_client(args.python)
    args.python = os.path.abspath(shutil.which(args.python) or args.python)  # the recipes run in another folder
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary) / "work").resolve()
        work.mkdir(parents=True)
        prepare(work)
        chosen = [recipe for recipe in recipes(args.learning_steps) if recipe.name in args.only]
        with server(work) as url:
            outcomes = [run(recipe, args.python, work, url, args.timeout_s) for recipe in chosen]
    return 0 if report(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
