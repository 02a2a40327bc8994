"""The shipped options of `dataset`, composed as a run composes them."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"


def shipped_config(option: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose(f"dataset/{option}").dataset)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def shipped_dataset(option: str, **values: Any) -> Any:
    return instantiate(shipped_config(option) | values, _convert_="all")
