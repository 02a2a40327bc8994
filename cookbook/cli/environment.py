"""Where a run was started, for the record: `environment.json` with command line, commit, versions and host."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from cookbook.cli.folders import PACKAGE
from cookbook.cli.options import OVERRIDE
from cookbook.loops.config import RunConfig
from cookbook.tracking import redact
from cookbook.tracking.records import REDACTED, write_atomically

ENVIRONMENT_FILE = "environment.json"

DISTRIBUTION = "post-training-cookbook"

GIT_ANSWER_S = 5.0

_command: list[str] = []


def write_environment(config: RunConfig) -> None:
    """Record this process in the run's folder; earlier ones of the same run move to `earlier`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    file = Path(config.run_dir) / ENVIRONMENT_FILE
    before = _read(file)
    earlier = [*before.pop("earlier", []), before] if before else []
    record = {**describe(config), **({"earlier": earlier} if earlier else {})}
    write_atomically(file, (json.dumps(record, indent=2) + "\n").encode())


def describe(config: RunConfig) -> dict[str, Any]:
    """This process. Secrets of the configuration do not appear in its command line."""
    return {
        "command": command_line(config),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "commit": {name: commit for name, folder in _checkouts() if (commit := _commit(folder))},
        "packages": dict(sorted(_versions())),
    }


def remember(arguments: Sequence[str]) -> None:
    """Note the arguments of the command line, which Hydra replaces in `sys.argv`."""
    _command[:] = [sys.argv[0], *arguments]


def command_line(config: RunConfig) -> list[str]:
    """The command line of this process, without secrets."""
    values = asdict(config)
    secrets = sorted(_secrets(values, redact(values)), key=len, reverse=True)
    return [_without(argument, secrets) for argument in _command or sys.orig_argv]


def _without(argument: str, secrets: list[str]) -> str:
    if match := OVERRIDE.fullmatch(argument):
        key = match["key"].rpartition(".")[2]
        if redact({key: match["value"]}) == {key: REDACTED}:
            return f"{match['sign']}{match['key']}={REDACTED}"
    for secret in secrets:
        argument = argument.replace(secret, REDACTED)
    return redact(argument)


def _secrets(values: Any, redacted: Any) -> Iterator[str]:
    """The texts that a redacted copy of the values does not have."""
    if redacted == REDACTED and isinstance(values, str) and values:
        yield values
    elif isinstance(values, Mapping) and isinstance(redacted, Mapping):
        for key, value in values.items():
            yield from _secrets(value, redacted.get(str(key)))


def _checkouts() -> Iterator[tuple[str, Path]]:
    """The folders whose commit tells which code ran: the cookbook's own, and the working directory."""
    if (PACKAGE.parent / ".git").exists():
        yield "cookbook", PACKAGE.parent
    yield "working_directory", Path.cwd()


def _commit(folder: Path) -> str | None:
    """The commit of a checkout, with `-dirty` where files differ from it; None where there is none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_ANSWER_S, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _versions() -> Iterator[tuple[str, str]]:
    """The versions of the cookbook and of what it requires, as far as it is installed."""
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in requires(DISTRIBUTION) or ()}
    for name in (DISTRIBUTION, *names):
        try:
            yield name, version(name)
        except PackageNotFoundError:  # of an extra
            continue


def _read(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
