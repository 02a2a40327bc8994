"""The class or function that a `_target_` names, and a check of its arguments before it is called."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cookbook.cli import folders
from cookbook.core.errors import ConfigError
from cookbook.core.suggest import did_you_mean
from cookbook.loops.config import Component

HYDRA_KEYS = frozenset({"_target_", "_args_", "_partial_", "_convert_", "_recursive_"})

SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
"""Annotations that a value is checked against before its target is called, and what fits them."""

SHIPPED_PACKAGES = ("rewards", "recipes")
"""Packages of the cookbook with names that a user's file may well have."""


def check_component(component: Component, path: str) -> None:
    """Check a component, and those inside it, against the signature of its `_target_`.

    Args:
        component: a mapping with `_target_`.
        path: where it stands in the configuration, for messages.

    Raises:
        ConfigError: there is no `_target_`, it does not import, or an argument is unknown or missing.
    """
    if "_target_" not in component:
        raise ConfigError(
            f"{path}: has no _target_, so it cannot be built; choose an option of the group or add {path}._target_"
        )
    target = locate(component["_target_"], path)
    arguments = {key: value for key, value in component.items() if key not in HYDRA_KEYS}
    _check_arguments(component, inspect.signature(target), arguments, path, inspect.isfunction(target))
    for inner_path, inner in _nested_components(arguments, path):
        check_component(inner, inner_path)


def _check_arguments(
    component: Component, signature: inspect.Signature, arguments: Mapping[str, Any], path: str, is_function: bool
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
        partial = f", or set {path}._partial_=true to use the function itself" if is_function else ""
        raise ConfigError(f"{path}: {target}: {error}; set it in {path}{partial}") from error


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a configured value can be of a plain annotated type. Other annotations are not checked."""
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


def holds(component: Component | None, wanted: Component) -> bool:
    """Whether `wanted` is among the components below `component`."""
    inner = [found for _, found in _nested_components(component or {}, "")]
    return wanted in inner or any(holds(found, wanted) for found in inner)


def locate(target: str, path: str) -> Callable[..., Any]:
    """The class or function with the dotted name `target`.

    Raises:
        ConfigError: it does not import, with the cause; there is no such name, with the closest one; or a file of the
            user's hides the package of the cookbook that it is in.
    """
    names = target.split(".")
    _check_not_hidden(names[0], target, path)
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
            f"{path}._target_={target}: there is no module {names[0]}; give the full dotted name, such as "
            "rewards.math.GSM8K; modules in the working directory and beside your conf folder are found"
        )
    found: Any = module
    for name in rest:
        try:
            found = getattr(found, name)
        except AttributeError as error:
            where = found.__name__
            hint = did_you_mean(f"{where}.{name}", [f"{where}.{option}" for option in _names_in(found)])
            raise ConfigError(f"{path}._target_={target}: {where} has no {name}{hint}{_not_used(names[0])}") from error
    if not callable(found):
        raise ConfigError(f"{path}._target_={target}: is a {type(found).__name__}, not a class or a function")
    return found


def _check_not_hidden(package: str, target: str, path: str) -> None:
    if package not in SHIPPED_PACKAGES:
        return
    spec = importlib.util.find_spec(package)
    shipped = folders.PACKAGE.parent / package
    if spec and spec.origin and not Path(spec.origin).resolve().is_relative_to(shipped):
        raise ConfigError(
            f"{path}._target_={target}: {spec.origin} hides the package {package} of the cookbook; rename that file"
        )


def _not_used(package: str) -> str:
    """The user's file of the name of a package of the cookbook: what stands there may be what was meant."""
    places = [Path.cwd(), *(folder.parent for folder in folders.own())]
    files = [place / f"{package}.py" for place in places] if package in SHIPPED_PACKAGES else []
    found = next((file for file in files if file.is_file()), None)
    return (
        f"; {found} is not imported, because a package of the cookbook has its name: rename that file" if found else ""
    )


def _import_failure(target: str, path: str, error: Exception) -> ConfigError:
    cause = " ".join(str(error).split())
    return ConfigError(f"{path}._target_={target}: its import failed with {type(error).__name__}: {cause}")


def _names_in(owner: Any) -> list[str]:
    names = [name for name in vars(owner) if not name.startswith("_")]
    if isinstance(owner, ModuleType) and "__path__" in vars(owner):
        names += [module.name for module in pkgutil.iter_modules(owner.__path__)]
    return names
