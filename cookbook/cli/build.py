"""From configuration to objects: the only module that calls Hydra's `instantiate`.

Every `_target_` is found, and its keyword arguments are held against its signature, before anything is made.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from cookbook.core.clients import ServiceClient
from cookbook.core.errors import ConfigError, CookbookError
from cookbook.core.suggest import did_you_mean
from cookbook.loops.config import Component, RunConfig, validate

if TYPE_CHECKING:
    from cookbook.loops.common import CommonParts

Loop = Callable[[RunConfig, Any], None]

COMPONENTS = ("backend", "dataset", "env", "reward", "loss", "advantage", "curriculum", "logger")

HYDRA_KEYS = frozenset({"_target_", "_args_", "_partial_", "_convert_", "_recursive_"})

SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
"""Annotations that a value is checked against before its target is called, and what fits them."""


def build(config: RunConfig, shared_service: ServiceClient | None = None) -> tuple[Loop, CommonParts]:
    """The loop of a run and the parts it asks for. Cheap: a service loads no weights before its first client, and it is
    validated against first.

    A loop is a function `loop(config, parts)`; the dataclass that annotates `parts` names the components it needs, as they
    are called in the configuration. A component that the loop has no use for may not be chosen.

    Args:
        config: the run.
        shared_service: a running service to use instead of a new one of `config.backend`, as the stages of a pipeline do.

    Raises:
        ConfigError: a component is missing or not used, has an unknown or a missing argument, or its `_target_` does not import;
            a logger lacks a package or a login; two values of the run contradict one another.
        CapabilityError: the backend cannot do what the run asks for.
        CookbookError: what a component itself raises, such as DataError for a dataset's broken line.
    """
    loop = locate(config.loop._target_, "loop")
    parts_type = get_type_hints(loop)["parts"]
    needed = [field.name for field in fields(parts_type) if field.name not in ("service", "logger")]
    for name in COMPONENTS:
        component = getattr(config, name)
        if component is None and name in needed:
            raise ConfigError(f"{name}: {config.loop._target_} needs one; choose it with {name}=NAME")
        if component is not None and name not in ("backend", "logger", *needed):
            raise ConfigError(f"{name}: {config.loop._target_} has no use for it; leave {name}=... away")
        if component is not None:
            check_component(component, name)
    if config.sandbox is not None and not any(_holds(getattr(config, name), config.sandbox) for name in needed):
        raise ConfigError("sandbox: nothing in this run runs programs; leave sandbox=... away, or choose reward=code")

    logger = _instantiate(config.logger, "logger")
    logger.check()
    service: ServiceClient = _instantiate(config.backend, "backend") if shared_service is None else shared_service
    try:
        validate(config, service.capabilities)
        components = {name: _instantiate(getattr(config, name), name) for name in needed}
    except BaseException:
        if shared_service is None:
            service.stop()
        raise
    return loop, parts_type(service=service, logger=logger, **components)


def check_component(component: Component, path: str) -> None:
    """Hold a component, and those inside it, against the signature of its `_target_`.

    Args:
        component: a mapping with `_target_`.
        path: where it stands in the configuration, for messages.

    Raises:
        ConfigError: there is no `_target_`, it does not import, or an argument is unknown or missing.
    """
    if "_target_" not in component:
        raise ConfigError(
            f"{path}: has no _target_, so nothing can be made of it; choose an option of the group or add {path}._target_"
        )
    target = locate(component["_target_"], path)
    arguments = {key: value for key, value in component.items() if key not in HYDRA_KEYS}
    _check_arguments(component, inspect.signature(target), arguments, path)
    for inner_path, inner in _nested_components(arguments, path):
        check_component(inner, inner_path)


def _check_arguments(
    component: Component, signature: inspect.Signature, arguments: Mapping[str, Any], path: str
) -> None:
    target, parameters = component["_target_"], signature.parameters
    named = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key, value in arguments.items():
        if key not in named and not takes_any:
            hint = did_you_mean(key, named)
            raise ConfigError(
                f"{path}.{key}: {target} has no argument {key}{hint}; it takes {', '.join(named) or 'none'}"
            )
        if key in named and not _fits(value, parameters[key].annotation):
            raise ConfigError(f"{path}.{key}={value}: must be of type {_type_name(parameters[key].annotation)}")
    bind = signature.bind_partial if component.get("_partial_") else signature.bind
    try:
        bind(*component.get("_args_", ()), **arguments)
    except TypeError as error:
        raise ConfigError(f"{path}: {target}: {error}; set it in {path}") from error


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a configured value can be of a plain annotated type. Any other annotation is the target's own business."""
    names = [name.strip() for name in _type_name(annotation).split("|")]
    if not {*names} <= {*SCALARS, "None"}:
        return True
    if isinstance(value, bool):
        return "bool" in names
    return (value is None and "None" in names) or any(
        isinstance(value, SCALARS[name]) for name in names if name != "None"
    )


def _nested_components(value: Any, path: str) -> Iterator[tuple[str, Component]]:
    """The components directly below `value`, with their paths."""
    if isinstance(value, Mapping):
        entries = [(f"{path}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        entries = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    else:
        return
    for inner_path, inner in entries:
        if isinstance(inner, dict) and "_target_" in inner:
            yield inner_path, inner
        else:
            yield from _nested_components(inner, inner_path)


def _holds(component: Component | None, wanted: Component) -> bool:
    """Whether `wanted` is among the components below `component`."""
    inner = [found for _, found in _nested_components(component or {}, "")]
    return wanted in inner or any(_holds(found, wanted) for found in inner)


def locate(target: str, path: str) -> Callable[..., Any]:
    """The class or function with the dotted name `target`.

    Raises:
        ConfigError: it does not import, with the cause; or there is no such name, with the closest one.
    """
    names = target.split(".")
    module, rest = None, names
    for length in range(1, len(names)):
        module_name = ".".join(names[:length])
        try:
            module, rest = importlib.import_module(module_name), names[length:]
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise _import_failure(target, path, error) from error
            break
        except Exception as error:  # a module may raise anything while it is imported
            raise _import_failure(target, path, error) from error
    if module is None:
        raise ConfigError(
            f"{path}._target_={target}: there is no module {names[0]}; give the full dotted name, such as rewards.math.GSM8K"
        )
    found: Any = module
    for name in rest:
        try:
            found = getattr(found, name)
        except AttributeError as error:
            where = found.__name__
            hint = did_you_mean(f"{where}.{name}", [f"{where}.{option}" for option in _names_in(found)])
            raise ConfigError(f"{path}._target_={target}: {where} has no {name}{hint}") from error
    if not callable(found):
        raise ConfigError(f"{path}._target_={target}: is a {type(found).__name__}, not a class or a function")
    return found


def _import_failure(target: str, path: str, error: Exception) -> ConfigError:
    cause = " ".join(str(error).split())
    return ConfigError(f"{path}._target_={target}: its import failed with {type(error).__name__}: {cause}")


def _names_in(owner: Any) -> list[str]:
    names = [name for name in vars(owner) if not name.startswith("_")]
    if isinstance(owner, ModuleType) and "__path__" in vars(owner):
        names += [module.name for module in pkgutil.iter_modules(owner.__path__)]
    return names


def _instantiate(component: Component, path: str) -> Any:
    try:
        return instantiate(component, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, CookbookError):
            raise cause from None
        reason = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        raise ConfigError(f"{path}: {component['_target_']} could not be made: {' '.join(reason.split())}") from error
