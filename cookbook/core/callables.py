"""What an error says of a user's function: its name, and what it raised where."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

_NOT_THE_USERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)


def callable_name(function: Callable[..., Any]) -> str:
    """The dotted name of a function (`functools.partial` looked through) or of an object's class."""
    if isinstance(function, functools.partial):
        return callable_name(function.func)
    named = isinstance(function, FunctionType | MethodType | BuiltinFunctionType)
    target = function if named else type(function)
    return f"{target.__module__}.{target.__qualname__}"


def describe_exception(error: BaseException, during: str = "") -> str:
    """`ValueError: message during, at file:line`.

    `file:line` is the last place in code of the user's own: a library that it called, or that replaces a function of
    Python's such as sys.exit, does not show what to fix.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    frame = (own or frames)[-1]
    return f"{type(error).__name__}: {one_line(str(error))}{during}, at {frame.filename}:{frame.lineno}"


def one_line(text: str, limit: int = 300) -> str:
    """`text` with its white space reduced to single spaces, cut to `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
