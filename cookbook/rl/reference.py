"""Logprobs of a frozen reference policy, computed once per sequence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cookbook.core.clients import SamplingClient
from cookbook.core.datums import with_inputs
from cookbook.core.types import Datum, ModelInput


class ReferenceLogprobs:
    """Adds `ref_logprobs`, the reference's logprob (temperature 1) of each target token, to datums.

    Results are kept by content, in memory and in a file, so that later epochs and a resumed run read the same numbers.
    A last line that a crash cut short is dropped.
    """

    def __init__(self, reference: SamplingClient, file: Path) -> None:
        self._reference = reference
        self._file = file
        self._known: dict[str, np.ndarray] = {}
        if file.exists():
            whole = file.read_text().rpartition("\n")[0]
            for line in whole.splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = np.asarray(entry["logprobs"], dtype=np.float32)
            file.write_text(f"{whole}\n" if whole else "")

    def __call__(self, data: Sequence[Datum]) -> list[Datum]:
        sequences = [full_sequence(datum) for datum in data]
        keys = [
            hashlib.blake2b(np.asarray(sequence.tokens, dtype=np.int64).tobytes(), digest_size=16).hexdigest()
            for sequence in sequences
        ]
        missing = {key: sequence for key, sequence in zip(keys, sequences, strict=True) if key not in self._known}
        # All requests are sent before the first is awaited, so that the backend can batch them.
        futures = {key: self._reference.compute_logprobs(sequence) for key, sequence in missing.items()}
        with self._file.open("a") as stream:
            for key, future in futures.items():
                values = np.asarray(future.result()[1:], dtype=np.float32)
                self._known[key] = values
                stream.write(json.dumps({"key": key, "logprobs": values.tolist()}) + "\n")
        return [with_inputs(datum, ref_logprobs=self._known[key]) for datum, key in zip(data, keys, strict=True)]


def full_sequence(datum: Datum) -> ModelInput:
    """The input and the last target: the sequence that the datum was made from."""
    return datum.model_input.append([int(datum.loss_fn_inputs["target_tokens"][-1])])
