"""Output validators of problem packages as checkers of `StdinTests`.

The specification of both is https://www.kattis.com/problem-package-format (spec/legacy, "Output Validators"): a
validator is called with the names of the input file, the answer file and a folder for feedback, and the flags; it reads
the program's output from stdin, and ends with status 42 to accept and 43 to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence

from cookbook.data.bad_rows import BadRow
from cookbook.data.code.rows import parse_python

_ADAPTER = """\
import os, sys

SOURCE = {source!r}
FLAGS = {flags!r}

os.makedirs("feedback", exist_ok=True)
os.dup2(os.open("output.txt", os.O_RDONLY), 0)
sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
sys.argv = ["validator.py", "input.txt", "expected.txt", "feedback/", *FLAGS]
verdict = None
try:
    exec(compile(SOURCE, "validator.py", "exec"), {{"__name__": "__main__", "__builtins__": __builtins__}})
except SystemExit as end:
    verdict = end.code
if verdict not in (42, 43):
    sys.stderr.write("the output validator ended with %r instead of 42 or 43\\n" % (verdict,))
    sys.stderr.flush()
    os._exit(2)
os._exit(verdict - 42)
"""
"""A checker that runs a validator: 0 accepts, 1 refuses, anything else says that the validator itself failed.

A validator that dies of an exception refuses (Python's own exit status is 1): what makes it die is output that it did
not expect.
"""

_DEFAULT_VALIDATOR = r"""
import re, sys

flags = sys.argv[4:]
case_sensitive = "case_sensitive" in flags
space_sensitive = "space_change_sensitive" in flags
relative = absolute = None
for name, value in zip(flags, flags[1:]):
    if name in ("float_tolerance", "float_relative_tolerance"):
        relative = float(value)
    if name in ("float_tolerance", "float_absolute_tolerance"):
        absolute = float(value)

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def tokens(text):
    return re.findall(r"\s+|\S+", text) if space_sensitive else text.split()


def same(given, expected):
    if (relative is not None or absolute is not None) and NUMBER.fullmatch(expected):
        if not NUMBER.fullmatch(given):
            return False
        x, y = float(given), float(expected)
        if x == y:
            return True
        error = abs(x - y)
        return (absolute is not None and error <= absolute) or (relative is not None and error <= relative * abs(y))
    return given == expected or (not case_sensitive and given.lower() == expected.lower())


given = tokens(sys.stdin.read())
expected = tokens(open(sys.argv[2], encoding="utf-8").read())
sys.exit(42 if len(given) == len(expected) and all(map(same, given, expected)) else 43)
"""
"""The default output validator with all its flags."""

_SWITCHES = ("case_sensitive", "space_change_sensitive")
_TOLERANCES = ("float_tolerance", "float_relative_tolerance", "float_absolute_tolerance")


def output_validation(
    validator: str | None, flags: Sequence[str], cases: Sequence[tuple[str, str]]
) -> tuple[float | None, str | None]:
    """The `float_tolerance` and the `checker` of the tests of a package.

    The default validator becomes the plain comparison, which costs no process, where both agree on the answers at hand:
    one tolerance for absolute and relative errors, no sensitivity to spaces, and `case_sensitive` set or no letters in
    the answers. Everything else becomes a checker.

    Args:
        validator: Source of a custom validator in Python; None for the default one.
        flags: Its arguments.
        cases: The tests.

    Raises:
        BadRow: a flag that the default validator does not have, a tolerance that is not a number, or a validator that
            is not Python.
    """
    if validator is not None:
        parse_python(validator, "output validator")
        return None, _ADAPTER.format(source=validator, flags=list(flags))
    tolerances = _default_tolerances(flags)
    caseless = all(answer.lower() == answer.upper() for _, answer in cases)
    if (
        "space_change_sensitive" not in flags
        and set(tolerances) <= {"float_tolerance"}
        and ("case_sensitive" in flags or caseless)
    ):
        return tolerances.get("float_tolerance"), None
    return None, _ADAPTER.format(source=_DEFAULT_VALIDATOR, flags=list(flags))


def _default_tolerances(flags: Sequence[str]) -> dict[str, float]:
    tolerances = {}
    rest = iter(flags)
    for flag in rest:
        if flag in _TOLERANCES:
            value = next(rest, "")
            try:
                tolerances[flag] = float(value)
            except ValueError as error:
                raise BadRow("malformed validator flags", f"{flag} {value!r}: not a number") from error
        elif flag not in _SWITCHES:
            raise BadRow("malformed validator flags", f"the default output validator has no flag {flag!r}")
    return tolerances
