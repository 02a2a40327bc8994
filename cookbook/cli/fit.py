"""Whether a component is of a kind that the loop takes: see `cookbook.core.kinds`."""

from __future__ import annotations

import inspect
from typing import Any

import yaml

from cookbook.cli.options import option_file, options
from cookbook.cli.targets import locate
from cookbook.core.errors import ConfigError
from cookbook.core.kinds import DATASET_KINDS, Kinds
from cookbook.loops.config import Component, RunConfig

DEFAULT_KINDS = {"loss": "custom", "advantage": "group"}
"""Kinds of components that do not say theirs. A dataset that does not is judged by its first row."""

WORDS = {
    "loss": {
        "builtin": "a built-in loss",
        "custom": "a custom loss",
        "pairs": "a loss on pairs",
        "labelled": "a loss on labelled completions",
    },
    "advantage": {
        "group": "an advantage from rewards of a group",
        "returns": "an advantage from returns",
        "critic": "an advantage from a critic",
    },
}


def check_kind_of_target(component: Component, accepted: Kinds, name: str, config: RunConfig) -> None:
    """Check what is known before a component is made. Raises ConfigError if the loop takes another kind."""
    _check(_kind_of_target(component, name), accepted, name, config)


def check_kind(made: Any, accepted: Kinds | None, name: str, config: RunConfig) -> None:
    """Check a component that was made. Raises ConfigError if the loop takes another kind."""
    if accepted is not None:
        _check(_own_kind(made) or _kind_of_rows(made, name) or DEFAULT_KINDS.get(name), accepted, name, config)


def _own_kind(component: Any) -> str | None:
    kind = getattr(component, "kind", None)
    return kind if isinstance(kind, str) else None


def _kind_of_target(component: Component, name: str) -> str | None:
    """The kind that the class says; None where only what it makes can tell: a function that makes a component."""
    target = locate(component["_target_"], name)
    if kind := _own_kind(target):
        return kind
    is_made_of = inspect.isclass(target) or component.get("_partial_")
    return DEFAULT_KINDS.get(name) if is_made_of else None


def _kind_of_rows(made: Any, name: str) -> str | None:
    if name != "dataset" or not len(made.train):
        return None
    classes = {parent.__name__ for parent in type(made.train[0]).__mro__}
    return next((kind for kind, row in DATASET_KINDS.items() if row in classes), None)


def _check(kind: str | None, accepted: Kinds, name: str, config: RunConfig) -> None:
    if kind is None or kind in accepted.accepted:
        return
    option = config.choices.get(name)
    chosen = f"{name}={option}" if option else f"{name}._target_={getattr(config, name)['_target_']}"
    loop = f"recipe {config.recipe} ({config.loop._target_.rpartition('.')[0]})"
    if name == "dataset":
        text = f"{chosen}: holds {kind}, but {loop} trains on {' or '.join(accepted.accepted)}"
    else:
        words = WORDS.get(name, {})
        wanted = " or ".join(words.get(other, other) for other in accepted.accepted)
        text = f"{chosen}: is {words.get(kind, kind)}, but {loop} takes {wanted}"
    fitting = _fitting_options(accepted, name)
    raise ConfigError(f"{text}; choose one of {', '.join(fitting)}" if fitting else text)


def _fitting_options(accepted: Kinds, name: str) -> list[str]:
    """The options of a group that are of an accepted kind, without those that do not import or do not say theirs."""
    fitting: list[str] = []
    for option in options(name):
        component = yaml.safe_load(option_file(name, option).read_text(encoding="utf-8"))
        if isinstance(component, dict) and "_target_" in component:
            try:
                kind = _kind_of_target(component, name)
            except ConfigError:
                continue
            if kind in accepted.accepted:
                fitting.append(option)
    return fitting
