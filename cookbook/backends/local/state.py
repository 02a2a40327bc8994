"""Saved states of the local backend: folders of safetensors and JSON, written under another name and then renamed.

adapter_config.json, adapter_model.safetensors    a LoRA adapter in PEFT's format
config.json, model.safetensors, tokenizer files   or a whole model in transformers' format
value_head.safetensors                            a critic's last layer
optimizer.safetensors                             AdamW moments and step (`save_state` only)
session.json                                      base model, rank, alpha, seed, role
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cookbook.backends.local.lora import LoraWeights
from cookbook.backends.local.model import load_base_model, quiet_transformers
from cookbook.backends.local.training import TrainingSession
from cookbook.backends.local.weights import VALUE_HEAD, FullWeights, TrainableWeights
from cookbook.core.errors import CheckpointError


@dataclass(frozen=True)
class SessionInfo:
    """What a session was made with. `rank` None means that every weight is trained."""

    base_model: str
    rank: int | None
    alpha: float
    seed: int
    role: str


def save_session(folder: Path, info: SessionInfo, session: TrainingSession, with_optimizer: bool) -> None:
    """Write a save, atomically, in place of an earlier one at `folder`."""
    weights = session.weights
    with _written_atomically(folder) as scratch:
        if isinstance(weights, LoraWeights):
            config = weights.config.to_dict()
            # A set in peft, whose order differs between processes.
            config["target_modules"] = sorted(config["target_modules"])
            (scratch / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str))
            save_file(_on_cpu(weights, head=False), scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        else:
            assert isinstance(weights, FullWeights)
            with quiet_transformers(), weights.unrounded() as model:
                model.save_pretrained(scratch)
                weights.base.engine_tokenizer.save_pretrained(scratch)
        if head := _on_cpu(weights, head=True):
            save_file(head, scratch / "value_head.safetensors")
        if with_optimizer:
            save_file(_optimizer_tensors(session), scratch / "optimizer.safetensors")
        (scratch / "session.json").write_text(json.dumps(asdict(info), indent=2))


def read_info(folder: Path) -> SessionInfo:
    """The settings of a saved session.

    Raises:
        CheckpointError: the folder is missing or is not a save of this backend.
    """
    file = folder / "session.json"
    if not file.is_file():
        reason = "holds no session.json, so the local backend did not write it" if folder.is_dir() else "does not exist"
        raise CheckpointError(
            f"saved weights {folder}: the folder {reason}; "
            "give a path that save_state or save_weights_for_sampler returned"
        )
    try:
        return SessionInfo(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"saved weights {folder}: session.json cannot be read ({error})") from error


def load_session(folder: Path, info: SessionInfo, session: TrainingSession, with_optimizer: bool) -> None:
    """Load weights into a session made with `info`; the optimizer is restored or reset.

    Raises:
        CheckpointError: the save is missing, belongs to another base model, rank or alpha, or holds no optimizer.
    """
    saved = read_info(folder)
    for key in ("base_model", "rank", "alpha", "role"):
        if getattr(saved, key) != getattr(info, key):
            raise CheckpointError(
                f"saved weights {folder}: {key} is {getattr(saved, key)!r}, but this session has "
                f"{getattr(info, key)!r}; use the same, or create_training_client_from_state"
            )
    if with_optimizer and not (folder / "optimizer.safetensors").is_file():
        raise CheckpointError(
            f"saved weights {folder}: no optimizer.safetensors (save_weights_for_sampler saves weights only); "
            "use load_state"
        )
    tensors = read_weights(folder, session.weights)
    moments = _load_tensors(folder / "optimizer.safetensors") if with_optimizer else None
    session.weights.load(tensors)
    session.reset_optimizer()
    if moments is not None and int(moments["step"]) > 0:
        for name, parameter in session.weights.parameters.items():
            state = {
                "step": moments["step"].to(parameter.device, copy=True)
            }  # a copy for each, because steps are counted in place
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = moments[f"{moment}.{name}"].to(parameter.device)
            session.optimizer.state[parameter] = state


def read_weights(folder: Path, weights: TrainableWeights) -> Mapping[str, torch.Tensor]:
    """The tensors of a save, by the names of `weights.parameters`, with matching shapes.

    Raises:
        CheckpointError: a tensor is missing or of another shape.
    """
    if isinstance(weights, LoraWeights):
        tensors: dict[str, torch.Tensor] = _load_tensors(folder / "adapter_model.safetensors")
    else:
        tensors = dict(load_base_model(str(folder), torch.device("cpu"), torch.float32).model.named_parameters())
    if (folder / "value_head.safetensors").is_file():
        tensors |= _load_tensors(folder / "value_head.safetensors")
    for name, parameter in weights.parameters.items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            found = tuple(tensors[name].shape) if name in tensors else "missing"
            raise CheckpointError(
                f"saved weights {folder}: tensor {name} is {found}, but this model needs {tuple(parameter.shape)}"
            )
    return tensors


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"saved weights {file.parent}: {file.name} is damaged or missing ({error})") from error


def _optimizer_tensors(session: TrainingSession) -> dict[str, torch.Tensor]:
    tensors = {"step": torch.zeros(())}
    for name, parameter in session.weights.parameters.items():
        state = session.optimizer.state.get(parameter)
        if state:
            tensors["step"] = state["step"].detach().cpu()
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = state[moment].detach().cpu().contiguous()
    return tensors


def _on_cpu(weights: TrainableWeights, head: bool) -> dict[str, torch.Tensor]:
    """The parameters of the value head, or all others."""
    chosen = {name: parameter for name, parameter in weights.parameters.items() if name.startswith(VALUE_HEAD) == head}
    return {name: parameter.detach().cpu().contiguous() for name, parameter in chosen.items()}


@contextlib.contextmanager
def _written_atomically(folder: Path) -> Iterator[Path]:
    """A scratch folder that replaces `folder` if the block succeeds.

    Raises:
        CheckpointError: it cannot be written, as on a full disk.
    """
    scratch = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        yield scratch
        if folder.exists():
            retired = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            folder.rename(retired / folder.name)
            scratch.rename(folder)
            shutil.rmtree(retired)
        else:
            scratch.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be saved ({error}); an earlier save of this name stays") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
