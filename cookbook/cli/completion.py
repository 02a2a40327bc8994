"""Shell completion: `eval "$(cookbook completion bash)"`. Completes subcommands, groups, their options, and keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from cookbook.cli import flags, folders, options
from cookbook.cli.main import COMMANDS
from cookbook.core.errors import CookbookError
from cookbook.core.suggest import did_you_mean

SCRIPTS = {
    # Bash splits words at = and :, and replaces only what follows the last of them.
    "bash": """\
_cookbook() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
    local word="${line##*[[:space:]]}"
    local done="${word%"${word##*[=:@]}"}" found
    COMPREPLY=()
    for found in $(cookbook completion query "$line" 2>/dev/null); do COMPREPLY+=("${found#"$done"}"); done
}
complete -o nospace -o default -F _cookbook cookbook""",
    "zsh": """\
_cookbook() {
    local -a found
    found=("${(@f)$(cookbook completion query "${BUFFER[1,CURSOR]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -S '' -- $found; else _files; fi
}
compdef _cookbook cookbook""",
    "fish": "complete -c cookbook -a '(cookbook completion query (commandline -cp) 2>/dev/null)'",
}

VALUES = {"resume": ("auto", "never"), "debug": ("false", "true")}
"""Settings outside the groups that take one of a few values."""


def main(arguments: Sequence[str]) -> int:
    """Print the script for a shell. Exit status 2 where there is no such shell."""
    match arguments:
        case ["query", line]:  # what the scripts call
            print("\n".join(complete(line)))
            return 0
        case [shell] if shell in SCRIPTS:
            print(SCRIPTS[shell])
            return 0
    hint = did_you_mean(arguments[0], SCRIPTS) if arguments else ""
    print(
        f"error: cookbook completion: needs the name of a shell{hint}; there are {', '.join(SCRIPTS)}", file=sys.stderr
    )
    return 2


def complete(line: str) -> list[str]:
    """The words that may replace the last word of a command line, sorted. Nothing where anything may stand.

    Args:
        line: the command line up to the cursor, with the name of the program. A space at its end begins a new word.
    """
    before, word = line.split()[1:], ""
    if before and not line[-1].isspace():
        word = before.pop()
    match before:
        case []:
            found = [*COMMANDS]
        case ["completion"]:
            found = [*SCRIPTS]
        case ["run", *overrides]:
            found = _run_words(overrides, word)
        case ["help"]:
            found = [*COMMANDS, *options.groups(), *options.recipes()]
        case _:
            found = []
    return sorted({candidate for candidate in found if candidate.startswith(word)})


def _run_words(overrides: Sequence[str], word: str) -> list[str]:
    if word.startswith("-"):
        return [*flags.FLAGS]
    overrides = [override.strip("'\"") for override in overrides]
    try:
        folders.use([override for flag, override in pairwise(overrides) if flag == "--config-dir"])
    except CookbookError:
        folders.use()
    groups = options.groups()
    key, equals, _ = word.partition("=")
    name = key.lstrip("+")
    if equals:
        return [f"{key}={value}" for value in (groups.get(name) or VALUES.get(name) or ())]
    return [
        *(f"{'+' if group == 'sweep' else ''}{group}=" for group in groups),
        *_keys(overrides, name.rpartition(".")[0]),
    ]


def _keys(overrides: Sequence[str], parent: str) -> list[str]:
    """The keys below `parent` in the configuration that the chosen options make: `name=`, or `name.` for a section."""
    from cookbook.cli.compose import compose_run  # loads Hydra

    try:
        values: Any = asdict(compose_run([override for override in overrides if _chooses(override)]))
    except CookbookError:
        return []
    for key in filter(None, parent.split(".")):
        values = values.get(key) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        return []
    prefix = f"{parent}." if parent else ""
    return [f"{prefix}{key}{'.' if isinstance(value, dict) else '='}" for key, value in values.items() if key[0] != "_"]


def _chooses(override: str) -> bool:
    key, _, value = override.lstrip("+").partition("=")
    return value in options.groups().get(key, [])
