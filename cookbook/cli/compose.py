"""From overrides to the typed configuration of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from cookbook.cli import hydra_api
from cookbook.cli.explain import COMPOSITION_ERRORS, check_groups, explain
from cookbook.cli.saved import with_saved_recipe
from cookbook.cli.schema import register_schemas
from cookbook.core.errors import ConfigError
from cookbook.core.suggest import did_you_mean
from cookbook.core.types import check_adam
from cookbook.loops.config import RunConfig


def compose_run(overrides: Sequence[str]) -> RunConfig:
    """The run that `overrides` describe, as on the command line, from within a program.

    Raises:
        ConfigError: what is wrong with them.
    """
    register_schemas()
    check_groups(overrides)
    overrides = with_saved_recipe(overrides)
    try:
        config = hydra_api.compose(overrides)
    except COMPOSITION_ERRORS as error:
        raise explain(error, overrides) from error
    choices = dict(config.hydra.runtime.choices)
    with read_write(config), open_dict(config):
        del config["hydra"]
        if OmegaConf.is_interpolation(config, "recipe"):  # from Hydra's own part; a saved recipe has its name
            config.recipe = choices["recipe"]
    return to_run_config(config, choices)


def to_run_config(config: DictConfig, choices: Mapping[str, str | None]) -> RunConfig:
    """The typed configuration, interpolations resolved.

    Args:
        config: as Hydra composed it, without its own part.
        choices: the option chosen in each group.

    Raises:
        ConfigError: a value is missing or does not resolve, or a key that `+` added is not in the schema.
    """
    _check_fields(config, "")
    try:
        check_adam({name: config.optim[name] for name in config.optim}, "optim.")
        run = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise explain(error, []) from error
    assert isinstance(run, RunConfig)
    run.choices = {group: option for group, option in choices.items() if option and "/" not in group}
    run.choices["recipe"] = run.recipe
    return run


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
        is_value = not OmegaConf.is_missing(config, key) and not OmegaConf.is_interpolation(config, key)
        if is_value and OmegaConf.is_dict(config[key]):
            _check_fields(config[key], f"{prefix}{key}.")
