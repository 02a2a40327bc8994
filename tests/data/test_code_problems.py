"""Programming problems from rows: one dataset for each published layout, and what is no problem at all."""

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.data.code import livecodebench, rows
from cookbook.data.code.code_contests import CodeContests
from cookbook.data.code.json_problems import TACO, DeepCoder, PrimeIntellectCode
from cookbook.data.code.livecodebench import LiveCodeBench
from cookbook.data.code.rows import choose_tests, quantity
from cookbook.sandbox.problem import CallTests, CodeProblem, StdinTests
from tests.code_files import (
    DOUBLE,
    STARTER,
    code_contests_row,
    compressed,
    deepcoder_row,
    livecodebench_row,
    primeintellect_row,
    taco_row,
    write_jsonl,
)

TWICE = (("0\n", "0\n"), ("1\n", "2\n"), ("2\n", "4\n"))


def problem_of(example: Example) -> CodeProblem:
    problem = example.extra["problem"]
    assert isinstance(problem, CodeProblem)
    return problem


def split_files(folder: Path, *train: dict[str, Any] | str) -> str:
    """`train.jsonl` with these rows and `test.jsonl` with the first good one of TACO."""
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "test.jsonl", [taco_row(99)])
    return str(folder)


def test_taco_stdin_and_function_problems(tmp_path: Path):
    calls = {"fn_name": "double", "inputs": [[1], [[2, 3]]], "outputs": [[2], [[4, 6]]]}
    lines = {"inputs": [["1", "2"]], "outputs": [["3", 4]]}
    path = split_files(
        tmp_path,
        taco_row(0),
        taco_row(1, input_output=json.dumps(calls), starter_code=STARTER, time_limit=None, memory_limit=""),
        taco_row(2, input_output=json.dumps(lines), solutions="[]", difficulty="HARD"),
    )
    stdin, call, listed = TACO(path=path).train
    assert stdin.id == "taco/train/0"
    assert stdin.answer == ""
    assert problem_of(stdin) == CodeProblem(StdinTests(TWICE), time_limit_s=2.0, memory_limit_mb=256)
    assert {key: stdin.extra[key] for key in ("solution", "solution_language", "difficulty", "source")} == {
        "solution": DOUBLE,
        "solution_language": "python",
        "difficulty": "EASY",
        "source": "codechef",
    }
    (message,) = stdin.messages
    assert message["role"] == "user"
    assert message["content"].startswith("Problem 0: read a number and print twice it.")
    assert "stdin" in message["content"] and "```python" in message["content"]

    assert problem_of(call) == CodeProblem(CallTests("double", (((1,), 2), (([2, 3],), [4, 6]))))
    assert STARTER.strip() in call.messages[0]["content"] and "stdin" not in call.messages[0]["content"]
    assert problem_of(listed).tests == StdinTests((("1\n2\n", "3\n4\n"),))
    assert "solution" not in listed.extra

    easy = TACO(path=path, difficulties=["EASY"])
    assert ([example.id for example in easy.train], easy.bad_rows.total) == (["taco/train/0", "taco/train/1"], 0)


