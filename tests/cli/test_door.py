"""The command `cookbook`: its subcommands, what they load, and completion in a shell."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cookbook.cli.completion import complete
from cookbook.cli.main import COMMANDS, main

HEAVY = {"torch", "transformers", "peft", "datasets", "tinker", "wandb", "matplotlib", "fastapi", "optuna"}
"""Packages that take long to import."""

ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    listed = capsys.readouterr().err
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == listed
    assert all(f"\n  {name} " in listed for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rum"], "rum: there is no such command (did you mean run?); there are run, serve, "),
        (["recipe=gsm8k_grpo", "seed=1"], "to train, use cookbook run recipe=gsm8k_grpo seed=1"),
        (["help", "gsm8k_grop"], "did you mean gsm8k_grpo?"),
        (["completion", "bahs"], "did you mean bash?"),
        (["completion"], "there are bash, zsh, fish"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    assert expected in captured.err and len(captured.err.splitlines()) == 1


def test_a_command_gets_its_arguments_and_gives_its_status(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "recipe=gsm8k_grp0"]) == 1
    assert "did you mean gsm8k_grpo?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["help"], "usage: cookbook COMMAND"),
        (["help", "gsm8k_grpo"], "recipe=gsm8k_grpo"),
        (["help", "dataset"], "word_problems"),
        (["help", "run"], "recipe=NAME"),
        (["run", "--help"], "recipe=NAME"),
        (["serve", "--help"], "--port"),
        (["--version"], "cookbook "),
        (["completion", "bash"], "complete "),
    ],
    ids=" ".join,
)
def test_what_only_tells_something_loads_nothing_heavy(arguments: list[str], expected: str):
    program = (
        "import json, sys\n"
        "from cookbook.__main__ import main\n"
        f"try: status = main({arguments!r})\n"
        "except SystemExit as end: status = end.code\n"
        "print(json.dumps([status, sorted({name.partition('.')[0] for name in sys.modules})]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *told, last = ran.stdout.splitlines()
    status, loaded = json.loads(last)
    assert status == 0, ran.stderr
    assert expected in "\n".join(told)
    assert HEAVY & {*loaded} == set()


def test_output_that_nobody_reads_any_more_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run([sys.executable, "-m", "cookbook", "help"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, b"")


@pytest.mark.parametrize("module", ["cookbook", "cookbook.run", "cookbook.serve"])
def test_modules_run_as_programs(module: str, tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("usage: ") and ran.stderr == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cookbook ", {*COMMANDS}),
        ("cookbook ser", {"serve"}),
        ("cookbook run recipe=gsm8k_gr", {"recipe=gsm8k_grpo", "recipe=gsm8k_grpo/gpu", "recipe=gsm8k_grpo/paper"}),
        ("cookbook run recipe=gsm8k_grpo optim.learning", {"optim.learning_rate="}),
        ("cookbook run recipe=gsm8k_grpo loop.group", {"loop.groups_per_batch=", "loop.group_size="}),
        ("cookbook run recipe=gsm8k_grpo dataset=word_problems dataset.train_s", {"dataset.train_size="}),
        ("cookbook run recipe=chat_sft loop.group", set()),
        ("cookbook run recipe=gsm8k_grpo se", {"seed="}),
        ("cookbook run recipe=gsm8k_grpo opt", {"optim."}),
        ("cookbook run recipe=gsm8k_grpo resume=", {"resume=auto", "resume=never"}),
        ("cookbook run recipe=gsm8k_grpo +swe", {"+sweep="}),
        ("cookbook run recipe=gsm8k_grpo +sweep=learn", {"+sweep=learning_rate"}),
        ("cookbook run recipe=gsm8k_grpo --mul", {"--multirun"}),
        ("cookbook run recipe=nonsense loop.", set()),
        ("cookbook serve --state-dir ru", set()),
        ("cookbook help pref", {"preference_dpo", "preference_kto"}),
        ("cookbook completion f", {"fish"}),
    ],
)
def test_completion(line: str, expected: set[str]):
    assert {*complete(line)} == expected


def test_completion_in_bash(tmp_path: Path):
    """Keys as a user presses them, in a terminal: a tab, then the completed line is echoed."""
    lines = {
        "ser": "cookbook serve",
        "run recipe=chat_s": "cookbook run recipe=chat_sft",
        "run recipe=gsm8k_grpo loop.group_s": "cookbook run recipe=gsm8k_grpo loop.group_size=",
    }
    to_line_start, tab = "\x01", "\t"
    keys = ['eval "$(cookbook completion bash)"\n']
    keys += [f"cookbook {typed}{tab}{to_line_start}echo '<'\x05'>'\n" for typed in lines]
    terminal, inside = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        cwd=tmp_path,
        env={**ENVIRONMENT, "TERM": "dumb", "COLUMNS": "500"},
        start_new_session=True,
    )
    os.close(inside)
    os.write(terminal, "".join([*keys, "exit\n"]).encode())
    printed = b""
    try:
        while chunk := os.read(terminal, 4096):
            printed += chunk
    except OSError:  # how Linux says that the shell has ended
        pass
    finally:
        os.close(terminal)
    assert shell.wait() == 0
    for expected in lines.values():
        assert f"\n<{expected}>" in printed.decode().replace("\r", ""), printed.decode()
