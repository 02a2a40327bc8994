"""From configuration to objects: the only module that calls Hydra's `instantiate`.

Every `_target_` is found, and its arguments and its kind are checked, before anything is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from cookbook.cli.fit import check_kind, check_kind_of_target
from cookbook.cli.targets import check_component, holds, locate
from cookbook.core.clients import Capabilities, ServiceClient
from cookbook.core.errors import ConfigError, CookbookError
from cookbook.core.kinds import Kinds
from cookbook.loops.common import CommonComponents
from cookbook.loops.config import Component, RunConfig

Loop = Callable[[RunConfig, Any], float | None]

COMPONENTS = ("backend", "dataset", "env", "reward", "loss", "advantage", "curriculum", "logger")

EVERY_LOOP = ("service", "logger")
"""Components that are not chosen for a loop."""


def build(config: RunConfig, shared_service: ServiceClient | None = None) -> tuple[Loop, CommonComponents]:
    """The loop of a run and the components it asks for. Cheap: a service loads no weights before its first client, and
    the run is checked against it first.

    A loop is a function `loop(config, components)`; the dataclass that annotates `components` names those it needs, as
    they are called in the configuration, and their kinds (`cookbook.core.kinds`). One whose default is None need not be
    chosen. A component that the loop does not use may not be chosen.

    Args:
        config: the run.
        shared_service: a running service to use instead of a new one of `config.backend`, as in a pipeline.

    Raises:
        ConfigError: a component is missing, not used or of a kind that the loop does not take, has an unknown or a
            missing argument, or its `_target_` does not import; a logger lacks a package or a login; two values
            contradict each other.
        CapabilityError: the backend cannot do what the run asks for.
        CookbookError: what a component itself raises, such as DataError for a dataset's broken line.
    """
    loop, components_type, kinds = _check_components(config)
    logger = _instantiate(config.logger, "logger")
    logger.check()
    service: ServiceClient = _instantiate(config.backend, "backend") if shared_service is None else shared_service
    try:
        config.check(service.capabilities)
        components: dict[str, Any] = {}
        for name, accepted in kinds.items():
            if (component := getattr(config, name)) is not None:
                components[name] = _instantiate(component, name)
                check_kind(components[name], accepted, name, config)
    except BaseException:
        if shared_service is None:
            service.stop()
        raise
    return loop, components_type(service=service, logger=logger, **components)


def check(config: RunConfig, capabilities: Capabilities) -> None:
    """All of the checks of `build` that make nothing.

    Raises:
        ConfigError, CapabilityError: as `build`.
    """
    _check_components(config)
    config.check(capabilities)


def _check_components(config: RunConfig) -> tuple[Loop, type[CommonComponents], dict[str, Kinds | None]]:
    """The loop, the type of its components, and for each component that it uses the kinds it takes."""
    target = config.loop._target_
    loop = locate(target, "loop")
    components_type = _components_type(loop, target)
    hints: dict[str, Any] = {}
    for parent in reversed(components_type.__mro__):
        hints |= inspect.get_annotations(parent, eval_str=True)
    kinds: dict[str, Kinds | None] = {}
    for field in fields(components_type):
        if field.name not in EVERY_LOOP:
            if field.default is MISSING and getattr(config, field.name) is None:
                raise ConfigError(f"{field.name}: {target} needs one; choose it with {field.name}=NAME")
            metadata = getattr(hints[field.name], "__metadata__", ())
            kinds[field.name] = next((entry for entry in metadata if isinstance(entry, Kinds)), None)
    for name in COMPONENTS:
        component = getattr(config, name)
        if component is not None and name not in ("backend", "logger", *kinds):
            raise ConfigError(f"{name}: {target} does not use one; remove {name}=...")
        if component is not None:
            check_component(component, name)
            if accepted := kinds.get(name):
                check_kind_of_target(component, accepted, name, config)
    if config.sandbox is not None and not any(holds(getattr(config, name), config.sandbox) for name in kinds):
        raise ConfigError("sandbox: nothing in this run runs programs; remove sandbox=..., or choose reward=code")
    return loop, components_type, kinds


def _components_type(loop: Loop, target: str) -> type[CommonComponents]:
    try:
        annotation = inspect.get_annotations(loop, eval_str=True).get("components")
    except NameError as error:
        raise ConfigError(f"loop._target_={target}: its annotations cannot be read: {error}") from error
    if not (isinstance(annotation, type) and issubclass(annotation, CommonComponents)):
        raise ConfigError(
            f"loop._target_={target}: must be a function of (config, components) whose components are annotated with a "
            "dataclass derived from cookbook.loops.common.CommonComponents"
        )
    return annotation


def _instantiate(component: Component, path: str) -> Any:
    try:
        return instantiate(component, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, CookbookError):
            raise cause from None
        reason = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        raise ConfigError(f"{path}: {component['_target_']} could not be made: {' '.join(reason.split())}") from error