def test_outputs_in_lists_of_their_own_are_taken_out_only_if_all_are():
    def cases(outputs: list[Any]) -> Any:
        from cookbook.data.code.json_problems import parse_tests

        tests = parse_tests(None, {"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs}, None, None)
        return [expected for _, expected in tests.cases]

    assert cases([[5], [[7]]]) == [5, [7]]
    assert cases([[5], [6, 7]]) == [[5], [6, 7]]
    assert cases([5, [7]]) == [5, [7]]


def test_deepcoder_takes_all_three_layouts_from_its_configurations(tmp_path: Path):
    functional = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional", "metadata": {"func_name": "total"}}]
    call = [{"type": "function_call", "fn_name": "join", "input": ["a", "b"], "output": ["ab"]}]
    stdin = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    write_jsonl(
        tmp_path / "primeintellect" / "train.jsonl", [deepcoder_row(0), deepcoder_row(1, tests=json.dumps(call))]
    )
    write_jsonl(tmp_path / "taco" / "train.jsonl", [deepcoder_row(2, tests={"inputs": ["1\n"], "outputs": ["2\n"]})])
    rows = [
        deepcoder_row(3, tests=json.dumps(functional)),
        deepcoder_row(4, tests=stdin, metadata=json.dumps({"func_name": ""})),
    ]
    write_jsonl(tmp_path / "lcbv5" / "train.jsonl", rows)
    write_jsonl(tmp_path / "lcbv5" / "test.jsonl", rows[:1])
    write_jsonl(tmp_path / "codeforces" / "test.jsonl", [deepcoder_row(5)])
    dataset = DeepCoder(path=str(tmp_path))
    assert [problem_of(example).tests for example in dataset.train] == [
        StdinTests(TWICE),
        CallTests("join", ((("a", "b"), "ab"),)),
        StdinTests((("1\n", "2\n"),)),
        CallTests("total", ((([1, 2], 3), 6),)),
        StdinTests((("1\n", "2\n"),)),
    ]
    assert [example.id for example in dataset.test] == ["deepcoder/test/0", "deepcoder/test/1"]
    assert dataset.train[0].extra["solution"] == DOUBLE
    assert "`total`" in dataset.train[3].messages[0]["content"]
    assert len(DeepCoder(path=str(tmp_path), train_configs=["taco"]).train) == 1
    with pytest.raises(DataError, match=r"4 usable|5 usable"):
        DeepCoder(path=str(tmp_path), train_size=6)


def test_primeintellect_keeps_a_language_and_holds_problems_out(tmp_path: Path):
    literal = str(
        {
            "language": "python",
            "test_cases": [{"type": "stdin_stdout", "input": "1\n", "output": "2\n", "fn_name": None}],
        }
    )
    good = [primeintellect_row(number) for number in range(10)] + [primeintellect_row(10, verification_info=literal)]
    write_jsonl(tmp_path / "train.jsonl", [*good, primeintellect_row(11, "cpp")])
    dataset = PrimeIntellectCode(path=str(tmp_path), test_fraction=0.2)
    ids = [example.id for example in (*dataset.train, *dataset.test)]
    assert (len(dataset.train), len(dataset.test), len(set(ids)), dataset.bad_rows.total) == (9, 2, 11, 0)
    example = next(example for example in (*dataset.train, *dataset.test) if example.id.endswith("/3"))
    assert problem_of(example) == CodeProblem(StdinTests(TWICE), time_limit_s=1.5, memory_limit_mb=256)
    assert (example.extra["solution"], example.extra["difficulty"]) == (DOUBLE, "7")

    write_jsonl(tmp_path / "train.jsonl", [primeintellect_row(11, "cpp"), *reversed(good)])
    again = PrimeIntellectCode(path=str(tmp_path), test_fraction=0.2)
    assert {example.messages[0]["content"] for example in dataset.test} == {
        example.messages[0]["content"] for example in again.test
    }
    both = PrimeIntellectCode(path=str(tmp_path), languages=["python", "cpp"])
    (cpp,) = [example for example in (*both.train, *both.test) if problem_of(example).language == "cpp"]
    assert "C++" in cpp.messages[0]["content"] and cpp.extra["solution_language"] == "cpp"
    assert len(PrimeIntellectCode(path=str(tmp_path), max_rows=4).train) == 2


def test_livecodebench_reads_private_tests_and_splits_by_date(tmp_path: Path):
    first = [
        livecodebench_row(0, "2023-04-30"),
        livecodebench_row(1, "2024-07-31"),
        livecodebench_row(2, "2024-08-01", functional=True),
    ]
    write_jsonl(tmp_path / "test.jsonl", first)
    plain = json.dumps([{"input": "5", "output": "10", "testtype": "stdin"}])
    write_jsonl(tmp_path / "test2.jsonl", [livecodebench_row(3, "2025-02-01", private_test_cases=plain)])
    dataset = LiveCodeBench(path=str(tmp_path), train_start="2023-05-01")
    assert [example.id for example in (*dataset.train, *dataset.test)] == [
        f"livecodebench/{at}" for at in ("train/1", "test/2", "test/3")
    ]
    stdin, call = problem_of(dataset.train[0]).tests, problem_of(dataset.test[0]).tests
    assert stdin == StdinTests(tuple((str(n), str(2 * n)) for n in range(1, 9)))
    assert call == CallTests("double", tuple(((n,), 2 * n) for n in range(1, 9)))
    assert problem_of(dataset.test[1]).num_tests == 3
    assert STARTER.strip() in dataset.test[0].messages[0]["content"]
    assert (dataset.test[0].extra["source"], dataset.test[0].extra["difficulty"]) == ("leetcode", "easy")
    assert len(LiveCodeBench(path=str(tmp_path / "test.jsonl"), test_end="2024-08-02").test) == 1
    with pytest.raises(DataError, match="test_start=2024-13-01: must be a date"):
        LiveCodeBench(path=str(tmp_path), test_start="2024-13-01")


class Trap:
    """What a hostile pickle would do when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return pytest.fail, ("the pickle was loaded",)


def encoded(pickled: bytes) -> str:
    return base64.b64encode(zlib.compress(pickled)).decode()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (encoded(pickle.dumps(Trap())), "malformed private tests"),
        (encoded(pickle.dumps([json.dumps([])] * 2)), "malformed private tests"),
        (encoded(b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."), "malformed private tests"),
        (encoded(pickle.dumps("[}")), "broken JSON"),
        (compressed([])[:-8], "malformed private tests"),
        ("no base64 at all!", "malformed private tests"),
        (encoded(b"0" * 200_000), "private tests too large"),
    ],
)
def test_private_tests_are_never_unpickled(value: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(livecodebench, "LARGEST_PRIVATE_TESTS", 100_000)
    good = [livecodebench_row(0, "2024-01-01"), livecodebench_row(1, "2025-01-01")]
    write_jsonl(tmp_path / "test.jsonl", [*good, livecodebench_row(2, "2025-01-02", private_test_cases=value)])
    dataset = LiveCodeBench(path=str(tmp_path))
    assert (len(dataset.test), dict(dataset.bad_rows.counts)) == (1, {problem: 1})


def test_code_contests_prefers_a_gold_program_in_the_language(tmp_path: Path):
    rows = [code_contests_row(0), code_contests_row(1, time_limit=None, memory_limit_bytes=0, cf_rating=0)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet")
    write_jsonl(tmp_path / "valid.jsonl", [code_contests_row(2)])
    dataset = CodeContests(path=str(tmp_path), test_split="valid")
    first, second = dataset.train
    cases = tuple((f"{n}\n", f"{2 * n}\n") for n in (1, 2, 3, *range(10, 20)))
    assert problem_of(first) == CodeProblem(StdinTests(cases), time_limit_s=1.5, memory_limit_mb=256)
    assert problem_of(second) == CodeProblem(StdinTests(cases))
    assert (first.extra["solution"], first.extra["rating"], first.extra["difficulty"], "rating" in second.extra) == (
        DOUBLE,
        800,
        7,
        False,
    )
    cpp = CodeContests(path=str(tmp_path), test_split="valid", language="cpp", generated_tests=False).train[0]
    assert (cpp.extra["solution"], cpp.extra["solution_language"]) == ("int main() {}", "cpp")
    assert problem_of(cpp).language == "cpp" and problem_of(cpp).num_tests == 3


def test_capped_tests_are_the_first_public_ones_and_some_at_even_distances():
    assert choose_tests("ab", "0123456789", None) == [*"ab0123456789"]
    assert choose_tests("ab", "0123456789", 12) == [*"ab0123456789"]
    assert choose_tests("ab", "0123456789", 7) == [*"ab13579"]
    assert choose_tests("abcdef", "0123456789", 4) == [*"ab49"]
    assert choose_tests("abcdef", "01", 6) == [*"abcd01"]
    assert choose_tests("", "0123456789", 4) == [*"0369"]
    assert choose_tests("a", "0123456789", 1) == [*"a"]


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("2.0 seconds", 2.0),
        ("1500 ms", 1.5),
        (3, 3.0),
        ("0.5 gigabytes", 500.0),
        ("None", None),
        ("256 megabytes", 256.0),
    ],
)
def test_limits_with_units(given: Any, value: float | None):
    assert quantity(given, "time") == value


BAD_TACO = [
    ("broken JSON", '{"question": "Cut off'),
    ("broken JSON", taco_row(0, input_output='{"inputs": [')),
    ("no tests", taco_row(0, tests=0)),
    ("no tests", taco_row(0, input_output="{}")),
    ("missing columns", taco_row(0, input_output=None)),
    ("numbers of inputs and outputs differ", taco_row(0, input_output={"inputs": ["1", "2"], "outputs": ["1"]})),
    ("malformed test", taco_row(0, input_output={"inputs": [{"n": 1}], "outputs": ["1"]})),
    ("malformed test", taco_row(0, input_output={"inputs": [1], "outputs": [1], "fn_name": "f"})),
    ("malformed test", taco_row(0, input_output=[{"input": "1"}])),
    ("malformed function name", taco_row(0, input_output={"inputs": [[1]], "outputs": [1], "fn_name": "f; import os"})),
    ("unknown kind of test", taco_row(0, input_output=[{"input": "1", "output": "1", "type": "interactive"}])),
    ("no function name", taco_row(0, input_output=[{"input": "1", "output": "1", "testtype": "functional"}])),
    (
        "tests of two kinds",
        taco_row(
            0,
            input_output=[
                {"input": "1", "output": "1"},
                {"input": "1", "output": "1", "type": "function_call", "fn_name": "f"},
            ],
        ),
    ),
    ("malformed tests", taco_row(0, input_output="7")),
    ("no statement", taco_row(0, question=" ")),
    ("not UTF-8", taco_row(0, question="half a character: \ud83d")),
    ("not UTF-8", taco_row(0, input_output={"inputs": ["\ud83d"], "outputs": ["1"]})),
    ("absurd limit", taco_row(0, time_limit="0 seconds")),
    ("absurd limit", taco_row(0, time_limit=-1)),
    ("absurd limit", taco_row(0, time_limit=1e9)),
    ("absurd limit", taco_row(0, time_limit=float("nan"))),
    ("absurd limit", taco_row(0, memory_limit="10000000 gigabytes")),
    ("absurd limit", taco_row(0, memory_limit=0)),
    ("malformed limit", taco_row(0, time_limit="a while")),
    ("too many tests", taco_row(0, tests=50)),
    ("tests too large", taco_row(0, input_output={"inputs": ["1" * 5000], "outputs": ["1"]})),
]


@pytest.mark.parametrize(
    ("problem", "row"), BAD_TACO, ids=[f"{number}-{problem}" for number, (problem, _) in enumerate(BAD_TACO)]
)
def test_a_bad_row_is_counted_with_its_place_or_stops_the_reading(
    problem: str, row: dict[str, Any] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rows, "LARGEST_TESTS", 40)
    monkeypatch.setattr(rows, "LARGEST_TEST_BYTES", 4000)
    path = split_files(tmp_path, taco_row(1), row, taco_row(2))
    dataset = TACO(path=path, max_tests=None)
    assert len(dataset.train) == 2
    assert str(dataset.bad_rows) == f"1 row skipped: 1 {problem} (train.jsonl:2)"
    with pytest.raises(DataError, match=r"train\.jsonl:2: ") as stopped:
        TACO(path=path, max_tests=None, on_bad_row="fail")
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    ("problem", "columns"),
    [
        ("absurd limit", {"time_limit": {"seconds": 0, "nanos": 0}}),
        ("absurd limit", {"time_limit": {"seconds": 10**9}}),
        ("absurd limit", {"memory_limit_bytes": 10**15}),
        ("malformed limit", {"time_limit": "1 s"}),
        ("reads or writes files", {"input_file": "input.txt"}),
        ("numbers of inputs and outputs differ", {"private_tests": {"input": ["1"], "output": []}}),
        ("malformed tests", {"public_tests": {"input": "1", "output": "1"}}),
        ("malformed solutions", {"solutions": ["print(1)"]}),
    ],
)
def test_bad_rows_of_code_contests(problem: str, columns: dict[str, Any], tmp_path: Path):
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [code_contests_row(0), code_contests_row(1, **columns)])
    assert dict(CodeContests(path=str(tmp_path)).bad_rows.counts) == {problem: 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tests": 0}, "dataset.max_tests=0: must be at least 1"),
        ({"train_size": 0}, "dataset.train_size=0: must be at least 1"),
        ({"train_size": 5}, "2 usable rows in the train split .*train_size=5 asks for more"),
        ({"on_bad_row": "ignore"}, "dataset.on_bad_row=ignore"),
        ({"difficulties": ["IMPOSSIBLE"]}, "0 usable rows in the train split .*2 left out"),
        ({"path": None, "hub_id": None}, "neither dataset.path nor dataset.hub_id"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str, tmp_path: Path):
    path = split_files(tmp_path, taco_row(0), taco_row(1))
    with pytest.raises(DataError, match=message):
        TACO(**({"path": path} | settings))
