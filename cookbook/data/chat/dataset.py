"""Chats to learn from: rows of JSONL or Parquet files, or of a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from cookbook.core.errors import DataError
from cookbook.core.examples import Conversation
from cookbook.data.bad_rows import BadRows
from cookbook.data.chat.rows import BadRow, parse_row
from cookbook.data.files import Row, Split, read_file, read_folder, read_hub


class ChatDataset:
    """Conversations in a train and a held-out split, all read when it is made. `chat_rows.parse_row` says what a row may be.

    Args:
        name: Prefix of the conversations' ids (`<name>/<split>/<row>`, counted from 0 with the skipped rows).
        path: A local folder with `train.jsonl` and `test.jsonl`, or `train*.parquet` and `test*.parquet`; or one such file.
        hub_id: Dataset on the Hugging Face hub, read when `path` is None.
        hub_config: Its configuration, where it has several.
        train_split: Name of the split to learn from, on the hub or as the beginning of the files' names.
        test_split: Name of the held-out split; None where there is none.
        prompt_column: Column of the prompt, in rows that have neither `messages` nor `conversations`.
        completion_column: Column of the answer to it.
        test_fraction: Share of the rows that are held out where there is no held-out split (one file, or `test_split` None). A
            hash of its messages decides for each row: their order in the file does not matter, and equal chats stay together.
        on_bad_row: "skip" leaves a row that is no valid conversation out and counts it in `bad_rows`; "fail" stops at the first.
        train_size: Keep only the first conversations of `train`; None keeps all.
        test_size: The same for `test`.

    Raises:
        DataError: nothing to read, a file that is no valid JSONL or Parquet, a bad row where `on_bad_row` is "fail", or a
            split without a single conversation. The message names the file and line.
    """

    def __init__(
        self,
        *,
        name: str = "chat",
        path: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        train_split: str = "train",
        test_split: str | None = "test",
        prompt_column: str = "prompt",
        completion_column: str = "completion",
        test_fraction: float = 0.05,
        on_bad_row: Literal["skip", "fail"] = "skip",
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        if on_bad_row not in ("skip", "fail"):
            raise DataError(f"dataset.on_bad_row={on_bad_row}: must be skip (leave the row out and count it) or fail")
        if not 0 < test_fraction < 1:
            raise DataError(f"dataset.test_fraction={test_fraction}: must be above 0 and below 1")
        self.bad_rows = BadRows()
        self._name, self._on_bad_row = name, on_bad_row
        self._columns = (prompt_column, completion_column)

        source = Path(path).expanduser() if path is not None else None
        if source is not None and source.is_file():
            train, test = _hold_out(self._conversations("train", read_file(source), source.parent), test_fraction)
        else:

            def rows(split: str) -> Iterator[Row]:
                if source is not None:
                    return read_folder(source, split, hub_config)
                if hub_id is not None:
                    return read_hub(hub_id, hub_config, split)
                raise DataError(f"dataset {name}: neither dataset.path nor dataset.hub_id is set; set one of them")

            if test_split is None:
                train, test = _hold_out(self._conversations("train", rows(train_split), source), test_fraction)
            else:
                train = list(self._conversations("train", rows(train_split), source))
                test = list(self._conversations("test", rows(test_split), source))
        where = str(path or hub_id)
        self.train: Sequence[Conversation] = self._first("train", train, train_size, where)
        self.test: Sequence[Conversation] = self._first("test", test, test_size, where)

    def _conversations(self, split: Split, rows: Iterable[Row], folder: Path | None) -> Iterator[Conversation]:
        """The good rows; the bad ones are counted, or stop the reading."""
        for index, (where, row) in enumerate(rows):
            place = where.removeprefix(f"{folder}/")
            try:
                messages, tools = parse_row(row, *self._columns)
            except BadRow as error:
                if self._on_bad_row == "fail":
                    raise DataError(f"{where}: {error}; mend the row, or set dataset.on_bad_row=skip") from error
                self.bad_rows.add(error.problem, place)
                continue
            yield Conversation(f"{self._name}/{split}/{index}", messages, tools, place)

    def _first(
        self, split: Split, conversations: list[Conversation], size: int | None, where: str
    ) -> list[Conversation]:
        if not conversations:
            raise DataError(
                f"dataset {self._name}: the {split} split of {where} holds no conversation ({self.bad_rows})"
            )
        if size is None:
            return conversations
        if not 1 <= size <= len(conversations):
            raise DataError(
                f"dataset.{split}_size={size}: must be from 1 to {len(conversations)}, "
                f"the number of conversations of {where} in {split}; null takes all"
            )
        return conversations[:size]


def _hold_out(conversations: Iterable[Conversation], fraction: float) -> tuple[list[Conversation], list[Conversation]]:
    """Split off those with the smallest hashes: `fraction` of them, at least one, and every copy of one with it."""
    hashed = [(_content_hash(conversation), conversation) for conversation in conversations]
    if not hashed:
        return [], []
    largest = sorted(key for key, _ in hashed)[max(1, round(fraction * len(hashed))) - 1]
    train = [conversation for key, conversation in hashed if key > largest]
    return train, [conversation for key, conversation in hashed if key <= largest]


def _content_hash(conversation: Conversation) -> bytes:
    content = json.dumps(conversation.messages, sort_keys=True, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()
