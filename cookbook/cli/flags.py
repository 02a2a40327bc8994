"""The flags of the command line: which there are, and what was given."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cookbook.cli.options import chosen
from cookbook.core.errors import ConfigError
from cookbook.core.suggest import did_you_mean

SHORT = {
    "-m": "--multirun",
    "-c": "--cfg",
    "-p": "--package",
    "-i": "--info",
    "-cd": "--config-dir",
    "-sc": "--shell-completion",
    "-h": "--help",
}

VALUES: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--package": (),
    "--config-dir": (),
}
"""Flags with a value, and the values they take; any where there are none."""

DEFAULT_VALUES = {"--info": "all"}

FLAGS = (*SHORT.values(), "--resolve", "--hydra-help", "--version", "--debug")

OURS = ("--help", "--version")
"""Flags that Hydra is not told about."""


@dataclass
class Command:
    """A command line, taken apart."""

    overrides: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    """Each flag but those that become something else, and its value; "" where it takes none."""

    config_dirs: list[str] = field(default_factory=list)
    arguments: tuple[str, ...] = ()
    """As they were given."""

    @property
    def debug(self) -> bool:
        return chosen(self.overrides, "debug") == "true" or chosen(self.overrides, "hydra.verbose") == "true"

    def hydra_flags(self) -> list[str]:
        """What Hydra is told of the flags."""
        return [part for flag, value in self.flags.items() if flag not in OURS for part in (flag, value) if part]


def parse(arguments: Sequence[str]) -> Command:
    """Take a command line apart: flags and overrides, in any order.

    Raises:
        ConfigError: there is no such flag, its value is missing, or is not one that it takes.
    """
    command, rest = Command(arguments=tuple(arguments)), deque(arguments)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("-"):
            command.overrides.append(argument)
            continue
        name, equals, value = argument.partition("=")
        flag = SHORT.get(name, name)
        if flag not in FLAGS:
            hint = did_you_mean(name, [*FLAGS, *SHORT])
            raise ConfigError(f"{name}: there is no such flag{hint}; --help lists the flags")
        if equals and flag not in VALUES:
            raise ConfigError(f"{argument}: {flag} takes no value")
        if flag in VALUES and not equals:
            value = _next_value(flag, rest)
        if VALUES.get(flag) and value not in VALUES[flag]:
            hint = did_you_mean(value, VALUES[flag])
            raise ConfigError(f"{flag} {value}: must be one of {', '.join(VALUES[flag])}{hint}")
        if flag == "--config-dir":
            command.config_dirs.append(value)
        elif flag == "--debug":
            command.overrides.append("debug=true")
        else:
            command.flags[flag] = value
    return command


def _next_value(flag: str, rest: deque[str]) -> str:
    if flag in DEFAULT_VALUES and (not rest or rest[0] not in VALUES[flag]):
        return DEFAULT_VALUES[flag]
    if not rest:
        one_of = f", one of {', '.join(VALUES[flag])}" if VALUES[flag] else ""
        raise ConfigError(f"{flag}: needs a value{one_of}")
    return rest.popleft()
