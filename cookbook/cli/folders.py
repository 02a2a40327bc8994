"""The folders that options are read from: the shipped `conf/`, and the user's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cookbook.core.errors import ConfigError
from cookbook.core.suggest import did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
"""The package `cookbook`."""

CONF = next(folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir())
"""The shipped configuration: inside the package where it was installed from a wheel, beside it in a checkout."""

OWN = "conf"
"""A folder of this name in the working directory is used without being asked for."""

_own: list[Path] = []


def use(config_dirs: Sequence[str | Path] = ()) -> None:
    """Search these folders and `./conf`, besides the shipped one, from now on. Modules beside them become importable.

    Raises:
        ConfigError: a folder does not exist, or two folders hold different files of the same name.
    """
    _own.clear()
    found = [_existing(Path(folder)) for folder in config_dirs]
    if Path(OWN).is_dir():
        found.append(Path(OWN).resolve())
    for folder in found:
        if folder != CONF and folder not in _own:
            _check_names(folder)
            _own.append(folder)
    # At the end, so that no module of the user's comes before one of the cookbook's.
    for place in (str(Path.cwd()), *(str(folder.parent) for folder in _own)):
        if place not in sys.path:
            sys.path.append(place)


def every() -> list[Path]:
    """The shipped folder, and the user's own."""
    return [CONF, *_own]


def own() -> list[Path]:
    """The user's own folders."""
    return list(_own)


def search_override() -> list[str]:
    """The override that makes Hydra search the user's folders; nothing where there are none."""
    quoted = ['"file://{}"'.format(str(folder).replace('"', '\\"')) for folder in _own]
    return [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        parent = folder.absolute().parent
        siblings = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
        hint = did_you_mean(folder.name, siblings)
        raise ConfigError(
            f"--config-dir {folder}: there is no such folder{hint}; give the folder that holds your options"
        )
    return folder.resolve()


def _check_names(folder: Path) -> None:
    """Hydra would take the first of two files with the same name and never mention the other."""
    for file in sorted(folder.rglob("*.yaml")):
        for other in every():
            shipped = other / file.relative_to(folder)
            if shipped.is_file() and shipped.read_bytes() != file.read_bytes():
                raise ConfigError(f"{_shown(file)}: has the name of {_shown(shipped)}; rename yours")


def _shown(file: Path) -> str:
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
