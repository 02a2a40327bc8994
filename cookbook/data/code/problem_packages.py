"""Problem packages of programming contests: a folder with problem.yaml, a statement, test data and judges' solutions.

The format is that of https://www.kattis.com/problem-package-format (spec/legacy, whose ICPC subset is spec/legacy-icpc,
and spec/2025-09). What is read of it: pass-fail problems with a program's stdin and stdout, the default output
validator with its flags, and custom output validators that are a single Python file. What cannot be graded so is a bad
row: scoring, interactive, multi-pass and submit-answer problems, validators in other languages or of several files,
flags that differ between groups of test data, tests with arguments or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.data.bad_rows import BadRow
from cookbook.data.code.package_checkers import output_validation
from cookbook.data.code.rows import (
    LARGEST_TEST_BYTES,
    check_language,
    check_max_tests,
    choose_tests,
    make_example,
    memory_limit,
    program_prompt,
    quantity,
    solution_extra,
    stdin_tests,
    time_limit,
)
from cookbook.data.files import Row
from cookbook.data.source import RowDataset, check_fraction, hold_out
from cookbook.sandbox.base import Language
from cookbook.sandbox.problem import CodeProblem, StdinTests

SUFFIXES: dict[str, Language] = {
    ".py": "python",
    ".py3": "python",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cxx": "cpp",
    ".c++": "cpp",
    ".java": "java",
    ".go": "go",
    ".rs": "rust",
    ".js": "javascript",
}
"""Languages by file name, from the specification's table."""


@dataclass(kw_only=True, eq=False, repr=False)
class ProblemPackages(RowDataset[Example]):
    """The packages in a folder; or one package, which then is both the training problem and the held-out one.

    Args:
        path: A package (a folder with `problem.yaml`), or a folder whose subfolders are packages.
        language: What the programs are to be written in; an accepted submission in it is preferred as the gold program.
        statement_language: Which of several statements to take; English, or else the first one, where it is missing.
        max_tests: Tests kept of each problem, samples first, chosen by `rows.choose_tests`; None keeps all.
        test_fraction: Share of the packages to hold out, chosen by a hash of the statement.

    The other options and the errors are those of `RowDataset`; a bad package counts as a bad row.
    """

    kind: ClassVar[str] = "prompts"

    name: str = "problem_packages"
    language: Language = "python"
    statement_language: str = "en"
    max_tests: int | None = None
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_max_tests(self.max_tests)
        check_language(self.language)
        check_fraction(self.test_fraction)
        super().__post_init__()

    def load(self) -> None:
        if self.local is None:
            raise DataError("dataset.path is not set: give a problem package, or a folder of them")
        problems = list(self.items(_packages(self.local)))
        is_package = (self.local / "problem.yaml").is_file()
        train, test = (problems, problems) if is_package else hold_out(problems, self.test_fraction)
        self.train = self.take("train", train, self.train_size)
        self.test = self.take("test", test, self.test_size)

    def parse(self, row: Mapping[str, Any], place: str) -> Example:
        return read_package(row["package"], self.language, self.statement_language, self.max_tests)


def _packages(path: Path) -> Iterator[Row]:
    if (path / "problem.yaml").is_file():
        yield str(path), {"package": path}
        return
    if not path.is_dir():
        raise DataError(f"dataset.path={path} is not a folder; give a problem package, or a folder of them")
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            yield str(folder), {"package": folder}


def read_package(package: Path, language: Language, statement_language: str, max_tests: int | None) -> Example:
    """The problem in the folder `package`.

    Raises:
        BadRow: a file is missing or malformed, or the problem is of a kind that cannot be graded.
    """
    settings = _yaml(package, package / "problem.yaml")
    kinds = settings.get("type") or "pass-fail"
    kinds = set(kinds) if isinstance(kinds, list) else set(str(kinds).split())
    if kinds != {"pass-fail"}:
        raise BadRow("kind of problem that cannot be graded", ", ".join(sorted(map(str, kinds))))
    samples, secret = _cases(package, "sample"), _cases(package, "secret")
    if not secret:
        raise BadRow("no tests", "data/secret has no .in file")
    budget = _Budget()
    chosen = choose_tests(samples, secret, max_tests)
    cases = stdin_tests(
        [(budget.read(package, given), budget.read(package, expected)) for given, expected in chosen], [], None
    ).cases
    flags = _flags(package, settings)
    tolerance, checker = output_validation(_validator(package, settings), flags, cases)

    limits = settings.get("limits") or {}
    if not isinstance(limits, Mapping):
        raise BadRow("malformed problem.yaml", f"limits is {limits!r:.60}")
    seconds, size = quantity(limits.get("time_limit"), "time"), quantity(limits.get("memory"), "memory")
    seconds = _timelimit_file(package) if seconds is None else seconds
    problem = CodeProblem(
        StdinTests(cases, tolerance, checker),
        language,
        time_limit_s=None if seconds is None else time_limit(seconds),
        memory_limit_mb=None if size is None else memory_limit(size),
    )
    shown = [tuple(budget.read(package, file).removesuffix("\n") for file in sample) for sample in samples]
    statement = "\n\n".join(
        [
            _statement(package, statement_language),
            *(
                f"Sample input {n}:\n```\n{given}\n```\nSample output {n}:\n```\n{expected}\n```"
                for n, (given, expected) in enumerate(shown, 1)
            ),
        ]
    )
    extra = _gold(package, language) | {"package": package.name}
    source = settings.get("source")
    return make_example(
        program_prompt(statement, language), problem, extra | ({"source": source} if isinstance(source, str) else {})
    )


