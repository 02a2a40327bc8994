"""The arrows between the packages, read from the source, and how large files and functions may become."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

LAYERS = {
    "cookbook.core": "",
    "cookbook.losses": "core",
    "cookbook.sandbox": "core",
    "cookbook.tracking": "core",
    "cookbook.backends": "core losses",
    "cookbook.data": "core sandbox tracking",
    "cookbook.envs": "core sandbox tracking data",
    "cookbook.rl": "core losses sandbox tracking data envs",
    "cookbook.loops": "core losses sandbox tracking data envs rl",
    "cookbook.cli": "core losses sandbox tracking data envs rl loops",
    "cookbook.serve.core": "core losses backends",
    "cookbook.serve.adapters": "core losses backends serve.core serve.http",
    "cookbook.serve.http": "core losses backends serve.core",
    "cookbook.serve": "core losses backends serve.core serve.adapters serve.http",
    "cookbook": "core losses sandbox tracking data envs rl loops cli serve",
}
"""What each package may import of cookbook/, besides itself. A module belongs to the innermost package listed here. The
command line reaches backends only through the `_target_` of a configuration."""


@cache
def modules(*folders: str) -> dict[str, Path]:
    """Every module below `folders`, by its dotted name."""
    found: dict[str, Path] = {}
    for path in (path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, also inside functions and `if TYPE_CHECKING`."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def owner(name: str, packages: dict[str, str]) -> str | None:
    """The innermost of `packages` that holds `name`."""
    return max((package for package in packages if within(name, package)), key=len, default=None)


def importers(package: str, *folders: str) -> set[str]:
    """The modules in which `package` is imported."""
    return {
        module for module, path in modules(*folders).items() if any(within(name, package) for _, name in imports(path))
    }


def arrows(*folders: str) -> dict[str, set[str]]:
    """For each module the project's modules that it imports."""
    known = modules(*folders)
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        graph[module] = set()
        for _, imported in imports(path):
            name = imported
            while name and name not in known:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def between_packages(graph: dict[str, set[str]], parent: str) -> dict[str, set[str]]:
    """The graph between the direct subpackages of `parent`."""
    depth = parent.count(".") + 2
    packages = {path.parent for path in modules("cookbook").values()}
    names = {".".join(path.relative_to(REPOSITORY).parts) for path in packages}
    projected: dict[str, set[str]] = {}
    for module, targets in graph.items():
        source = ".".join(module.split(".")[:depth])
        for target in (".".join(target.split(".")[:depth]) for target in targets):
            if source != target and {source, target} <= names and within(source, parent) and within(target, parent):
                projected.setdefault(source, set()).add(target)
    return projected


def check_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_only_what_lies_below_it(package: str):
    allowed = {package, *(f"cookbook.{name}" for name in LAYERS[package].split())}
    upward = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for module, path in modules("cookbook").items()
        if owner(module, LAYERS) == package
        for line, name in imports(path)
        if within(name, "cookbook") and owner(name, LAYERS) not in allowed
    ]
    assert not upward, "\n".join(upward)


def test_every_package_has_a_layer():
    folders = {path.parent.name for path in (REPOSITORY / "cookbook").glob("*/*.py")}
    assert {f"cookbook.{name}" for name in folders} <= {*LAYERS}


def test_there_is_no_cycle():
    graph = arrows("cookbook", "rewards", "recipes")
    assert sum(map(len, graph.values())) > 200
    check_no_cycle(graph)
    for parent in (
        "cookbook",
        "cookbook.backends",
        "cookbook.data",
        "cookbook.loops",
        "cookbook.serve",
        "cookbook.serve.adapters",
    ):
        check_no_cycle(between_packages(graph, parent))


def test_a_cycle_would_be_found():
    with pytest.raises(pytest.fail.Exception, match="a cycle of imports"):
        check_no_cycle(
            between_packages({"cookbook.rl.x": {"cookbook.data.y"}, "cookbook.data.z": {"cookbook.rl"}}, "cookbook")
        )


def test_rewards_import_only_core_and_sandbox_and_nothing_imports_rewards_or_recipes():
    used = {name for path in modules("rewards").values() for _, name in imports(path) if within(name, "cookbook")}
    assert used
    assert [name for name in used if not (within(name, "cookbook.core") or within(name, "cookbook.sandbox"))] == []
    assert importers("rewards", "cookbook") | importers("recipes", "cookbook", "rewards") == set()


def test_services_and_torch_stay_where_they_belong():
    users = importers("tinker", "cookbook", "rewards")
    assert [name for name in users if not within(name, "cookbook.backends.tinker")] == []
    assert [name for name in importers("torch", "cookbook") if within(name, "cookbook.loops")] == []


def test_one_module_instantiates_and_hydras_inside_is_left_alone():
    shipped = ("cookbook", "rewards", "recipes")
    assert importers("hydra.utils.instantiate", *shipped) == {"cookbook.cli.build"}
    assert importers("hydra._internal", *shipped, "tests") == set()


def test_sizes():
    """A file may have 400 lines and a function 100; cookbook/ itself holds at most six modules."""
    too_long: list[str] = []
    for path in modules("cookbook", "rewards", "recipes", "tests", "benchmarks").values():
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(REPOSITORY)
        if (lines := len(text.splitlines())) > 400:
            too_long.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > 100:
                    too_long.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    assert not too_long, "\n".join(too_long)
    assert len(list((REPOSITORY / "cookbook").glob("*.py"))) <= 6
