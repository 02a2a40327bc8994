"""Tokenizers of base models."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook.backends.base_models import BUNDLED_MODELS, base_model_source
from cookbook.core.errors import BackendError
from cookbook.core.turns import set_generation_eos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Tokenizers:
    """Two copies of a base model's tokenizer, because one must not be used by two threads at once."""

    callers: PreTrainedTokenizerBase
    background: PreTrainedTokenizerBase


def load_tokenizers(base_model: str, given: str | None, client: Any) -> Tokenizers:
    """Load from `given` if it is set, else from a bundled model or a folder of that name, else as the SDK's client
    does.

    Raises:
        BackendError: it could not be loaded.
    """
    from transformers import AutoTokenizer, GenerationConfig

    name = given or base_model
    try:
        if name in BUNDLED_MODELS or given is not None or Path(name).is_dir():
            source = base_model_source(name) if name in BUNDLED_MODELS else name
            tokenizer = AutoTokenizer.from_pretrained(source)
            with suppress(OSError):  # no generation config: the tokenizer's own eos token is the only one
                set_generation_eos(tokenizer, GenerationConfig.from_pretrained(source).eos_token_id)
        else:
            tokenizer = client.get_tokenizer()
    except Exception as error:  # transformers raises nearly any type
        reason = " ".join(str(error).split())[:300]
        raise BackendError(
            f"the tokenizer of base model {base_model!r} could not be loaded from {name!r} ({reason}); "
            "set backend.tokenizer to a folder or hub id that has it"
        ) from error
    return Tokenizers(tokenizer, copy.deepcopy(tokenizer))


def context_length(tokenizers: Tokenizers) -> int | None:
    """The most tokens that the model takes, as its tokenizer says; None where it does not say."""
    from transformers.tokenization_utils_base import LARGE_INTEGER

    longest = tokenizers.callers.model_max_length
    return None if longest > LARGE_INTEGER else int(longest)
