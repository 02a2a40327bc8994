"""The configuration that a run leaves, `config.yaml`: written, read, and used as a recipe to run or resume it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from cookbook.cli.options import OVERRIDE, chosen, option_file, options
from cookbook.core.errors import CheckpointError, ConfigError
from cookbook.loops.config import RunConfig
from cookbook.tracking import redact
from cookbook.tracking.checkpoints import CONFIG_FILE
from cookbook.tracking.records import REDACTED, write_atomically

OF_THE_RUN = ("run_dir", "resume", "debug", "choices")
"""Settings that belong to one run of a recipe, not to the recipe."""

REFERENCE = re.compile(r"\$\{([\w.]+)\}")

RUN_DIR = "${run_dir}"


def write_config(config: RunConfig) -> None:
    """Write `config.yaml`: the resolved configuration without secrets. Paths in the run directory refer to it as
    `${run_dir}`, so that they stay true when it is moved.

    Raises:
        CheckpointError: it cannot be written.
    """
    values = redact(asdict(config))
    portable = {key: value if key == "run_dir" else _portable(value, config.run_dir) for key, value in values.items()}
    text = yaml.safe_dump(portable, sort_keys=False, allow_unicode=True)
    write_atomically(Path(config.run_dir) / CONFIG_FILE, text.encode())


def read_config(file: Path) -> dict[str, Any]:
    """A `config.yaml`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror}); restore it or choose another run_dir"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file}: is not YAML ({' '.join(str(error).split())}); restore it or choose another run_dir"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("recipe"), str):
        raise CheckpointError(f"{file}: is not the configuration of a run; restore it or choose another run_dir")
    return values


def compared(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with dotted keys, without secrets and without the place of the run's folder, to compare two."""
    return _flatten(_portable(redact(values), str(values.get("run_dir"))))


def with_saved_recipe(overrides: Sequence[str]) -> list[str]:
    """Overrides in which `recipe=PATH/config.yaml`, or `resume=DIR` without a recipe, stands for what that run did.

    The other overrides change it as they change any recipe.

    Raises:
        CheckpointError: the file is missing or damaged.
        ConfigError: it holds a value that was redacted.
    """
    recipe, resume = chosen(overrides, "recipe"), chosen(overrides, "resume")
    if recipe is None and resume not in (None, "never", "auto"):
        file = Path(str(resume), CONFIG_FILE)
        if not file.is_file():
            raise CheckpointError(
                f"resume={resume}: is not a run; give never, auto, or a folder with the {CONFIG_FILE} of a run"
            )
    elif recipe is not None and recipe.endswith((".yaml", ".yml")):
        file = Path(recipe)
    else:
        return list(overrides)
    others = [override for override in overrides if not override.startswith("recipe=")]
    return [f"recipe={_as_recipe(file, others)}", *others]


def _as_recipe(file: Path, overrides: Sequence[str]) -> str:
    """Make the configuration of a run known to Hydra as a recipe; returns its name.

    A group that an override chooses anew is left out of it.
    """
    values = read_config(file)
    keys = {match["key"] for match in map(OVERRIDE.fullmatch, overrides) if match}
    groups = {field.name for field in fields(RunConfig)} - {"recipe"}
    choices = {group: option for group, option in values.get("choices", {}).items() if group in groups}
    body = {key: _literal(value) for key, value in values.items() if key not in OF_THE_RUN and value is not None}
    for group, option in choices.items():
        if group in keys:
            body.pop(group, None)
        elif isinstance(body.get(group), dict) and option in options(group):
            body[group] = _with_references(body[group], group, option, values)
    redacted = [key for key, value in _flatten(body).items() if value == REDACTED and key not in keys]
    if redacted:
        raise ConfigError(f"{file}: {redacted[0]} was not saved, because it is a secret; add {redacted[0]}=VALUE")
    defaults = [{f"override /{group}": option} for group, option in choices.items()]
    name = f"{values['recipe'].replace('/', '-')}-saved"
    ConfigStore.instance().store(group="recipe", name=name, node={"defaults": defaults, **body}, package="_global_")
    return name


def _with_references(section: Mapping[str, Any], group: str, option: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values without those that its option takes from elsewhere in the configuration, unless they differ."""
    shipped = yaml.safe_load(option_file(group, option).read_text(encoding="utf-8")) or {}
    flat = _flatten(values)
    return {
        key: value
        for key, value in section.items()
        if not (
            isinstance(written := shipped.get(key), str)
            and (match := REFERENCE.fullmatch(written))
            and value == values.get(match[1], flat.get(match[1]))
        )
    }


def _literal(value: Any) -> Any:
    """Texts so that no reference is read into them, but that to the run directory."""
    if isinstance(value, Mapping):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    if isinstance(value, str) and not value.startswith(RUN_DIR):
        return value.replace("${", r"\${")
    return value


def _portable(value: Any, run_dir: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _portable(inner, run_dir) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(inner, run_dir) for inner in value]
    if isinstance(value, str) and (value == run_dir or value.startswith(f"{run_dir}/")):
        return RUN_DIR + value.removeprefix(run_dir)
    return value


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
