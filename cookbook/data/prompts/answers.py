"""Prompt datasets with a gold answer: rows of a Hugging Face dataset, or of JSONL or Parquet files, with a prompt and an answer column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cookbook.core.errors import DataError
from cookbook.core.examples import Example, Message
from cookbook.core.numbers import extract_answer
from cookbook.data.bad_rows import BadRows
from cookbook.data.files import Split, read_folder, read_hub

GSM8K_INSTRUCTION = 'Reason step by step, then write the answer on a last line of its own: "#### " and the number.'


class PromptAnswers:
    """A dataset of prompts with gold answers, all of it read when it is made.

    Row `i` of a split becomes an Example with the id `<name>/<split>/<i>`, one user message (the prompt column and, two
    newlines later, `instruction`), and the gold answer `extract(row[answer_column])`. The whole answer column is kept
    as `extra["solution"]`.

    Args:
        name: Prefix of the example ids.
        hub_id: Dataset on the Hugging Face hub, read when `path` is None.
        hub_config: Its configuration ("main"), where it has several.
        path: A local folder to read instead of the hub: `train.jsonl` and `test.jsonl`, or `train*.parquet` and
            `test*.parquet`, in the folder itself or, as on the hub, in its subfolder `<hub_config>` or `data`.
        prompt_column: Column of the prompt (text).
        answer_column: Column of the answer (text or an integer).
        extract: From the answer column's text to the gold answer, None where there is none. By default the text itself, stripped.
        instruction: What to do and how to write the answer; appended to every prompt.
        train_size: Keep only the first rows of `train`; None keeps all.
        test_size: The same for `test`.

    Raises:
        DataError: the folder, a file, a row, a column or a gold answer is missing or malformed, or the hub cannot be
            reached. The message names the file and line.
    """

    def __init__(
        self,
        *,
        name: str,
        hub_id: str | None = None,
        hub_config: str | None = None,
        path: str | None = None,
        prompt_column: str = "question",
        answer_column: str = "answer",
        extract: Callable[[str], str | None] = str.strip,
        instruction: str = "",
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        def read(split: Split, size: int | None) -> list[Example]:
            if size is not None and size < 1:
                raise DataError(f"dataset.{split}_size={size}: must be at least 1, or null for all rows")
            if path is not None:
                rows = read_folder(Path(path).expanduser(), split, hub_config)
            elif hub_id is not None:
                rows = read_hub(hub_id, hub_config, split)
            else:
                raise DataError(f"dataset {name}: neither dataset.path nor dataset.hub_id is set; set one of them")
            examples = []
            for index, (where, row) in enumerate(rows):
                if index == size:
                    break
                prompt = _text(where, row, prompt_column)
                solution = _text(where, row, answer_column)
                answer = extract(solution)
                if not answer:
                    raise DataError(f"{where}: no gold answer in column {answer_column!r}: {solution[-60:]!r}")
                content = f"{prompt}\n\n{instruction}" if instruction else prompt
                message = Message(role="user", content=content)
                examples.append(Example(f"{name}/{split}/{index}", (message,), answer, {"solution": solution}))
            if not examples:
                raise DataError(f"dataset {name}: the {split} split of {path or hub_id} has no rows")
            if size is not None and size > len(examples):
                raise DataError(
                    f"dataset.{split}_size={size}: {path or hub_id} has only {len(examples)} rows in {split}; null takes all"
                )
            return examples

        self.bad_rows = BadRows()
        self.train: Sequence[Example] = read("train", train_size)
        self.test: Sequence[Example] = read("test", test_size)


class GSM8K(PromptAnswers):
    """Grade School Math 8K (Cobbe et al. 2021, arXiv:2110.14168): 7,473 and 1,319 problems; the gold answer is the number after `####`."""

    def __init__(
        self,
        *,
        path: str | None = None,
        hub_id: str = "openai/gsm8k",
        hub_config: str = "main",
        instruction: str = GSM8K_INSTRUCTION,
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        super().__init__(
            name="gsm8k",
            hub_id=hub_id,
            hub_config=hub_config,
            path=path,
            extract=extract_answer,
            instruction=instruction,
            train_size=train_size,
            test_size=test_size,
        )


def _text(where: str, row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise DataError(f"{where}: no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    value = row[column]
    if not isinstance(value, str | int) or not str(value).strip():
        raise DataError(f"{where}: column {column!r} is {value!r:.60}; it must be text that is not empty")
    return str(value)
