"""Around Hydra: which groups and options there are, what a scale adds to a command line, and its errors in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cookbook.core.errors import ConfigError
from cookbook.core.suggest import did_you_mean
from cookbook.loops.config import RunConfig, register_schemas

CONF = next(folder / "conf" for folder in Path(__file__).resolve().parents[1:3] if (folder / "conf").is_dir())
"""The shipped configuration: cookbook/conf in a wheel, conf/ beside the package in a checkout, which is edited in place."""

BASE_SCALE = "laptop"
"""The scale whose values are the recipe's own file."""

OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[^=@]+)(?P<package>@[^=]*)?=(?P<value>.*)", re.DOTALL)


def groups() -> dict[str, list[str]]:
    """Every group of conf/ and its options, both sorted."""
    folders = sorted(path for path in CONF.iterdir() if path.is_dir())
    return {folder.name: options(folder.name) for folder in folders}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def summary_line(group: str, option: str) -> str:
    """The first comment of an option's file, up to its first sentence end."""
    lines = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    comment = next((line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")), "")
    return re.split(r"(?<=\.) |(?<=\.)$", comment)[0].rstrip(".:")


def scales(recipe: str) -> list[str]:
    """The scales that a recipe has, its own file's first."""
    return [BASE_SCALE, *options(f"scale/{recipe}")]


def chosen(overrides: Iterable[str], key: str) -> str | None:
    """The value of `key=value` among overrides (the last one counts), None where there is none."""
    values = [match["value"] for match in map(OVERRIDE.fullmatch, overrides) if match and match["key"] == key]
    return values[-1] if values else None


def scale_override(overrides: Sequence[str]) -> list[str]:
    """The override that brings in the recipe's values for the scale asked for: conf/scale/<recipe>/<scale>.yaml.

    It cannot be done in the defaults list: Hydra lets no file override groups whose name is interpolated.

    Raises:
        ConfigError: the recipe has no such scale, or several scales are asked for at once.
    """
    recipe, scale = chosen(overrides, "recipe"), chosen(overrides, "scale")
    if scale is None or scale == BASE_SCALE or recipe not in options("recipe"):
        if scale is not None and scale != BASE_SCALE and recipe is not None and "," in recipe:
            raise ConfigError(
                f"scale={scale} with recipe={recipe}: a scale is one recipe's; run the command once for each recipe"
            )
        return []
    if "," in scale:
        raise ConfigError(f"scale={scale}: a sweep runs at one scale; run the command once for each")
    if scale not in scales(recipe):
        raise ConfigError(
            f"scale={scale}: recipe {recipe} has {', '.join(scales(recipe))}{did_you_mean(scale, scales(recipe))}"
        )
    return [f"+scale/{recipe}={scale}"]


def check_groups(overrides: Sequence[str]) -> None:
    """Raises ConfigError for `group=null`, which Hydra does not understand."""
    for group, names in groups().items():
        if chosen(overrides, group) in ("null", ""):
            raise ConfigError(f"{group}={chosen(overrides, group)}: choose one of {', '.join(names)}")


def explain(error: HydraException | OmegaConfBaseException | yaml.YAMLError, overrides: Sequence[str]) -> ConfigError:
    """What went wrong while a configuration was composed, in one line with the closest name that would have been right."""
    text = " ".join(str(error).split())
    cause = error.__cause__
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override}: cannot be read as key=value; quote a value with spaces or brackets, as in 'key=\"a (b)\"'"
        )
    if isinstance(error, MissingConfigException):
        return _missing_option(error, text)
    if match := re.search(r"You must specify '([^']+)'", text):
        group = match[1]
        return ConfigError(f"{group} is missing: add {group}=NAME; there are {', '.join(options(group))}")
    if match := re.search(r"Ambiguous value for argument '(.+?)' 1\.", text):
        key, _, values = match[1].partition("=")
        return ConfigError(
            f"{match[1]}: has several values; add -m to run once with each, or write '{key}=[{values}]' for a list"
        )
    if (match := re.search(r"Could not override '([^']+)'", text)) and "Did you mean to override" not in text:
        return _unknown_key(match[1], overrides)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return ConfigError(f"{error.problem_mark.name}:{error.problem_mark.line + 1}: is not YAML: {error.problem}")
    if match := re.match(r"Error merging override (.+)", text):
        return ConfigError(f"{match[1]}: {_first_line(cause)}")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{error.full_key}: is missing; set {error.full_key}=VALUE")
    detail = error if isinstance(error, OmegaConfBaseException) else cause
    if isinstance(detail, OmegaConfBaseException):
        context = f" ({text})" if text and detail is not error else ""
        return ConfigError(f"{detail.full_key or 'configuration'}: {_first_line(detail)}{context}")
    return ConfigError(text)


