import json
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from cookbook.core.errors import DataError
from cookbook.data.chat.dataset import ChatDataset
from cookbook.data.generated.small_talk import SKILLS, SYSTEM_PROMPTS, SmallTalk
from cookbook.data.prompts.answers import GSM8K
from cookbook.data.rendering import Renderer
from tests.data.shipped import shipped_dataset

TINY = Path(__file__).parents[2] / "cookbook" / "assets" / "tiny"
GSM8K_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi!"}
SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"city": "Rome"}'}}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}


def write_jsonl(file: Path, rows) -> Path:
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def read_one(folder: Path, row):
    """The row as the first conversation of a dataset that would stop at a bad row."""
    for split in ("train", "test"):
        write_jsonl(folder / f"{split}.jsonl", [row])
    return ChatDataset(path=str(folder), on_bad_row="fail").train[0]


SHAREGPT = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER, ASSISTANT]),
        ({"messages": [USER, ASSISTANT], "prompt": "not this", "completion": "nor this"}, [USER, ASSISTANT]),
        ({"conversations": [{"from": "system", "value": "Be kind."}, *SHAREGPT]}, [SYSTEM, USER, ASSISTANT]),
        ({"system": "Be kind.", "conversations": SHAREGPT}, [SYSTEM, USER, ASSISTANT]),
        ({"prompt": "Hello", "completion": "Hi!"}, [USER, ASSISTANT]),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, [SYSTEM, USER, ASSISTANT]),
        ({"prompt": [USER], "completion": "Hi!"}, [USER, ASSISTANT]),
    ],
)
def test_the_layouts_of_rows(tmp_path: Path, row, messages):
    chat = read_one(tmp_path, row)
    assert list(chat.messages) == messages
    assert (chat.id, chat.source, chat.tools) == ("chat/train/0", "train.jsonl:1", ())


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tool_calls_and_results_are_kept(tmp_path: Path, tools):
    result = {"role": "tool", "content": "8", "tool_call_id": "1", "name": "clock"}
    messages = [SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result, ASSISTANT]
    chat = read_one(tmp_path, {"messages": messages, "tools": tools})
    assert chat.messages[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert chat.messages[3] == result
    assert list(chat.tools) == [TOOL]
    bare = {"role": "assistant", "content": "", "tool_calls": [{"name": "clock", "arguments": {}}]}
    calls = read_one(tmp_path, {"messages": [USER, bare]}).messages[1]["tool_calls"]
    assert calls == [{"type": "function", "function": {"name": "clock", "arguments": {}}}]


BAD_ROWS = [
    (
        {"text": "Hello", "id": 3},
        "missing columns",
        "the row needs messages, or conversations, or prompt and completion; it has text, id",
    ),
    ({"messages": []}, "no messages", "column 'messages' is []"),
    ({"messages": None}, "no messages", "column 'messages' is None"),
    ({"messages": ["Hello"]}, "malformed message", "message 1 is 'Hello'"),
    ({"messages": [USER, SYSTEM, ASSISTANT]}, "roles out of order", "message 2 (system) comes right after user"),
    ({"messages": [USER, USER, ASSISTANT]}, "roles out of order", "message 2 (user) comes right after user"),
    ({"messages": [ASSISTANT, USER, ASSISTANT]}, "roles out of order", "message 1 (assistant) comes first"),
    ({"messages": [USER]}, "no assistant turn", "there are only user messages"),
    ({"messages": [USER, ASSISTANT, USER]}, "no assistant turn at the end", "the last message has the role user"),
    ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty assistant turn", "message 2 has no text"),
    ({"messages": [USER, {"role": "judge", "content": "Guilty"}]}, "unknown role", "message 2 has the role 'judge'"),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]},
        "content is not text",
        "message 2 (assistant)",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]},
        "malformed tool call",
        "message 2",
    ),
    ({"messages": [USER, ASSISTANT], "tools": "[oops"}, "malformed tools", "column 'tools' is not valid JSON"),
]


@pytest.mark.parametrize(("row", "problem", "detail"), BAD_ROWS)
def test_a_bad_row_is_named_with_its_place(tmp_path: Path, row, problem: str, detail: str):
    with pytest.raises(DataError) as failure:
        read_one(tmp_path, row)
    assert str(failure.value).startswith(f"{tmp_path / 'train.jsonl'}:1: {problem}: ")
    assert detail in str(failure.value)
    assert str(failure.value).endswith("; fix the row, or set dataset.on_bad_row=skip")


