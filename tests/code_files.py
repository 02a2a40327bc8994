"""Writers of small datasets of programming problems, each in the layout in which the original is published."""

import base64
import gzip
import json
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

DOUBLE = "n = int(input())\nprint(2 * n)\n"
"""A program that is right for the problems of tests on stdin: twice the number."""

STARTER = "class Solution:\n    def double(self, n: int) -> int:\n        "


def write_jsonl(file: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return file


def taco_row(number: int, tests: int = 3, **columns: Any) -> dict[str, Any]:
    pairs = {"inputs": [f"{i}\n" for i in range(tests)], "outputs": [f"{2 * i}\n" for i in range(tests)]}
    return {
        "question": f"Problem {number}: read a number and print twice it.",
        "input_output": json.dumps(pairs),
        "solutions": json.dumps([DOUBLE, "other"]),
        "starter_code": "",
        "difficulty": "EASY",
        "source": "codechef",
        "time_limit": "2.0 seconds",
        "memory_limit": "256.0 megabytes",
    } | columns


def deepcoder_row(number: int, **columns: Any) -> dict[str, Any]:
    tests = [{"type": "stdin_stdout", "fn_name": None, "input": f"{i}\n", "output": f"{2 * i}\n"} for i in range(3)]
    return {
        "problem": f"Problem {number}: print twice the number.",
        "tests": json.dumps(tests),
        "solutions": [f"```python\n{DOUBLE}```"],
    } | columns


def primeintellect_row(number: int, language: str = "python", **columns: Any) -> dict[str, Any]:
    tests = [{"fn_name": None, "input": f"{i}\n", "output": f"{2 * i}\n", "type": "stdin_stdout"} for i in range(3)]
    return {
        "source": "codeforces",
        "task_type": "verifiable_code",
        "prompt": f"Solve problem {number} using the programming language {language}: print twice the number.",
        "gold_standard_solution": f"```{language}\n{DOUBLE}```",
        "verification_info": json.dumps({"language": language, "test_cases": tests}),
        "metadata": json.dumps({"difficulty": "7", "time_limit": "1.5 seconds", "memory_limit": "256.0 megabytes"}),
    } | columns


def compressed(tests: Any) -> str:
    """As LiveCodeBench writes private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def livecodebench_row(number: int, day: str, functional: bool = False, **columns: Any) -> dict[str, Any]:
    kind = "functional" if functional else "stdin"
    public, private = (
        [{"input": str(i), "output": str(2 * i), "testtype": kind} for i in part] for part in ((1, 2), range(3, 9))
    )
    return {
        "question_title": "Twice",
        "question_content": f"Question {number}: twice the number.",
        "platform": "leetcode" if functional else "atcoder",
        "contest_date": f"{day}T00:00:00",
        "starter_code": STARTER if functional else "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(public),
        "private_test_cases": compressed(private),
        "metadata": json.dumps({"func_name": "double"} if functional else {}),
    } | columns


def code_contests_row(number: int, **columns: Any) -> dict[str, Any]:
    def tests(*numbers: int) -> dict[str, list[str]]:
        return {"input": [f"{i}\n" for i in numbers], "output": [f"{2 * i}\n" for i in numbers]}

    return {
        "name": f"{number}_A. Twice",
        "description": f"Problem {number}: print twice the number.",
        "public_tests": tests(1),
        "private_tests": tests(2, 3),
        "generated_tests": tests(*range(10, 20)),
        "solutions": {"language": [1, 2, 3], "solution": ["print 2 * input()", "int main() {}", DOUBLE]},
        "time_limit": {"seconds": 1, "nanos": 500_000_000},
        "memory_limit_bytes": 256_000_000,
        "input_file": "",
        "output_file": "",
        "source": 2,
        "difficulty": 7,
        "cf_rating": 800,
    } | columns


def mbpp_row(task: int, **columns: Any) -> dict[str, Any]:
    return {
        "text": f"Write a function to double a number ({task}).",
        "code": "def double(n):\r\n    return helper(n)\r\ndef helper(n):\r\n    return 2 * n",
        "task_id": task,
        "test_setup_code": "",
        "test_list": ["assert double(1) == 2", "assert double(0) == 0", "assert double(-4) == -8"],
        "challenge_test_list": ["assert double(10**9) == 2 * 10**9"],
    } | columns


def humaneval_row(number: int, **columns: Any) -> dict[str, Any]:
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": (
            "import math\n\n\ndef half(n):\n    return n / 2\n\n\n"
            'def quarter(n: float) -> float:\n    """ A quarter of n. """\n'
        ),
        "entry_point": "quarter",
        "canonical_solution": "    return half(half(n))\n",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert math.isclose(candidate(8), half(4))\n",
    } | columns


def write_package(package: Path, files: Mapping[str, str] | None = None) -> Path:
    """A package that asks for twice the number, with `files` in place of its own, or without those that are ""."""
    own = {
        "problem.yaml": "name: Twice\nsource: Our Contest\nlimits:\n  memory: 512\n",
        "problem_statement/problem.en.tex": f"\\problemname{{Twice}}\nPrint twice the number. ({package.name})\n",
        "problem_statement/problem.sv.tex": "\\problemname{Dubbelt}\n",
        "data/sample/1.in": "1\n",
        "data/sample/1.ans": "2\n",
        "data/secret/01-small.in": "2\n",
        "data/secret/01-small.ans": "4\n",
        "data/secret/group/02-large.in": "1000\n",
        "data/secret/group/02-large.ans": "2000\n",
        "submissions/accepted/twice.cc": "int main() {}\n",
        "submissions/accepted/twice.py": DOUBLE,
        "submissions/wrong_answer/once.py": "print(input())\n",
    }
    for name, content in (own | dict(files or {})).items():
        if content:
            file = package / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
    return package


def write_splits(folder: Path, row: Callable[[int], Mapping[str, Any]]) -> Path:
    for split, first in (("train", 0), ("test", 4)):
        write_jsonl(folder / f"{split}.jsonl", [row(first + number) for number in range(4)])
    return folder


def code_dataset_overrides(option: str, folder: Path) -> list[str]:
    """Writes a small dataset for `dataset=<option>`, four problems in each split, and says how a run finds it."""
    if option == "humaneval":
        test = folder / "humaneval" / "HumanEval.jsonl.gz"
        test.parent.mkdir(parents=True)
        test.write_bytes(
            gzip.compress("".join(json.dumps(humaneval_row(number)) + "\n" for number in range(4)).encode())
        )
        mbpp = write_jsonl(folder / "mbpp.jsonl", [mbpp_row(task) for task in (*range(11, 15), *range(601, 605))])
        return [f"dataset.path={test}", f"dataset.train.path={mbpp}"]
    if option == "mbpp":
        rows = [mbpp_row(task) for task in (*range(11, 15), *range(601, 605))]
        return [f"dataset.path={write_jsonl(folder / 'mbpp.jsonl', rows)}"]
    if option == "livecodebench":
        days = [f"2024-{month:02}-01" for month in range(4, 12)]
        write_jsonl(folder / "test.jsonl", [livecodebench_row(number, day) for number, day in enumerate(days)])
    elif option == "problem_packages":
        for number in range(8):
            write_package(folder / f"twice{number}")
        return [f"dataset.path={folder}", "dataset.test_fraction=0.5"]
    elif option == "primeintellect_code":
        write_jsonl(folder / "train.jsonl", [primeintellect_row(number) for number in range(8)])
        return [f"dataset.path={folder}", "dataset.test_fraction=0.5"]
    else:
        write_splits(folder, {"deepcoder": deepcoder_row, "taco": taco_row, "code_contests": code_contests_row}[option])
    return [f"dataset.path={folder}"]


CODE_DATASETS = (
    "deepcoder",
    "taco",
    "primeintellect_code",
    "livecodebench",
    "code_contests",
    "mbpp",
    "humaneval",
    "problem_packages",
)