def _missing_option(error: MissingConfigException, text: str) -> ConfigError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return ConfigError(text)
    names = sorted(name for name in error.options or [] if not name.endswith("_schema"))
    place = re.match(r"In '([^']+)'", text)
    where = f" (named in {place[1]})" if place and place[1] != "config" else ""
    return ConfigError(
        f"{group}={option}: there is no such {group}{where}{did_you_mean(option, names)}; there are {', '.join(names)}"
    )


def _unknown_key(key: str, overrides: Sequence[str]) -> ConfigError:
    if key in groups():
        return ConfigError(
            f"{key}=...: nothing is chosen there by default; write +{key}=NAME; there are {', '.join(options(key))}"
        )
    keys = _known_keys(overrides)
    parent, _, name = key.rpartition(".")
    siblings = sorted(
        known.rpartition(".")[2]
        for known in keys
        if known.rpartition(".")[0] == parent and not known.endswith("_target_")
    )
    if parent and siblings:
        owners = [option for option in options(parent) if name in _top_level_keys(parent, option)]
        elsewhere = f"; {name} is one of {', '.join(f'{parent}={owner}' for owner in owners)}" if owners else ""
        close = "" if owners else did_you_mean(key, [f"{parent}.{sibling}" for sibling in siblings])
        return ConfigError(f"{key}: there is no such setting{close}; {parent} has {', '.join(siblings)}{elsewhere}")
    same_name = [known for known in keys if known.rpartition(".")[2] == name]
    hint = f" (did you mean {same_name[0]}?)" if same_name else did_you_mean(key, keys)
    return ConfigError(f"{key}: there is no such setting{hint}")


def _top_level_keys(group: str, option: str) -> list[str]:
    return list(yaml.safe_load((CONF / group / f"{option}.yaml").read_text(encoding="utf-8")) or {})


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """All dotted keys of the configuration that the group choices among `overrides` make, for suggestions."""
    choices = [
        override
        for override in overrides
        if (match := OVERRIDE.fullmatch(override)) and match["value"] in options(match["key"])
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            config = compose("config", choices)
        except ConfigCompositionException:
            return list(groups())
    return list(_dotted(OmegaConf.to_container(config)))


def _dotted(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _dotted(value, f"{prefix}{key}.")


def _first_line(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "")


def to_object(config: DictConfig) -> Any:
    """The typed configuration, interpolations resolved.

    Raises:
        ConfigError: a value is missing or does not resolve, or a key that `+` added is not in the schema.
    """
    _check_fields(config, "")
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise explain(error, []) from error


def compose_recipe(recipe: str, scale: str, chosen_groups: Mapping[str, str], settings: Mapping[str, Any]) -> RunConfig:
    """The configuration of a recipe from within a program: options of groups, and values nested as in the configuration.

    Raises:
        ConfigError: what is wrong with it, as on the command line.
    """
    overrides = [
        f"recipe={recipe}",
        f"scale={scale}",
        *(f"{group}={option}" for group, option in chosen_groups.items()),
    ]
    overrides += [f"{key}={json.dumps(value)}" for key, value in _leaves(settings)]
    overrides += scale_override(overrides)
    register_schemas()
    try:
        in_hydra = GlobalHydra.instance().is_initialized()  # as inside a run; then conf/ is set already
        with nullcontext() if in_hydra else initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", overrides)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise explain(error, overrides) from error
    config.recipe, config.run_dir = recipe, ""  # otherwise those of the command line
    return to_object(config)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_fields(config: DictConfig, prefix: str) -> None:
    schema = OmegaConf.get_type(config)
    if not is_dataclass(schema):
        return
    names = [field.name for field in fields(schema)]
    for key in map(str, config):
        if key not in names:
            raise ConfigError(
                f"{prefix}{key}: there is no such setting{did_you_mean(key, names)}; there are {', '.join(names)}"
            )
        if (
            not OmegaConf.is_missing(config, key)
            and not OmegaConf.is_interpolation(config, key)
            and OmegaConf.is_dict(config[key])
        ):
            _check_fields(config[key], f"{prefix}{key}.")