def test_skipped_rows_are_counted_with_their_places(tmp_path: Path):
    good = {"messages": [USER, ASSISTANT]}
    write_jsonl(tmp_path / "train.jsonl", [good, *(row for row, _, _ in BAD_ROWS), good, *[{"messages": [USER]}] * 3])
    write_jsonl(tmp_path / "test.jsonl", [good])
    dataset = ChatDataset(path=str(tmp_path))
    assert [chat.source for chat in dataset.train] == ["train.jsonl:1", "train.jsonl:16"]
    assert dataset.bad_rows.total == len(BAD_ROWS) + 3
    assert dataset.bad_rows.counts == Counter(problem for _, problem, _ in BAD_ROWS) + Counter({"no assistant turn": 3})
    report = str(dataset.bad_rows)
    assert report.startswith(
        "17 rows skipped: 4 no assistant turn (train.jsonl:9, train.jsonl:17, train.jsonl:18, ...), "
    )
    assert "1 empty assistant turn (train.jsonl:11)" in report


def test_what_no_policy_forgives(tmp_path: Path):
    only_bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": [USER]}])
    with pytest.raises(
        DataError, match=r"0 usable rows in the train split \(1 row skipped: 1 no assistant turn \(bad\.jsonl:1\)\)"
    ):
        ChatDataset(path=str(only_bad))
    with pytest.raises(DataError, match=r"neither dataset\.path nor dataset\.hub_id is set"):
        ChatDataset()
    with pytest.raises(DataError, match=r"must end in \.jsonl, \.jsonl\.gz, \.csv, \.parquet"):
        ChatDataset(path=str(write_jsonl(tmp_path / "chats.txt", [])))
    with pytest.raises(DataError, match="does not exist"):
        ChatDataset(path=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"on_bad_row=ignore"):
        ChatDataset(path=str(tmp_path), on_bad_row="ignore")


def test_one_file_is_split_by_content(tmp_path: Path):
    rows = [
        {"messages": [{"role": "user", "content": f"What is {i // 2}?"}, ASSISTANT]} for i in range(100)
    ]  # each chat twice

    def split(rows):
        dataset = ChatDataset(path=str(write_jsonl(tmp_path / "chats.jsonl", rows)), test_fraction=0.1)
        return [{chat.messages[0]["content"] for chat in part} for part in (dataset.train, dataset.test)], len(
            dataset.test
        )

    (train, test), held_out = split(rows)
    assert held_out == 10
    assert not train & test
    assert split(rows[::-1])[0] == [train, test], "the order of the rows does not matter"
    dataset = ChatDataset(path=str(tmp_path / "chats.jsonl"), train_size=4, test_size=1)
    assert [len(dataset.train), len(dataset.test)] == [4, 1]
    with pytest.raises(DataError, match=r"9\d? usable rows .*dataset\.train_size=99 asks for more"):
        ChatDataset(path=str(tmp_path / "chats.jsonl"), train_size=99)


def test_parquet_with_the_hubs_names_and_empty_columns(tmp_path: Path):
    rows = [{"messages": [USER, {**ASSISTANT, "tool_calls": None}], "tools": None}]
    (tmp_path / "data").mkdir()
    for name in ("train_sft-00000-of-00001", "test_sft-00000-of-00001"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / f"{name}.parquet")
    dataset = ChatDataset(path=str(tmp_path), train_split="train_sft", test_split="test_sft", on_bad_row="fail")
    assert list(dataset.train[0].messages) == [USER, ASSISTANT]
    assert dataset.test[0].id == "chat/test/0"


def test_a_folder_without_a_held_out_split(tmp_path: Path):
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": str(i), "completion": "Hi!"} for i in range(20)])
    dataset = ChatDataset(path=str(tmp_path), test_split=None, test_fraction=0.25)
    assert [len(dataset.train), len(dataset.test)] == [15, 5]
    with pytest.raises(DataError, match="holds no test split"):
        ChatDataset(path=str(tmp_path))


