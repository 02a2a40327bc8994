"""HumanEval (Chen et al. 2021, arXiv:2107.03374): 164 Python functions to complete from signature and docstring.

Columns, as openai/human-eval's README and its file `HumanEval.jsonl.gz` have them: `task_id`, `prompt` (Python:
imports, sometimes a helper function, then the signature and docstring), `entry_point`, `canonical_solution` (the body),
`test` (Python that defines `check(candidate)`). All of it is for testing, none for training.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook.core.examples import Example
from cookbook.data.bad_rows import BadRow
from cookbook.data.code.rows import make_example, parse_python, solution_extra, text
from cookbook.data.files import Location, named_file
from cookbook.data.kinds import PromptDataset, bad_rows_of
from cookbook.data.source import OnBadRow, RowDataset
from cookbook.sandbox.problem import AssertTests, CodeProblem


class HumanEval:
    """The problems as the held-out split; those to train on are another dataset's.

    A completion is a whole program: the function with its signature. What the prompt has before the function (imports
    and helper functions) goes before the program as `CodeProblem.prelude`, and before the tests as their setup.

    Args:
        train: The dataset whose `train` is trained on, and whose bad rows count here too. None: `train` is empty, and a
            loop that draws from it stops with a DataError.
        path: `HumanEval.jsonl.gz` or `.jsonl`, a folder with the former, or a folder with `test*` files, to read
            instead of the hub.
        hub_id: Dataset on the hub.
        on_bad_row: "skip" counts a malformed row in `bad_rows`; "fail" stops at the first.
        test_size: Keep only the first problems; None keeps all.

    Raises:
        DataError: nothing to read, a bad row where `on_bad_row` is "fail", or not enough problems.
    """

    kind: ClassVar[str] = "prompts"

    def __init__(
        self,
        *,
        train: PromptDataset | None = None,
        path: str | None = None,
        hub_id: str | None = "openai/openai_humaneval",
        on_bad_row: OnBadRow = "skip",
        test_size: int | None = None,
    ) -> None:
        problems = _Problems(name="humaneval", path=path, hub_id=hub_id, on_bad_row=on_bad_row, test_size=test_size)
        self.train: Sequence[Example] = [] if train is None else train.train
        self.test: Sequence[Example] = problems.test
        self.bad_rows, self.on_bad_row = problems.bad_rows, on_bad_row
        if train is not None:
            self.bad_rows.update(bad_rows_of(train))


@dataclass(kw_only=True, eq=False, repr=False)
class _Problems(RowDataset[Example]):
    """The held-out problems alone."""

    hub_id: str | None

    def load(self) -> None:
        location = Location(named_file(self.local, "HumanEval.jsonl.gz"), self.hub_id)
        self.train = []
        self.test = self.take("test", self.items(location.read("test"), "test"), self.test_size)

    def parse(self, row: Mapping[str, Any], place: str) -> Example:
        prompt, name, tests = text(row, "prompt"), text(row, "entry_point"), text(row, "test")
        lines = prompt.splitlines()
        start = next((number for number, line in enumerate(lines) if line.startswith(f"def {name}(")), None)
        if start is None:
            raise BadRow("no signature", f"the prompt has no line that begins with 'def {name}('")
        prelude = "\n".join(lines[:start]).strip()
        parse_python(prelude, "prompt")
        functions = [node.name for node in parse_python(tests, "test").body if isinstance(node, ast.FunctionDef)]
        if "check" not in functions:
            raise BadRow("no tests", "column 'test' defines no function check")
        body = row.get("canonical_solution")
        program = f"{prompt}{body}" if isinstance(body, str) and body.strip() else None
        content = (
            f"Complete this Python function:\n\n```python\n{prompt.strip()}\n```\n\n"
            "Put the whole function, with its signature, in one ```python block."
        )
        setup = "\n\n".join(part for part in (prelude, tests.strip()) if part)
        problem = CodeProblem(AssertTests((f"check({name})",), (name,), setup), prelude=prelude)
        return make_example(content, problem, solution_extra(program) | {"task_id": str(row.get("task_id", ""))})
