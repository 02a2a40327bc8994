"""Batches of completions as arrays, for the tests of preference losses."""

from collections.abc import Sequence

import numpy as np
import torch

from cookbook.core.types import Datum, ModelInput


def gradient_of(leaf: torch.Tensor) -> np.ndarray:
    return np.zeros(len(leaf)) if leaf.grad is None else leaf.grad.numpy()


class Batch:
    """Completions as arrays: logprobs, reference logprobs and masks, of which datums and torch logprobs can be made."""

    def __init__(self, lengths: Sequence[tuple[int, int]], weights: Sequence[float], seed: int = 0) -> None:
        """`lengths` are (prompt positions, completion tokens) of each datum."""
        rng = np.random.default_rng(seed)
        sizes = [prompt + completion for prompt, completion in lengths]
        self.masks = [np.arange(size) >= prompt for size, (prompt, _) in zip(sizes, lengths, strict=True)]
        self.logprobs: list[np.ndarray] = [-rng.exponential(2.0, size) for size in sizes]
        # What a datum stores is float32; the formulas see the same numbers.
        self.refs: list[np.ndarray] = [
            (-rng.exponential(2.0, size)).astype(np.float32).astype(np.float64) for size in sizes
        ]
        self.weights = [float(np.float32(weight)) for weight in weights]
        self.extra: list[dict[str, float]] = [{} for _ in sizes]

    def data(self, reference: bool = True) -> list[Datum]:
        return [
            Datum(
                ModelInput.from_ints([0] * len(mask)),
                {
                    "target_tokens": np.zeros(len(mask)),
                    "weights": mask * weight,
                    **({"ref_logprobs": ref} if reference else {}),
                    **{key: np.full(len(mask), value) for key, value in extra.items()},
                },
            )
            for mask, weight, ref, extra in zip(self.masks, self.weights, self.refs, self.extra, strict=True)
        ]

    def run(self, loss, dtype: torch.dtype = torch.float64) -> tuple[float, list[np.ndarray], dict[str, float]]:
        """Value, gradient by each logprob, metrics."""
        leaves = [torch.tensor(values, dtype=dtype, requires_grad=True) for values in self.logprobs]
        value, metrics = loss(self.data(loss.needs_reference), leaves)
        value.backward()
        return value.item(), [gradient_of(leaf) for leaf in leaves], metrics

    def sums(self, index: int) -> tuple[float, float, int]:
        """pi, ref and |y| of one completion."""
        mask = self.masks[index]
        return self.logprobs[index][mask].sum(), self.refs[index][mask].sum(), int(mask.sum())


def pairs(kind: str) -> Batch:
    if kind == "one_token":
        return Batch([(2, 1), (0, 1)], [1.0, 1.0])
    if kind == "empty_prompt":
        return Batch([(0, 4), (0, 2)], [0.3, 0.3])
    batch = Batch([(3, 5), (3, 7), (1, 2), (1, 9)], [0.25, 0.25, 0.75, 0.75])
    if kind == "equal":
        batch.logprobs = [ref.copy() for ref in batch.refs]
        batch.logprobs[1] = batch.refs[1] = np.append(batch.refs[0], [-1.0, -2.0])
    if kind == "chosen_far_above":
        batch.logprobs[1] = batch.logprobs[1] - 1e4
        batch.logprobs[2] = batch.logprobs[2] * 1e-6
    if kind == "rejected_far_above":
        batch.logprobs[0] = batch.logprobs[0] - 1e4
        batch.logprobs[3] = batch.logprobs[3] * 1e-4
    return batch


def kto_batch(kind: str = "random") -> Batch:
    batch = Batch([(3, 5), (0, 7), (1, 1), (2, 4), (3, 7), (0, 5)], [0.25, 0.25, 0.5, 0.125, 1.0, 1.0], seed=3)
    batch.extra = [
        {"desirable": 1},
        {"desirable": 0},
        {"desirable": 1},
        {"desirable": 0},
        {"mismatched": 1},
        {"mismatched": 1},
    ]
    if kind == "positive_baseline":
        batch.logprobs[4] = batch.refs[4] + 1.0
        batch.logprobs[5] = batch.refs[5] - 0.1
    if kind == "equal":
        batch.logprobs = [ref.copy() for ref in batch.refs]
    if kind == "extreme":
        batch.logprobs[0] = batch.refs[0] + 2e3
        batch.logprobs[1] = batch.refs[1] + 2e3
        batch.logprobs[3] = batch.refs[3] - 2e3
    return batch
