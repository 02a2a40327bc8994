"""Hydra's errors in one line, with the closest name that would have been right."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cookbook.cli import hydra_api
from cookbook.cli.options import OVERRIDE, groups, option_file, options
from cookbook.core.errors import ConfigError
from cookbook.core.suggest import did_you_mean

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""What Hydra raises for a configuration that does not compose."""

PLUGINS = "; joblib and optuna come with pip install 'post-training-cookbook[sweep]'"


def explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """What went wrong while a configuration was composed from `overrides`: one of COMPOSITION_ERRORS, for the user."""
    text = " ".join(str(error).split())
    cause = error.__cause__
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override}: cannot be read as key=value; quote a value with spaces or brackets: 'key=\"a (b)\"'"
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


def check_groups(overrides: Sequence[str]) -> None:
    """Raises ConfigError for `group=null`, which Hydra does not understand."""
    for override in overrides:
        match = OVERRIDE.fullmatch(override)
        if match and match["value"] in ("null", "") and (names := options(match["key"])):
            raise ConfigError(f"{override}: choose one of {', '.join(names)}")


def _missing_option(error: MissingConfigException, text: str) -> ConfigError:
    missing = str(error.missing_cfg_file)
    group = max((name for name in groups() if missing.startswith(f"{name}/")), key=len, default="")
    group, option = (group, missing.removeprefix(f"{group}/")) if group else missing.rpartition("/")[::2]
    if not group:
        return ConfigError(text)
    names = options(group) or sorted(error.options or [])
    place = re.match(r"In '([^']+)'", text)
    where = f" (named in {place[1]})" if place and place[1] != "config" else ""
    hint = did_you_mean(option, names)
    install = PLUGINS if group.startswith("hydra/") else ""
    return ConfigError(
        f"{group}={option}: there is no such {group}{where}{hint}; there are {', '.join(names)}{install}"
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
    return list(yaml.safe_load(option_file(group, option).read_text(encoding="utf-8")) or {})


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """All dotted keys of the configuration that the group choices among `overrides` make, for suggestions."""
    choices = [
        override
        for override in overrides
        if (match := OVERRIDE.fullmatch(override)) and match["value"] in options(match["key"])
    ]
    try:
        composed = OmegaConf.to_container(hydra_api.compose(choices))
    except COMPOSITION_ERRORS:
        return list(groups())
    assert isinstance(composed, dict)
    return [key for key in _dotted(composed) if not key.startswith("hydra")]


def _dotted(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _dotted(value, f"{prefix}{key}.")


def _first_line(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "")
