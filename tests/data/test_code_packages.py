"""Problem packages of programming contests, and their output validators as checkers."""

import subprocess
import sys
from pathlib import Path

import pytest

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.data.code import problem_packages
from cookbook.data.code.package_checkers import output_validation
from cookbook.data.code.problem_packages import ProblemPackages
from cookbook.sandbox.problem import CodeProblem, StdinTests
from tests.code_files import DOUBLE, write_package

CASES = (("1\n", "2\n"), ("2\n", "4\n"), ("1000\n", "2000\n"))

VALIDATOR = """\
import sys

number = int(open(sys.argv[1]).read())
answer = int(open(sys.argv[2]).read())
with open(sys.argv[3] + "judgemessage.txt", "w") as message:
    message.write("seen")
if sys.argv[4:] != ["even", "only"]:
    sys.exit(1)
sys.exit(42 if int(input()) in (answer, -answer) else 43)
"""


def problem_of(example: Example) -> CodeProblem:
    problem = example.extra["problem"]
    assert isinstance(problem, CodeProblem)
    return problem


def verdict(checker: str | None, tmp_path: Path, output: str, expected: str = "2\n", given: str = "1\n") -> int:
    """Exit status of a checker: 0 accepts, 1 refuses."""
    assert checker is not None
    for name, content in (
        ("checker.py", checker),
        ("input.txt", given),
        ("expected.txt", expected),
        ("output.txt", output),
    ):
        (tmp_path / name).write_text(content)
    return subprocess.run([sys.executable, "checker.py"], cwd=tmp_path, capture_output=True, timeout=30).returncode


def test_a_package_is_a_problem(tmp_path: Path):
    write_package(tmp_path / "twice")
    dataset = ProblemPackages(path=str(tmp_path / "twice"))
    (example,) = dataset.train
    assert (example.id, dataset.test[0].id) == ("problem_packages/train/0", "problem_packages/test/0")
    assert problem_of(example) == CodeProblem(StdinTests(CASES), memory_limit_mb=512)
    content = example.messages[0]["content"]
    assert content.startswith("\\problemname{Twice}\nPrint twice the number.")
    assert "Sample input 1:\n```\n1\n```\nSample output 1:\n```\n2\n```" in content and "2000" not in content
    assert {key: value for key, value in example.extra.items() if key != "problem"} == {
        "solution": DOUBLE,
        "solution_language": "python",
        "package": "twice",
        "source": "Our Contest",
    }
    swedish = ProblemPackages(path=str(tmp_path / "twice"), statement_language="sv", language="cpp", max_tests=2).train[
        0
    ]
    assert (
        swedish.messages[0]["content"].startswith("\\problemname{Dubbelt}") and "C++" in swedish.messages[0]["content"]
    )
    assert problem_of(swedish) == CodeProblem(StdinTests((CASES[0], CASES[2])), "cpp", memory_limit_mb=512)
    assert swedish.extra["solution_language"] == "cpp"


def test_the_current_format_and_the_time_limits_of_all(tmp_path: Path):
    current = {
        "problem.yaml": "problem_format_version: 2025-09\ntype: [pass-fail]\nlimits: {time_limit: 1.5, memory: 256}\n",
        "problem_statement/problem.en.tex": "",
        "problem_statement/problem.sv.tex": "",
        "statement/problem.en.md": "Print twice the number.\n",
        "output_validator/check.py": VALIDATOR,
        "data/secret/test_group.yaml": "output_validator_args: [even, only]\n",
    }
    write_package(tmp_path / "a", current)
    write_package(tmp_path / "b", {"domjudge-problem.ini": "timelimit='3'\n"})
    write_package(tmp_path / "c", {".timelimit": "4\n"})
    dataset = ProblemPackages(path=str(tmp_path), test_fraction=0.4, on_bad_row="fail")
    assert (len(dataset.train), len(dataset.test)) == (2, 1)
    examples = {example.extra["package"]: example for example in (*dataset.train, *dataset.test)}
    assert [problem_of(examples[name]).time_limit_s for name in "abc"] == [1.5, 3.0, 4.0]
    assert examples["a"].messages[0]["content"].startswith("Print twice the number.")
    tests = problem_of(examples["a"]).tests
    assert isinstance(tests, StdinTests) and verdict(tests.checker, tmp_path, "-2\n") == 0


def test_custom_validators_become_checkers(tmp_path: Path):
    settings = {
        "problem.yaml": "name: Twice\nvalidation: custom\nvalidator_flags: even only\n",
        "output_validators/check/check.py": VALIDATOR,
    }
    write_package(tmp_path / "twice", settings)
    tests = problem_of(ProblemPackages(path=str(tmp_path / "twice")).train[0]).tests
    assert isinstance(tests, StdinTests)
    assert [verdict(tests.checker, tmp_path, output) for output in ("2\n", "-2", "3\n", "no number\n", "")] == [
        0,
        0,
        1,
        1,
        1,
    ]
    _, broken = output_validation("print('accepted')\n", [], CASES)
    assert verdict(broken, tmp_path, "2\n") == 2


WORDS, NUMBERS = (("", "Yes 1.5\n"),), (("", "1.5\n"),)


def test_default_validation_is_the_plain_comparison_where_that_is_the_same():
    assert output_validation(None, [], NUMBERS) == (None, None)
    assert output_validation(None, ["case_sensitive"], WORDS) == (None, None)
    assert output_validation(None, ["case_sensitive", "float_tolerance", "1e-6"], WORDS) == (1e-6, None)
    for flags, cases in (
        ([], WORDS),
        (["space_change_sensitive"], NUMBERS),
        (["float_relative_tolerance", "1e-6"], NUMBERS),
    ):
        tolerance, checker = output_validation(None, flags, cases)
        assert tolerance is None and checker is not None


