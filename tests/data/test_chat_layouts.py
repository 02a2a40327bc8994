"""What is content of a chat row and what is not: nulls, padding, the names that datasets use, weights."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from cookbook.core.errors import DataError
from cookbook.data.chat.dataset import ChatDataset
from cookbook.data.preference.labelled import LabelledCompletions
from cookbook.data.preference.pairs import PreferencePairs
from cookbook.data.prompts.answers import PromptAnswers
from cookbook.data.source import Source

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi!"}


def tool(name: str, **types: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    result = {"role": "tool", "content": "done", "tool_call_id": "1"}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result, ASSISTANT]


def load(kind: type[Source[Any]], folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[Any]:
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*kind(path=str(folder), on_bad_row="fail", **options).train]


def chats(folder: Path, *rows: dict[str, Any], **options: Any) -> list[list[Any]]:
    return [[*chat.messages] for chat in load(ChatDataset, folder, [*rows], **options)]


def test_a_row_is_read_by_the_columns_that_have_values(tmp_path: Path):
    empty = {"prompt": None, "completion": None, "messages": None, "conversations": None, "instruction": None}
    nameless = {"from": None, "value": None, "weight": None, "tool_calls": None, "reasoning_content": None}
    shared_gpt = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]
    layouts: list[dict[str, Any]] = [
        {"prompt": "Hello", "completion": "Hi!"},
        {"messages": [USER | nameless, ASSISTANT | nameless]},
        {"messages": [], "conversations": shared_gpt},
        {"conversations": [turn | {"role": None, "content": None} for turn in shared_gpt]},
        {"instruction": "Hello", "input": None, "output": "Hi!"},
    ]
    assert chats(tmp_path, *(empty | layout for layout in layouts)) == [[USER, ASSISTANT]] * 5


def test_nulls_that_arrow_adds_are_neither_arguments_nor_fields_of_tools(tmp_path: Path):
    rows = [
        {"messages": called("lookup", city="Oslo", days=2), "tools": [tool("lookup", city="string", days="integer")]},
        {"messages": called("hatch", state="open"), "tools": [tool("hatch", state="string")]},
    ]
    for split in ("train", "test"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    first, second = ChatDataset(path=str(tmp_path), on_bad_row="fail").train
    arguments = [chat.messages[1]["tool_calls"][0]["function"]["arguments"] for chat in (first, second)]
    assert arguments == [{"city": "Oslo", "days": 2}, {"state": "open"}]
    assert [*first.tools, *second.tools] == [*rows[0]["tools"], *rows[1]["tools"]]


def test_a_null_argument_that_json_has_is_kept(tmp_path: Path):
    ((_, call, *_),) = chats(tmp_path, {"messages": called("clock", city=None)})
    assert call["tool_calls"][0]["function"]["arguments"] == {"city": None}


def test_names_of_roles_and_calls_of_other_formats(tmp_path: Path):
    call = {"name": "clock", "arguments": {"city": "Rome"}}
    turns = [("human", "Hello"), ("function_call", json.dumps(call)), ("observation", "4 pm"), ("model", "Hi!")]
    row = {
        "conversations": [{"from": role, "value": value} for role, value in turns],
        "tools": json.dumps([{"name": "clock", "parameters": {}}]),
    }
    (chat,) = load(ChatDataset, tmp_path, [row])
    written = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    assert [*chat.messages] == [USER, written, {"role": "tool", "content": "4 pm"}, ASSISTANT]
    assert chat.tools == ({"type": "function", "function": {"name": "clock", "parameters": {}}},)
    with pytest.raises(DataError, match="malformed tool call: message 2 is a function_call of 'now'"):
        chats(tmp_path, {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "now"}]})


@pytest.mark.parametrize("columns", [{}, {"prompt_column": "instruction", "completion_column": "output"}])
def test_alpacas_input_and_history_are_part_of_the_prompt(tmp_path: Path, columns: dict[str, str]):
    row = {"instruction": "Translate.", "input": "cane", "output": "dog", "history": [["Hello", "Hi!"]]}
    asked = {"role": "user", "content": "Translate.\ncane"}
    assert chats(tmp_path, row, **columns) == [[USER, ASSISTANT, asked, {"role": "assistant", "content": "dog"}]]
    assert chats(tmp_path, row | {"input": "", "history": []}, **columns)[0][0]["content"] == "Translate."


def test_alpacas_input_is_part_of_other_prompts_too(tmp_path: Path):
    row = {
        "instruction": "Translate.",
        "input": "cane",
        "output": "dog",
        "chosen": "dog",
        "rejected": "cat",
        "ok": True,
    }
    asked = ({"role": "user", "content": "Translate.\ncane"},)
    columns = {"completion_column": "output", "label_column": "ok"}
    assert load(PreferencePairs, tmp_path, [row])[0].prompt == asked
    assert load(LabelledCompletions, tmp_path, [row], **columns)[0].prompt == asked
    options = {"name": "t", "prompt_column": "instruction", "answer_column": "output"}
    assert load(PromptAnswers, tmp_path, [row], **options)[0].messages == asked


def test_preference_rows_keep_their_tools_and_may_have_single_messages(tmp_path: Path):
    row = {
        "conversations": [{"from": "human", "value": "Hello"}],
        "chosen": {"from": "gpt", "value": "Hi!"},
        "rejected": {"from": "gpt", "value": "What?"},
        "tools": [tool("clock")],
    }
    (pair,) = load(PreferencePairs, tmp_path, [row])
    assert (pair.prompt, pair.chosen, pair.tools) == ((USER,), (ASSISTANT,), (tool("clock"),))


def test_weights_of_messages(tmp_path: Path):
    rows = [{"messages": [USER, ASSISTANT | {"weight": weight}]} for weight in (0, 1, None)]
    assert [messages[-1].get("weight") for messages in chats(tmp_path, *rows)] == [0, None, None]
    with pytest.raises(DataError, match=r"malformed weight: message 2 has the weight 0\.5"):
        chats(tmp_path, {"messages": [USER, ASSISTANT | {"weight": 0.5}]})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_several_names(tmp_path: Path, name: str):
    assert chats(tmp_path, {"messages": [USER, ASSISTANT | {name: "A greeting."}]}) == [
        [USER, ASSISTANT | {"reasoning_content": "A greeting."}]
    ]
