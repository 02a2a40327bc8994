"""The layers of the server: the core and the HTTP application name no vendor, and imports point one way."""

import ast
import re
from pathlib import Path

import pytest

import cookbook.serve

ROOT = Path(cookbook.serve.__file__).parent
PACKAGE = "cookbook.serve."
VENDOR = re.compile(r"tinker|openai|tml|sagemaker", re.IGNORECASE)

ALLOWED = {
    "core": {"core"},
    "http": {"core", "http"},
    "adapters": {"core", "http", "adapters"},
    "server": {"core", "http", "adapters"},
    "__main__": {"server"},
    "__init__": set(),
}
"""The parts of the server that each part may import."""


def part_of(path: str) -> str:
    return path.replace("/", ".").split(".")[0]


def imported_parts(source: str) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would escape this test"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {part_of(module.removeprefix(PACKAGE)) for module in modules if module.startswith(PACKAGE)}


def test_imports_are_found_in_every_form():
    source = (
        "import cookbook.serve.http.app\nfrom cookbook.serve import core\nif x:\n from cookbook.serve.server import y"
    )
    assert imported_parts(source) == {"http", "core", "server"}


@pytest.mark.parametrize("file", sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")))
def test_imports_point_towards_the_core(file: str):
    part = part_of(file)
    assert imported_parts((ROOT / file).read_text()) <= ALLOWED[part], f"{part} may import {sorted(ALLOWED[part])}"


@pytest.mark.parametrize("folder", ["core", "http"])
def test_no_vendor_is_named(folder: str):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 3
    for file in files:
        assert VENDOR.search(file.name) is None and VENDOR.findall(file.read_text()) == [], file


def test_the_core_knows_no_http():
    frameworks = re.compile(r"^\s*(?:import|from) (?:fastapi|starlette|uvicorn|pydantic|http)\b", re.MULTILINE)
    for file in (ROOT / "core").rglob("*.py"):
        assert frameworks.findall(file.read_text()) == [], file