@pytest.mark.parametrize(
    ("flags", "expected", "accepted", "refused"),
    [
        ("", "Yes 1.5\n", ["yes   1.5", "YES\n1.5\n"], ["yes 1.50", "yes", "yes 1.5 x"]),
        ("case_sensitive space_change_sensitive", "Yes  1\n", ["Yes  1\n"], ["yes  1\n", "Yes 1\n", "Yes  1"]),
        ("float_absolute_tolerance 0.1", "a 100\n", ["A 100.09", "a 1.0e2"], ["a 100.2", "a nan", "a inf", "a b"]),
        ("float_relative_tolerance 0.1", "a 100\n", ["a 109", "a 91"], ["a 111", "a x"]),
        ("float_tolerance 1e-6", "Ja 0.0314\n", ["ja 3.14000000e-2"], ["nej 0.0314"]),
    ],
)
def test_the_default_validator_with_flags(
    flags: str, expected: str, accepted: list[str], refused: list[str], tmp_path: Path
):
    _, checker = output_validation(None, flags.split(), (("", expected),))
    assert [verdict(checker, tmp_path, output, expected) for output in accepted] == [0] * len(accepted)
    assert [verdict(checker, tmp_path, output, expected) for output in refused] == [1] * len(refused)


BAD_PACKAGES = [
    ("missing file", {"problem.yaml": ""}),
    ("malformed problem.yaml", {"problem.yaml": "limits: [\n"}),
    ("malformed problem.yaml", {"problem.yaml": "- a list\n"}),
    ("malformed problem.yaml", {"problem.yaml": "limits: 5\n"}),
    ("kind of problem that cannot be graded", {"problem.yaml": "type: scoring\n"}),
    ("kind of problem that cannot be graded", {"problem.yaml": "type: [pass-fail, interactive]\n"}),
    ("kind of problem that cannot be graded", {"problem.yaml": "validation: custom interactive\n"}),
    (
        "kind of problem that cannot be graded",
        {
            "data/testdata.yaml": "output_validator_flags: case_sensitive\n",
            "data/secret/testdata.yaml": "output_validator_flags: float_tolerance 1\n",
        },
    ),
    ("missing file", {"problem.yaml": "validation: custom\n"}),
    (
        "output validator is not one Python file",
        {"problem.yaml": "validation: custom\n", "output_validators/v.cpp": "int main() {}\n"},
    ),
    ("not Python", {"problem.yaml": "validation: custom\n", "output_validators/v.py": "print 'python 2'\n"}),
    ("malformed validator flags", {"problem.yaml": "validator_flags: float_tolerance much\n"}),
    ("malformed validator flags", {"problem.yaml": "validator_flags: lenient\n"}),
    ("absurd limit", {"problem.yaml": "limits: {time_limit: 0}\n"}),
    ("absurd limit", {"problem.yaml": "limits: {time_limit: 1.0e+9}\n"}),
    ("absurd limit", {"problem.yaml": "limits: {memory: -1}\n"}),
    ("missing file", {"data/secret/01-small.ans": ""}),
    ("missing file", {"data/secret/01-small.in": ""}),
    (
        "no tests",
        {
            name: ""
            for stem in ("01-small", "group/02-large")
            for name in (f"data/secret/{stem}.in", f"data/secret/{stem}.ans")
        },
    ),
    ("tests with arguments or files", {"data/secret/01-small.args": "-v\n"}),
    (
        "no statement",
        {
            "problem_statement/problem.en.tex": "",
            "problem_statement/problem.sv.tex": "",
            "problem_statement/problem.en.pdf": "%PDF",
        },
    ),
    ("tests too large", {"data/secret/01-small.in": "1" * 3000}),
]


@pytest.mark.parametrize(
    ("problem", "files"), BAD_PACKAGES, ids=[f"{number}-{problem}" for number, (problem, _) in enumerate(BAD_PACKAGES)]
)
def test_a_bad_package_is_counted_by_name_or_stops_the_reading(
    problem: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(problem_packages, "LARGEST_TEST_BYTES", 2000)
    for name in ("a", "c"):
        write_package(tmp_path / "set" / name)
    write_package(tmp_path / "set" / "b", files)
    dataset = ProblemPackages(path=str(tmp_path / "set"))
    assert (len(dataset.train), len(dataset.test)) == (1, 1)
    assert str(dataset.bad_rows) == f"1 row skipped: 1 {problem} (b)"
    with pytest.raises(DataError, match="set/b: ") as stopped:
        ProblemPackages(path=str(tmp_path / "set"), on_bad_row="fail")
    assert "\n" not in str(stopped.value)


def test_links_out_of_a_package_and_bytes_that_are_no_text_are_refused(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("2\n")
    for name in "abcd":
        write_package(tmp_path / "set" / name)
    for name, target in (("b", secret), ("c", Path("nowhere"))):
        answer = tmp_path / "set" / name / "data" / "secret" / "01-small.ans"
        answer.unlink()
        answer.symlink_to(target)
    (tmp_path / "set" / "d" / "data" / "secret" / "01-small.ans").write_bytes(b"\xff\xfe")
    write_package(tmp_path / "set" / "e")
    dataset = ProblemPackages(path=str(tmp_path / "set"))
    assert dict(dataset.bad_rows.counts) == {"link out of the package": 1, "missing file": 1, "not UTF-8": 1}


@pytest.mark.parametrize(
    ("path", "message"),
    [(None, "dataset.path is not set"), ("nowhere", "is not a folder"), ("empty", "0 usable rows")],
)
def test_no_package(path: str | None, message: str, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        ProblemPackages(path=path and str(tmp_path / path))
