"""Fixtures that several tests of sandboxes use."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.sandbox import local
from cookbook.sandbox.local import LocalSandbox


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty directory that every user may enter, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    made = LocalSandbox(workers=2)
    yield made
    made.close()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSandbox]:
    """On a machine that has no namespaces."""
    monkeypatch.setattr(local, "USE_NAMESPACES", False)
    made = LocalSandbox(workers=1)
    yield made
    made.close()
