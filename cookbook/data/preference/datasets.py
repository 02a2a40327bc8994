"""Preference data: pairs of a better and a worse completion, and single completions labelled desirable or not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from cookbook.core.errors import DataError
from cookbook.core.examples import LabelledCompletion, Message, PreferencePair
from cookbook.data.bad_rows import BadRows
from cookbook.data.chat.rows import ROLES, BadRow, parse_row
from cookbook.data.files import Row, Split, read_folder, read_hub
from cookbook.data.generated.base import GeneratedSequence
from cookbook.data.kinds import PreferenceDataset

T = TypeVar("T")

OnBadRow = Literal["skip", "fail"]

Messages = tuple[Message, ...]

HH_TURN = re.compile(r"\n\n(Human|Assistant):")
"""What a turn of HH-RLHF's text begins with."""


class PreferencePairs:
    """Pairs from rows with a better and a worse completion, all read when it is made. `parse_pair` says what a row may be.

    Args:
        name: Prefix of the pairs' ids (`<name>/<split>/<row>`, counted from 0 with the skipped rows).
        path: A local folder with `train.jsonl` and `test.jsonl`, or `train*.parquet` and `test*.parquet`.
        hub_id: Dataset on the Hugging Face hub, read when `path` is None.
        hub_config: Its configuration, where it has several.
        train_split: Name of the split to learn from, on the hub or as the beginning of the files' names.
        test_split: Name of the held-out split.
        prompt_column: Column of the prompt.
        chosen_column: Column of the better completion.
        rejected_column: Column of the worse completion.
        min_score_gap: Leave out pairs whose `score_chosen` is not this much above `score_rejected`, and count them in `too_close`;
            None keeps all and reads no scores.
        on_bad_row: "skip" leaves a row that is no valid pair out and counts it in `bad_rows`; "fail" stops at the first.
        train_size: Keep only the first pairs of `train`; None keeps all.
        test_size: The same for `test`.

    Raises:
        DataError: nothing to read, a file that is no valid JSONL or Parquet, a bad row where `on_bad_row` is "fail", or a
            split without a single pair. The message names the file and line.
    """

    def __init__(
        self,
        *,
        name: str = "preference",
        path: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        train_split: str = "train",
        test_split: str = "test",
        prompt_column: str = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        min_score_gap: float | None = None,
        on_bad_row: OnBadRow = "skip",
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        self.bad_rows = BadRows()
        self.too_close = 0

        def parse(row_id: str, place: str, row: Mapping[str, Any]) -> PreferencePair | None:
            prompt, chosen, rejected = parse_pair(row, prompt_column, chosen_column, rejected_column)
            if (
                min_score_gap is not None
                and _number(row, "score_chosen") - _number(row, "score_rejected") < min_score_gap
            ):
                self.too_close += 1
                return None
            return PreferencePair(row_id, prompt, chosen, rejected, place)

        def read(split: Split, split_name: str, size: int | None) -> list[PreferencePair]:
            rows = _rows(name, path, hub_id, hub_config, split_name)
            return _read_split(name, split, rows, path, parse, self.bad_rows, on_bad_row, size)

        self.train: Sequence[PreferencePair] = read("train", train_split, train_size)
        self.test: Sequence[PreferencePair] = read("test", test_split, test_size)


class LabelledCompletions:
    """Completions from rows with a prompt, a completion and a label (KTO), all read when it is made. Prompt and completion are texts
    or lists of messages; the label is true, false, 1 or 0.

    Args, but for `label_column`, and errors are those of `PreferencePairs`.
    """

    def __init__(
        self,
        *,
        name: str = "kto",
        path: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        train_split: str = "train",
        test_split: str = "test",
        prompt_column: str = "prompt",
        completion_column: str = "completion",
        label_column: str = "label",
        on_bad_row: OnBadRow = "skip",
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        self.bad_rows = BadRows()

        def parse(row_id: str, place: str, row: Mapping[str, Any]) -> LabelledCompletion:
            prompt, completion = (
                _prompt_items(_column(row, prompt_column), prompt_column),
                _column(row, completion_column),
            )
            answer = _answer_items(completion, completion_column)
            messages = _checked(row, [*prompt, *answer])
            label = _column(row, label_column)
            if label not in (True, False):  # which 1 and 0 equal
                raise BadRow("malformed label", f"column {label_column!r} is {label!r:.60}, not true or false")
            length = len(messages) - len(answer)
            if messages[length]["role"] != "assistant":
                raise BadRow(
                    "roles out of order",
                    f"column {completion_column!r} begins with a {messages[length]['role']} message",
                )
            return LabelledCompletion(row_id, messages[:length], messages[length:], bool(label), place)

        def read(split: Split, split_name: str, size: int | None) -> list[LabelledCompletion]:
            rows = _rows(name, path, hub_id, hub_config, split_name)
            return _read_split(name, split, rows, path, parse, self.bad_rows, on_bad_row, size)

        self.train: Sequence[LabelledCompletion] = read("train", train_split, train_size)
        self.test: Sequence[LabelledCompletion] = read("test", test_split, test_size)


class Unpaired:
    """Pairs as labelled completions: item 2i is the chosen one of pair i, desirable; item 2i + 1 the rejected one, undesirable."""

    def __init__(self, pairs: PreferenceDataset) -> None:
        self.bad_rows = pairs.bad_rows
        self.train: Sequence[LabelledCompletion] = _unpaired(pairs.train)
        self.test: Sequence[LabelledCompletion] = _unpaired(pairs.test)


def mismatched(batch: Sequence[LabelledCompletion]) -> list[LabelledCompletion]:
    """Each prompt of a batch with the completion of the next, the last with that of the first: KTO's baseline is estimated from
    these (Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1). Their label is that of the prompt's own completion.

    Raises:
        DataError: the batch has fewer than two examples.
    """
    if len(batch) < 2:
        raise DataError(
            f"KTO's mismatched baseline needs 2 or more examples in a batch, not {len(batch)}; or set loss.baseline=zero"
        )
    return [
        LabelledCompletion(f"{one.id}/mismatched", one.prompt, other.completion, one.desirable, one.source)
        for one, other in zip(batch, [*batch[1:], batch[0]], strict=True)
    ]


def parse_pair(
    row: Mapping[str, Any],
    prompt_column: str = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
) -> tuple[Messages, Messages, Messages]:
    """Prompt, chosen and rejected messages of a row. What its two completions may be:

    * lists of messages that are whole conversations; a prompt column beside them is not read, since they contain it (UltraFeedback);
    * lists of messages that begin with the assistant's, or texts, and a prompt column: a text or a list of messages;
    * texts "\\n\\nHuman: ...\\n\\nAssistant: ..." and no prompt column (HH-RLHF): whole conversations.

    The prompt is the longest beginning that the two conversations share; what follows it are the completions.

    Raises:
        BadRow: a missing column, a conversation that `cookbook.data.chat.rows.parse_row` refuses, equal completions, one
            that is the beginning of the other, or prompts that differ.
    """
    conversations = []
    for column in (chosen_column, rejected_column):
        value, prompt = _column(row, column), row.get(prompt_column)
        if isinstance(value, str) and prompt is None:
            items = _hh_items(value, column)
        else:
            items = _answer_items(value, column)
            if prompt is not None and _is_assistants(items[0]):
                items = [*_prompt_items(prompt, prompt_column), *items]
        conversations.append(_checked(row, items))
    chosen, rejected = conversations
    if chosen == rejected:
        raise BadRow("chosen equals rejected", f"columns {chosen_column!r} and {rejected_column!r}")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    for column, conversation in ((chosen_column, chosen), (rejected_column, rejected)):
        if shared == len(conversation):
            raise BadRow("no completion", f"{column!r} is the beginning of the other conversation")
        role = conversation[shared]["role"]
        if role != "assistant":
            raise BadRow(
                "prompts differ",
                f"{chosen_column!r} and {rejected_column!r} part at message {shared + 1}, one of {role}",
            )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _unpaired(pairs: Sequence[PreferencePair]) -> Sequence[LabelledCompletion]:
    def make(index: int) -> LabelledCompletion:
        pair, desirable = pairs[index // 2], index % 2 == 0
        label, completion = ("chosen", pair.chosen) if desirable else ("rejected", pair.rejected)
        return LabelledCompletion(f"{pair.id}/{label}", pair.prompt, completion, desirable, pair.source)

    return GeneratedSequence(make, 2 * len(pairs))


def _rows(name: str, path: str | None, hub_id: str | None, hub_config: str | None, split_name: str) -> Iterator[Row]:
    if path is not None:
        return read_folder(Path(path).expanduser(), split_name, hub_config)
    if hub_id is not None:
        return read_hub(hub_id, hub_config, split_name)
    raise DataError(f"dataset {name}: neither dataset.path nor dataset.hub_id is set; set one of them")


def _read_split(
    name: str,
    split: Split,
    rows: Iterator[Row],
    path: str | None,
    parse: Callable[[str, str, Mapping[str, Any]], T | None],
    bad_rows: BadRows,
    on_bad_row: OnBadRow,
    size: int | None,
) -> list[T]:
    """The first `size` good rows, parsed; `parse(id, place, row)` returns None for a row to leave out that is not bad."""
    if on_bad_row not in ("skip", "fail"):
        raise DataError(f"dataset.on_bad_row={on_bad_row}: must be skip (leave the row out and count it) or fail")
    if size is not None and size < 1:
        raise DataError(f"dataset.{split}_size={size}: must be at least 1, or null for all rows")
    items: list[T] = []
    for index, (where, row) in enumerate(rows):
        if len(items) == size:
            break
        place = where if path is None else where.removeprefix(f"{Path(path).expanduser()}/")
        try:
            item = parse(f"{name}/{split}/{index}", place, row)
        except BadRow as error:
            if on_bad_row == "fail":
                raise DataError(f"{where}: {error}; mend the row, or set dataset.on_bad_row=skip") from error
            bad_rows.add(error.problem, place)
            continue
        if item is not None:
            items.append(item)
    if len(items) < (size or 1):
        wanted = "at least one is needed" if size is None else f"dataset.{split}_size={size} wants more; null takes all"
        raise DataError(f"dataset {name}: {len(items)} usable rows in the {split} split ({bad_rows}); {wanted}")
    return items


def _column(row: Mapping[str, Any], column: str) -> Any:
    if row.get(column) is None:
        raise BadRow("missing columns", f"no {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    return row[column]


def _number(row: Mapping[str, Any], column: str) -> float:
    value = _column(row, column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow("malformed score", f"column {column!r} is {value!r:.60}, not a number")
    return value


def _prompt_items(value: Any, column: str) -> list[Any]:
    """A list of messages, a user's text, or text in HH form up to an open "Assistant:"."""
    if not isinstance(value, str):
        return _list(value, column)
    if not value.strip():
        raise BadRow("no prompt", f"column {column!r} is empty")
    if HH_TURN.match(value):
        return _hh_items(re.sub(r"\n\nAssistant:\s*$", "", value), column)
    return [{"role": "user", "content": value}]


def _answer_items(value: Any, column: str) -> list[Any]:
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else _list(value, column)


def _list(value: Any, column: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadRow("no messages", f"column {column!r} is {value!r:.60}, neither text nor a list of messages")
    return value


def _is_assistants(item: Any) -> bool:
    return isinstance(item, Mapping) and ROLES.get(str(item.get("role", item.get("from")))) == "assistant"


def _hh_items(text: str, column: str) -> list[Any]:
    before, *turns = HH_TURN.split(text)
    if before.strip() or not turns:
        raise BadRow(
            "not in HH form",
            rf"column {column!r} is {text!r:.40}; without a prompt column it must begin with '\n\nHuman:'",
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": content.strip()}
        for speaker, content in zip(turns[0::2], turns[1::2], strict=True)
    ]


def _checked(row: Mapping[str, Any], items: list[Any]) -> Messages:
    messages, _ = parse_row({"messages": items, "system": row.get("system")})
    return messages
