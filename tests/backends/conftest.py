from pathlib import Path

import pytest

from tests.backends.local_model import save_random_model


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small random model."""
    return save_random_model(Path(tmp_path_factory.mktemp("random-model")))
