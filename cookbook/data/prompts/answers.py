"""Prompt datasets with a gold answer, from rows with a prompt and an answer column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Example, Message
from cookbook.core.numbers import ANSWER_MARKER, extract_answer
from cookbook.data.bad_rows import BadRow
from cookbook.data.chat.rows import parse_messages, with_input
from cookbook.data.source import Numbered, Source
from cookbook.data.template import Template

GSM8K_INSTRUCTION = 'Reason step by step, then write the answer on a last line of its own: "#### " and the number.'


@dataclass(kw_only=True, eq=False, repr=False)
class PromptAnswers(Source[Example]):
    """Prompts with gold answers.

    The messages of an example are the system message, the few-shot turns, and the row's own: the user message that
    `template` makes or, without a template, the prompt column, a text or a list of chat messages. The gold answer is
    `extract(row[answer_column])`. `extra` has all other columns, and as `solution` the whole answer column, if the row
    has no column `solution` of its own.

    Args:
        prompt_column: Column of the prompt: a text, or a list of messages that ends with the user's. Not read where
            `template` is set.
        answer_column: Column of the answer (text or number).
        extract: From the answer column's text to the gold answer, None if there is none. Default: the text, stripped.
        system: System message of every prompt whose row has none.
        template: User message with `{column}` placeholders, in place of the prompt column.
        instruction: What to do and how to write the answer; appended to every prompt after an empty line.
        few_shot: Solved examples to put before every prompt as user and assistant turns: a list of mappings with
            `prompt` and `answer`; or a number n: the first n training rows with their solutions, which then leave
            `train`.

    The other options and the errors are those of `Source`.
    """

    kind: ClassVar[str] = "prompts"

    prompt_column: str = "question"
    answer_column: str = "answer"
    extract: Callable[[str], str | None] = str.strip
    system: str = ""
    template: str | None = None
    instruction: str = ""
    few_shot: int | Sequence[Mapping[str, str]] = 0

    def __post_init__(self) -> None:
        self._template = None if self.template is None else Template(self.template)
        super().__post_init__()

    def parse(self, row: Mapping[str, Any], place: str) -> Example:
        solution = _text(row, self.answer_column)
        answer = self.extract(solution)
        if not answer:
            raise BadRow("no gold answer", f"column {self.answer_column!r} ends with {solution[-60:]!r}")
        read = {self.answer_column} if self._template is not None else {self.answer_column, self.prompt_column}
        extra = {"solution": solution} | {column: value for column, value in row.items() if column not in read}
        return Example("", tuple(self._messages(row)), answer, extra)

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        if self._template is not None:
            return [Message(role="user", content=self._template.fill(row))]
        prompt = row.get(self.prompt_column)
        if not isinstance(prompt, list):
            content = _text(row, self.prompt_column)
            return [
                Message(role="user", content=str(with_input({**row, self.prompt_column: content}, self.prompt_column)))
            ]
        messages = parse_messages(prompt)
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            last = messages[-1]["role"] if messages else "no message"
            raise BadRow("no user turn at the end", f"column {self.prompt_column!r} ends with {last}")
        return messages

    def splits(self) -> tuple[Iterable[Numbered[Example]], Iterable[Numbered[Example]]]:
        train, test = super().splits()
        train = iter(train)
        shots = self._shots(train)
        return self._complete(train, shots), self._complete(test, shots)

    def _shots(self, train: Iterator[Numbered[Example]]) -> list[Message]:
        """The few-shot turns. Consumes the examples of `train` that it uses."""
        if not isinstance(self.few_shot, int):
            solved = []
            for number, shot in enumerate(self.few_shot):
                if not isinstance(shot, Mapping) or set(shot) != {"prompt", "answer"}:
                    raise DataError(
                        f"dataset.few_shot[{number}]={shot!r:.60}: must have prompt and answer, nothing else"
                    )
                solved.append(([Message(role="user", content=shot["prompt"])], shot["answer"]))
        else:
            if self.few_shot < 0:
                raise DataError(
                    f"dataset.few_shot={self.few_shot}: must be 0 or more, or a list of prompts and answers"
                )
            examples = [example for _, example in islice(train, self.few_shot)]
            if len(examples) < self.few_shot:
                raise DataError(f"dataset.few_shot={self.few_shot}: there are only {len(examples)} training rows")
            solved = [(example.messages, example.extra["solution"]) for example in examples]
        return [
            message
            for messages, answer in solved
            for message in (*self._instructed(_without_system(messages)), Message(role="assistant", content=answer))
        ]

    def _complete(self, items: Iterable[Numbered[Example]], shots: Sequence[Message]) -> Iterator[Numbered[Example]]:
        """Add system message, few-shot turns and instruction: after the split, so that they do not change it."""
        for index, example in items:
            own = _without_system(example.messages)
            system = example.messages[: len(example.messages) - len(own)]
            if not system and self.system:
                system = (Message(role="system", content=self.system),)
            yield index, replace(example, messages=(*system, *shots, *self._instructed(own)))

    def _instructed(self, messages: Sequence[Message]) -> list[Message]:
        *before, last = messages
        content = f"{last['content']}\n\n{self.instruction}" if self.instruction else last["content"]
        return [*before, {**last, "content": content}]


@dataclass(kw_only=True, eq=False, repr=False)
class GSM8K(PromptAnswers):
    """Grade School Math 8K (Cobbe et al. 2021, arXiv:2110.14168): 7,473 and 1,319 problems.

    The gold answer is the number after `####`. Options and errors are those of `PromptAnswers`.
    """

    name: str = "gsm8k"
    hub_id: str | None = "openai/gsm8k"
    hub_config: str | None = "main"
    extract: Callable[[str], str | None] = extract_answer
    instruction: str = GSM8K_INSTRUCTION


def after_marker(text: str) -> str:
    """The text after the last `####`, or all of it where there is none; stripped."""
    return text.rpartition(ANSWER_MARKER)[2].strip()


def _without_system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[1:] if messages[0]["role"] == "system" else messages


def _text(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise BadRow("missing columns", f"no {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    value = row[column]
    if value is None or not str(value).strip():
        raise BadRow("empty column", f"{column!r} is {value!r:.60}; it must be text that is not empty")
    if not isinstance(value, str | int | float):
        raise BadRow("not text", f"{column!r} is {value!r:.60}; it must be text that is not empty")
    return str(value)
