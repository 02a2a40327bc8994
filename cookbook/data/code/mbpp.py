"""MBPP (Austin et al. 2021, arXiv:2108.07732): 974 small functions, each with three assert statements.

Columns, as google-research's mbpp/README.md and its file `mbpp.jsonl` have them: `text` (`prompt` in the sanitized
version), `code`, `task_id`, `test_list`, `test_setup_code` (`test_imports` in the sanitized version),
`challenge_test_list`. The task ids make the official splits: 11 to 510 test, 601 to 974 training, 511 to 600
validation; 1 to 10 are for few-shot prompts, and here count as validation.

The tests of three problems (367, 601, 927) build objects of classes that the gold program defines. A test runs apart
from the program, so no program can be graded by them: they are bad rows.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook.core.examples import Example
from cookbook.data.bad_rows import BadRow
from cookbook.data.code.rows import column, make_example, parse_python, solution_extra, text
from cookbook.data.files import Location, named_file
from cookbook.data.source import Numbered, RowDataset
from cookbook.sandbox.problem import AssertTests, CodeProblem

TRAIN_IDS, TEST_IDS = range(601, 975), range(11, 511)
VALIDATION_IDS = (*range(1, 11), *range(511, 601))

TIME_LIMIT_S = 10.0
"""The source has none; the gold program of task 123 takes about 4 seconds."""


@dataclass(kw_only=True, eq=False, repr=False)
class MBPP(RowDataset[Example]):
    """The official splits; `validation` has the third one.

    The prompt shows the tests of `test_list`, as the paper's does: without them the function's name is unknown.

    Args:
        path: `mbpp.jsonl`, a folder with it, or a folder with `train*` and `test*` files, to read instead of the hub.
        hub_id: Dataset on the hub.
        hub_config: "full", or "sanitized" (427 problems with edited texts).
        challenge_tests: Also grade by `challenge_test_list`, which the prompt does not show. Only a few problems have
            one.

    The other options and the errors are those of `RowDataset`.
    """

    kind: ClassVar[str] = "prompts"

    name: str = "mbpp"
    hub_id: str | None = "google-research-datasets/mbpp"
    hub_config: str | None = "full"
    challenge_tests: bool = False

    def load(self) -> None:
        location = Location(named_file(self.local, "mbpp.jsonl"), self.hub_id, self.hub_config)
        splits = ["train"] if location.has_no_splits else ["train", "test"]
        problems = list(self.items(row for split in splits for row in location.read(split)))

        def within(ids: Container[int]) -> Iterator[Numbered[Example]]:
            return (problem for problem in problems if problem[1].extra["task_id"] in ids)

        self.train = self.take("train", within(TRAIN_IDS), self.train_size)
        self.test = self.take("test", within(TEST_IDS), self.test_size)
        self.validation: Sequence[Example] = self.with_ids("validation", within(VALIDATION_IDS))

    def parse(self, row: Mapping[str, Any], place: str) -> Example:
        task = column(row, "task_id")
        if not isinstance(task, int):
            raise BadRow("malformed task_id", f"{task!r:.40}")
        return _parse(row, task, self.challenge_tests)


def _parse(row: Mapping[str, Any], task: int, challenge_tests: bool) -> Example:
    code = text(row, "code").replace("\r\n", "\n")
    shown = _statements(row, "test_list")
    tests = shown + (_statements(row, "challenge_test_list") if challenge_tests else ())
    if not tests:
        raise BadRow("no tests")
    setup = "\n".join(
        [*_statements(row, "test_imports"), str(row.get("test_setup_code") or "").replace("\r\n", "\n")]
    ).strip()

    program, test_code = parse_python(code, "code"), parse_python("\n".join([setup, *tests]), "tests")
    functions = {node.name for node in program.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name for node in program.body if isinstance(node, ast.ClassDef)}
    names = {node.id for node in ast.walk(test_code) if isinstance(node, ast.Name)}
    if names & classes:
        raise BadRow("tests need the program's own classes", f"task {task}: {', '.join(sorted(names & classes))}")
    called = tuple(sorted(names & functions))
    if not called:
        raise BadRow("tests call no function of the program", f"task {task}")
    # Task 596 tests with sys.getsizeof, which only its gold program imports.
    imports = [
        ast.unparse(node)
        for node in program.body
        if isinstance(node, ast.Import) and {alias.name for alias in node.names} & names
    ]
    setup = "\n".join(part for part in (*imports, setup) if part)

    statement = (
        f"{text(row, 'text', 'prompt').strip()}\n\nYour code should pass these tests:\n\n```python\n"
        + "\n".join(shown)
        + "\n```"
    )
    prompt = f"{statement}\n\nPut the whole program in one ```python block."
    extra = solution_extra(code) | {"task_id": task}
    return make_example(prompt, CodeProblem(AssertTests(tests, called, setup), time_limit_s=TIME_LIMIT_S), extra)


def _statements(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row.get(name) or []
    if not isinstance(value, list) or not all(isinstance(statement, str) for statement in value):
        raise BadRow("malformed tests", f"column {name!r} is {value!r:.60}, not a list of Python statements")
    return tuple(statement.replace("\r\n", "\n").strip() for statement in value)