@pytest.mark.skipif(not GSM8K_FOLDER.is_dir(), reason="the GSM8K files are not in ../shared/data/gsm8k")
def test_gsm8k_as_chats():
    dataset = ChatDataset(path=str(GSM8K_FOLDER), prompt_column="question", completion_column="answer", train_size=64)
    assert dataset.bad_rows.total == 0
    assert [len(dataset.train), len(dataset.test)] == [64, 1319]
    assert "####" in dataset.train[63].messages[1]["content"]


@pytest.mark.skipif(not GSM8K_FOLDER.is_dir(), reason="the GSM8K files are not in ../shared/data/gsm8k")
def test_worked_gsm8k_asks_as_gsm8k_does():
    chats = shipped_dataset("worked_gsm8k", path=str(GSM8K_FOLDER), train_size=50, test_size=50)
    problems = GSM8K(path=str(GSM8K_FOLDER), train_size=50, test_size=50)
    for chat, problem in zip([*chats.train, *chats.test], [*problems.train, *problems.test], strict=True):
        answer = {"role": "assistant", "content": problem.extra["solution"]}
        assert (chat.id, chat.messages) == (problem.id, (*problem.messages, answer))


def test_a_template_and_a_system_message(tmp_path: Path):
    rows = [{"task": "Greet", "who": "Ada", "completion": "Hi!", "messages": [USER]}, {"task": "Greet", "who": "Ada"}]
    file = write_jsonl(tmp_path / "chats.jsonl", rows)
    dataset = ChatDataset(path=str(file), test_path=str(file), template="{task} {who}.", system="Be kind.")
    assert [list(chat.messages) for chat in dataset.train] == [
        [SYSTEM, {"role": "user", "content": "Greet Ada."}, ASSISTANT]
    ]
    assert dict(dataset.bad_rows.counts) == {"missing columns": 2}
    own = {"role": "system", "content": "Own."}
    write_jsonl(file, [{"messages": [own, USER, ASSISTANT]}, {"messages": [USER, ASSISTANT], "system": "Own."}])
    for chat in ChatDataset(path=str(file), test_path=str(file), system="Be kind.").train:
        assert list(chat.messages) == [own, USER, ASSISTANT]


def test_presets(tmp_path: Path):
    for split in ("train", "test"):
        write_jsonl(
            tmp_path / f"{split}.jsonl",
            [{"prompt": "x", "prompt_id": "1", "messages": [USER, ASSISTANT], "category": "Chat"}],
        )
    for preset in ("chat", "no_robots"):
        assert shipped_dataset(preset, path=str(tmp_path)).train[0].id == f"{preset}/train/0"
    assert len(shipped_dataset("small_talk").test) == 200


def test_small_talk_is_reproducible_by_index():
    dataset, again = SmallTalk(), SmallTalk(train_size=50)
    assert dataset.train[:50] == list(again.train)
    assert dataset.train[-1] == dataset.train[len(dataset.train) - 1]
    assert SmallTalk(seed=1).train[:20] != dataset.train[:20]
    with pytest.raises(IndexError):
        again.train[50]
    with pytest.raises(DataError, match="test_size=0"):
        SmallTalk(test_size=0)


def test_small_talk_holds_out_chats_in_any_words():
    """No held-out chat is a training chat of any seed: not even with another system prompt."""

    def core(chat):
        return json.dumps([message for message in chat.messages if message["content"] not in SYSTEM_PROMPTS])

    train = {core(chat) for seed in (0, 1) for chat in SmallTalk(seed=seed, train_size=3000).train}
    test = {core(chat) for seed in (0, 1) for chat in SmallTalk(seed=seed, test_size=300).test}
    assert not train & test
    assert len(test) > 250


def test_small_talk_renders_with_the_bundled_model():
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(TINY))
    dataset = SmallTalk(train_size=200)
    roles = Counter()
    for chat in dataset.train:
        tokens, loss_mask = renderer.supervised(chat.messages, "all_assistant", chat.tools)
        assert len(tokens) <= 160
        assert sum(loss_mask) >= 5
        roles.update(
            {message["role"] for message in chat.messages}
            | {"call" for message in chat.messages if "tool_calls" in message}
        )
    assert min(roles[role] for role in ("system", "tool", "call")) > 10
    assert roles["assistant"] == 200
    without = SmallTalk(train_size=200, tool_calls=False).train
    assert not any(message["role"] == "tool" for chat in without for message in chat.messages)
    assert sum(bool(skill.tools) for skill in SKILLS) == 1
