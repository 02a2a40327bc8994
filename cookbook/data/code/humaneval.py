"""HumanEval (Chen et al. 2021, arXiv:2107.03374): 164 Python functions, each to be completed from its signature and docstring.

Columns, as openai/human-eval's README and its file `HumanEval.jsonl.gz` have them: `task_id`, `prompt` (Python: imports, sometimes a
helper function, then the signature and docstring), `entry_point`, `canonical_solution` (the body), `test` (Python that defines
`check(candidate)`). All of it is for testing, none for training.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from cookbook.core.examples import Example
from cookbook.data.chat.rows import BadRow
from cookbook.data.code.dataset import OnBadRow, ParsedProblem, ProblemReader, all_rows
from cookbook.data.code.rows import parse_python, solution_extra, text
from cookbook.data.kinds import PromptDataset
from cookbook.sandbox.problem import AssertTests, CodeProblem


class HumanEval:
    """The problems as the held-out split of a dataset whose problems to learn from are another one's.

    A completion is a whole program: the function with its signature. What the prompt has before the function (imports and helper
    functions) stands before the program as `CodeProblem.prelude`, and before the tests as their setup.

    Args:
        train: The dataset whose `train` is learnt from, and whose bad rows count here too; None: there is nothing to learn from,
            `train` is empty, and a loop that draws from it stops with a DataError.
        path: `HumanEval.jsonl.gz` or `.jsonl`, a folder with the former, or a folder with `test*` files, to read instead of the hub.
        hub_id: Dataset on the hub.
        on_bad_row: "skip" counts a malformed row in `bad_rows`; "fail" stops at the first.
        test_size: Keep only the first problems; None keeps all.

    Raises:
        DataError: nothing to read, a bad row where `on_bad_row` is "fail", or not enough problems.
    """

    def __init__(
        self,
        *,
        train: PromptDataset | None = None,
        path: str | None = None,
        hub_id: str | None = "openai/openai_humaneval",
        on_bad_row: OnBadRow = "skip",
        test_size: int | None = None,
    ) -> None:
        reader = ProblemReader("humaneval", path, on_bad_row)
        self.bad_rows = reader.bad_rows
        if train is not None:
            self.bad_rows.update(train.bad_rows)
        rows = all_rows(reader, hub_id, None, ("test",), "HumanEval.jsonl.gz")
        self.train: Sequence[Example] = train.train if train is not None else []
        self.test: Sequence[Example] = reader.examples("test", reader.parse(rows, _parse), test_size)


def _parse(row: Mapping[str, Any]) -> ParsedProblem:
    prompt, name, tests = text(row, "prompt"), text(row, "entry_point"), text(row, "test")
    lines = prompt.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(f"def {name}(")), None)
    if start is None:
        raise BadRow("no signature", f"the prompt has no line that begins with 'def {name}('")
    prelude = "\n".join(lines[:start]).strip()
    parse_python(prelude, "prompt")
    checks = [
        node for node in parse_python(tests, "test").body if isinstance(node, ast.FunctionDef) and node.name == "check"
    ]
    if not checks:
        raise BadRow("no tests", "column 'test' defines no function check")
    body = row.get("canonical_solution")
    program = f"{prompt}{body}" if isinstance(body, str) and body.strip() else None
    content = (
        f"Complete this Python function:\n\n```python\n{prompt.strip()}\n```\n\n"
        "Put the whole function, with its signature, in one ```python block."
    )
    assert_tests = AssertTests(
        (f"check({name})",), (name,), "\n\n".join(part for part in (prelude, tests.strip()) if part)
    )
    extra = solution_extra(program) | {"task_id": str(row.get("task_id", ""))}
    return ParsedProblem(content, CodeProblem(assert_tests, prelude=prelude), extra)