class _Budget:
    """Reads files of a package as text, as long as they are not too large together."""

    def __init__(self) -> None:
        self.left = LARGEST_TEST_BYTES

    def read(self, package: Path, file: Path) -> str:
        content = _text(package, file, self.left)
        self.left -= len(content)
        return content


def _text(package: Path, file: Path, largest: int = LARGEST_TEST_BYTES) -> str:
    where = file.relative_to(package)
    try:
        if not file.resolve(strict=True).is_relative_to(package.resolve()):
            raise BadRow("link out of the package", str(where))  # which the specification forbids
        if file.stat().st_size > largest:
            raise BadRow("tests too large", f"{where}; more than {LARGEST_TEST_BYTES >> 20} MiB; set dataset.max_tests")
        return file.read_text(encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise BadRow("missing file", f"{where}: {type(error).__name__}") from error
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", str(where)) from error


def _yaml(package: Path, file: Path) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(_text(package, file))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadRow(f"malformed {file.name}", " ".join(str(error).split())[:120]) from error
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise BadRow(f"malformed {file.name}", f"{settings!r:.60} is not a mapping")
    return settings


def _cases(package: Path, group: str) -> list[tuple[Path, Path]]:
    """Input and answer files of a group and its subgroups, in the order in which they are used: by name."""
    folder = package / "data" / group
    for suffix in ("args", "files"):
        if any(folder.rglob(f"*.{suffix}")):
            raise BadRow("tests with arguments or files", f"data/{group} has a .{suffix}")
    inputs = sorted(folder.rglob("*.in"))
    for file in inputs:
        if not file.with_suffix(".ans").is_file():
            raise BadRow("missing file", f"{file.relative_to(package).with_suffix('.ans')}")
    if orphans := [file for file in folder.rglob("*.ans") if not file.with_suffix(".in").is_file()]:
        raise BadRow("missing file", f"{orphans[0].relative_to(package).with_suffix('.in')}")
    return [(file, file.with_suffix(".ans")) for file in inputs]


def _flags(package: Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments of the output validator: `validator_flags`, and those that the groups of test data agree on."""
    own = settings.get("validator_flags") or ""
    groups = {tuple(str(own).split())} if own else set()
    for file in sorted((package / "data").rglob("*.yaml")):
        if file.name not in ("testdata.yaml", "test_group.yaml"):
            continue
        group = _yaml(package, file)
        for key in ("output_validator_flags", "output_validator_args"):
            if value := group.get(key):
                if not isinstance(value, str | list):
                    raise BadRow(
                        "kind of problem that cannot be graded", f"{file.relative_to(package)}: {key} names a validator"
                    )
                groups.add(tuple(value.split() if isinstance(value, str) else map(str, value)))
    if len(groups) > 1:
        raise BadRow(
            "kind of problem that cannot be graded",
            "groups of test data with different arguments of the output validator",
        )
    return next(iter(groups), ())


def _validator(package: Path, settings: Mapping[str, Any]) -> str | None:
    """The source of the custom output validator; None for the default one."""
    validation = str(settings.get("validation") or "default").split()
    if validation[0] not in ("default", "custom") or validation[1:]:
        raise BadRow("kind of problem that cannot be graded", f"validation: {' '.join(validation)}")
    files = sorted(
        file
        for name in ("output_validator", "output_validators")
        for file in (package / name).rglob("*")
        if file.is_file()
    )
    current = str(settings.get("problem_format_version") or "legacy").startswith("20")
    if validation[0] == "default" and not (current and files):  # before 2023-07 only the setting counts
        return None
    if not files:
        raise BadRow("missing file", "validation is custom, but there is no output validator")
    if len(files) > 1 or files[0].suffix not in (".py", ".py3"):
        names = ", ".join(str(file.relative_to(package)) for file in files[:3])
        raise BadRow("output validator is not one Python file", names)
    return _text(package, files[0])


def _timelimit_file(package: Path) -> float | None:
    """Seconds from DOMjudge's `domjudge-problem.ini` or `.timelimit`: the legacy format has no field for them."""
    if (package / ".timelimit").is_file():
        return quantity(_text(package, package / ".timelimit"), "time")
    if (package / "domjudge-problem.ini").is_file():
        for line in _text(package, package / "domjudge-problem.ini").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "timelimit":
                return quantity(value.strip().strip("'\""), "time")
    return None


def _statement(package: Path, language: str) -> str:
    folders = [package / name for name in ("statement", "problem_statement")]
    files = [
        file for folder in folders for suffix in (".md", ".tex") for file in sorted(folder.glob(f"problem*{suffix}"))
    ]
    if not files:
        raise BadRow("no statement", "there is no problem*.tex or problem*.md in statement/ or problem_statement/")
    by_language = {file.stem.removeprefix("problem").removeprefix(".") or "en": file for file in reversed(files)}
    content = _text(package, by_language.get(language) or by_language.get("en") or files[0]).strip()
    if not content:
        raise BadRow("no statement", "the statement is empty")
    return content


def _gold(package: Path, wanted: Language) -> dict[str, Any]:
    """An accepted submission that is a single file."""
    programs: dict[Language, Path] = {}
    for entry in sorted((package / "submissions" / "accepted").glob("*")):
        files = [entry] if entry.is_file() else [file for file in entry.rglob("*") if file.is_file()]
        if len(files) == 1 and files[0].suffix in SUFFIXES:
            programs.setdefault(SUFFIXES[files[0].suffix], files[0])
    for language in (wanted, *programs):
        if language in programs:
            return solution_extra(_text(package, programs[language]), language)
    return {}
