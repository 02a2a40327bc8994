"""Finds the packages that the tests of a problem import and that the sandbox does not have."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from contextlib import suppress

from cookbook.sandbox.problem import AssertTests, CodeProblem, StdinTests


def missing_modules(problem: CodeProblem, available: Collection[str]) -> list[str]:
    """The top-level modules that the tests, their setup, the checker or the prelude of a problem import, and that are
    not `available`. An import inside `try` may fail."""
    tests = problem.tests
    parts = [problem.prelude] if problem.language == "python" else []
    if isinstance(tests, AssertTests):
        parts += [tests.setup, *tests.tests]
    elif isinstance(tests, StdinTests) and tests.checker:
        parts.append(tests.checker)
    found: dict[str, None] = {}
    for part in parts:
        if "import" in part:
            with suppress(SyntaxError, ValueError, RecursionError):  # which running it tells better
                found |= dict.fromkeys(_imported(ast.parse(part)))
    return [module for module in found if module not in available]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name.partition(".")[0] for name in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]
    for child in () if isinstance(node, ast.Try) else ast.iter_child_nodes(node):
        yield from _imported(child)
