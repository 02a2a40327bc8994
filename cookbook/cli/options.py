"""The groups of the configuration and their options, found by name: the shipped ones and the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cookbook.cli import folders

BASE_SIZE = "laptop"
"""The size of a recipe's own file. Its other sizes are the files in the folder of its name."""

OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[^=@]+)(?P<package>@[^=]*)?=(?P<value>.*)", re.DOTALL)


def groups() -> dict[str, list[str]]:
    """Every group and its options, both sorted. Hydra's own groups are not among them."""
    names = {path.name for folder in folders.every() for path in folder.iterdir() if path.is_dir()}
    found = {name: options(name) for name in sorted(names) if name != "hydra"}
    return {name: names for name, names in found.items() if names}


def options(group: str) -> list[str]:
    """The options of a group, sorted; those in folders of the group are named "folder/option".

    Files in folders whose names begin with an underscore are parts of options.
    """
    roots = [folder / group for folder in folders.every()]
    files = [file.relative_to(root).with_suffix("") for root in roots for file in root.rglob("*.yaml")]
    return sorted({file.as_posix() for file in files if not any(part.startswith("_") for part in file.parts)})


def option_file(group: str, option: str) -> Path:
    """The file of an option that exists."""
    return next(file for folder in folders.every() if (file := folder / group / f"{option}.yaml").is_file())


def summary_line(group: str, option: str) -> str:
    """The first comment of an option's file, up to its first sentence end."""
    lines = option_file(group, option).read_text(encoding="utf-8").splitlines()
    comment = next((line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")), "")
    return re.split(r"(?<!\bal)\.(?: |$)", comment)[0].rstrip(":")


def recipes() -> list[str]:
    """The recipes, each at the size of its own file."""
    return [option for option in options("recipe") if "/" not in option]


def sizes(recipe: str) -> list[str]:
    """A recipe, of whatever size, at all of its sizes: `["gsm8k_grpo", "gsm8k_grpo/gpu", ...]`."""
    base = recipe.split("/")[0]
    return [option for option in options("recipe") if option == base or option.startswith(f"{base}/")]


def size_name(recipe: str) -> str:
    return recipe.partition("/")[2] or BASE_SIZE


def chosen(overrides: Iterable[str], key: str) -> str | None:
    """The value of `key=value` among overrides (the last one counts), None where there is none."""
    values = [match["value"] for match in map(OVERRIDE.fullmatch, overrides) if match and match["key"] == key]
    return values[-1] if values else None
