"""Problems whose tests are asserts: MBPP and HumanEval, as rows and as the real files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.data.code.humaneval import HumanEval
from cookbook.data.code.mbpp import MBPP
from cookbook.data.curriculum import Shuffled
from cookbook.sandbox.problem import AssertTests, CodeProblem
from tests.code_files import humaneval_row, mbpp_row, write_jsonl

SHARED = Path(__file__).parents[3] / "shared" / "data"


def problem_of(example: Example) -> CodeProblem:
    problem = example.extra["problem"]
    assert isinstance(problem, CodeProblem)
    return problem


def passes(example: Example, program: str) -> bool:
    """Runs a program that is known to be harmless, with its tests, in this process."""
    problem = problem_of(example)
    assert isinstance(problem.tests, AssertTests)
    own: dict[str, Any] = {}
    tests: dict[str, Any] = {}
    exec(f"{problem.prelude}\n{program}", own)
    exec(problem.tests.setup, tests)
    tests |= {name: own[name] for name in problem.tests.functions}
    try:
        for statement in problem.tests.tests:
            exec(statement, tests)
    except Exception:
        return False
    return True


def test_mbpp_takes_its_official_splits_from_the_task_ids(tmp_path: Path):
    file = write_jsonl(tmp_path / "mbpp.jsonl", [mbpp_row(task) for task in (1, 10, 11, 510, 511, 600, 601, 974)])
    dataset = MBPP(path=str(file))
    splits = (dataset.train, dataset.test, dataset.validation)
    assert [[example.extra["task_id"] for example in split] for split in splits] == [
        [601, 974],
        [11, 510],
        [1, 10, 511, 600],
    ]
    example = dataset.train[0]
    assert example.id == "mbpp/train/6"
    tests = ("assert double(1) == 2", "assert double(0) == 0", "assert double(-4) == -8")
    assert problem_of(example) == CodeProblem(AssertTests(tests, ("double",)), time_limit_s=10.0)
    content = example.messages[0]["content"]
    assert content.startswith("Write a function to double a number (601).") and all(test in content for test in tests)
    assert "\r" not in example.extra["solution"] and passes(example, example.extra["solution"])
    assert not passes(example, "def double(n):\n    return n")

    harder = MBPP(path=str(tmp_path), challenge_tests=True).train[0]
    assert problem_of(harder).num_tests == 4
    assert "10**9" not in harder.messages[0]["content"]


def test_mbpp_setup_has_the_imports_that_only_the_gold_program_makes(tmp_path: Path):
    size = mbpp_row(
        601,
        code="import sys\r\ndef size(x):\r\n    return sys.getsizeof(x)",
        test_list=["assert size(()) == sys.getsizeof(())"],
    )
    sanitized = mbpp_row(
        602, text=None, prompt="Double it.", test_imports=["import math"], test_list=["assert double(math.pi) > 6"]
    )
    file = write_jsonl(tmp_path / "mbpp.jsonl", [size, sanitized, mbpp_row(11)])
    first, second = MBPP(path=str(file)).train
    assert problem_of(first).tests == AssertTests(("assert size(()) == sys.getsizeof(())",), ("size",), "import sys")
    assert problem_of(second).tests == AssertTests(("assert double(math.pi) > 6",), ("double",), "import math")
    assert all(passes(example, example.extra["solution"]) for example in (first, second))


@pytest.mark.parametrize(
    ("problem", "columns"),
    [
        (
            "tests need the program's own classes",
            {"code": "class Pair: pass\ndef f(p): return 1", "test_list": ["assert f(Pair()) == 1"]},
        ),
        ("tests call no function of the program", {"test_list": ["assert 1 == 1"]}),
        ("not Python", {"code": "def double(n)\n    return n"}),
        ("not Python", {"test_list": ["assert double(1) = 2"]}),
        ("malformed tests", {"test_list": "assert double(1) == 2"}),
        ("no tests", {"test_list": []}),
        ("malformed task_id", {"task_id": "601"}),
        ("missing columns", {"code": None}),
    ],
)
def test_bad_rows_of_mbpp(problem: str, columns: dict[str, Any], tmp_path: Path):
    file = write_jsonl(tmp_path / "mbpp.jsonl", [mbpp_row(11), mbpp_row(601), mbpp_row(602, **columns)])
    assert str(MBPP(path=str(file)).bad_rows) == f"1 row skipped: 1 {problem} (mbpp.jsonl:3)"
    with pytest.raises(DataError, match=r"mbpp\.jsonl:3: "):
        MBPP(path=str(file), on_bad_row="fail")


def humaneval_file(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return str(file)


def test_humaneval_asks_for_a_whole_function_and_keeps_the_prompts_helpers(tmp_path: Path):
    dataset = HumanEval(path=humaneval_file(tmp_path, humaneval_row(0)))
    (example,) = dataset.test
    problem = problem_of(example)
    assert isinstance(problem.tests, AssertTests)
    assert (problem.tests.tests, problem.tests.functions) == (("check(quarter)",), ("quarter",))
    assert problem.prelude == "import math\n\n\ndef half(n):\n    return n / 2"
    assert problem.tests.setup.startswith(problem.prelude) and "def check(candidate):" in problem.tests.setup
    assert "A quarter of n." in example.messages[0]["content"] and "isclose" not in example.messages[0]["content"]
    assert passes(example, example.extra["solution"]) and passes(example, "def quarter(n):\n    return half(n) / 2")
    assert not passes(example, "def quarter(n):\n    pass")


def test_humaneval_has_nothing_to_learn_from_but_another_datasets_problems(tmp_path: Path):
    path = humaneval_file(tmp_path, humaneval_row(0))
    with pytest.raises(DataError, match="no training examples"):
        Shuffled()(HumanEval(path=path).train, 0)
    rows = [mbpp_row(11), mbpp_row(601), mbpp_row(602, test_list=[])]
    dataset = HumanEval(path=path, train=MBPP(path=str(write_jsonl(tmp_path / "mbpp.jsonl", rows))))
    assert ([example.id for example in dataset.train], len(dataset.test)) == (["mbpp/train/1"], 1)
    assert str(dataset.bad_rows) == "1 row skipped: 1 no tests (mbpp.jsonl:3)"


@pytest.mark.parametrize(
    ("problem", "columns"),
    [
        ("no signature", {"entry_point": "third"}),
        ("no tests", {"test": "def verify(candidate): pass"}),
        ("not Python", {"test": "def check(candidate)"}),
        ("not Python", {"prompt": "import\n\ndef quarter(n):\n"}),
        ("no statement", {"prompt": ""}),
    ],
)
def test_bad_rows_of_humaneval(problem: str, columns: dict[str, Any], tmp_path: Path):
    dataset = HumanEval(path=humaneval_file(tmp_path, humaneval_row(0), humaneval_row(1, **columns)))
    assert str(dataset.bad_rows) == f"1 row skipped: 1 {problem} (HumanEval.jsonl.gz:2)"


def test_a_damaged_gzip_file_is_one_clear_line(tmp_path: Path):
    file = Path(humaneval_file(tmp_path, *(humaneval_row(number) for number in range(9))))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"HumanEval\.jsonl\.gz: not readable: EOFError"):
        HumanEval(path=str(file))


@pytest.mark.skipif(
    not (SHARED / "mbpp" / "mbpp.jsonl").is_file(), reason="the real MBPP is not in ../shared/data/mbpp"
)
def test_the_real_mbpp():
    dataset = MBPP(path=str(SHARED / "mbpp"))
    assert [len(split) for split in (dataset.train, dataset.test, dataset.validation)] == [374 - 2, 500 - 1, 100]
    places = ", ".join(f"mbpp.jsonl:{number}" for number in (367, 601, 927))
    assert str(dataset.bad_rows) == f"3 rows skipped: 3 tests need the program's own classes ({places})"
    for example in (*dataset.train, *dataset.test, *dataset.validation):
        tests = problem_of(example).tests
        assert isinstance(tests, AssertTests) and tests.functions and tests.tests
        assert all(f"def {name}" in example.extra["solution"] for name in tests.functions)


@pytest.mark.skipif(
    not (SHARED / "humaneval" / "HumanEval.jsonl.gz").is_file(),
    reason="the real HumanEval is not in ../shared/data/humaneval",
)
def test_the_real_humaneval():
    dataset = HumanEval(path=str(SHARED / "humaneval"), on_bad_row="fail")
    assert (len(dataset.train), len(dataset.test)) == (0, 164)
    for example in dataset.test:
        tests = problem_of(example).tests
        assert isinstance(tests, AssertTests) and tests.functions and tests.tests == (f"check({tests.functions[0]})",)
