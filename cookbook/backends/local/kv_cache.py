"""A key-value cache that is updated in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer


class BlockLayer(CacheLayerMixin):
    """Keys and values of one layer, `[rows, heads, capacity, head_dim]`, of which the first `length` positions are
    filled.

    Appending writes into the block and returns views of it, where concatenation would copy all earlier positions.
    """

    is_sliding = False

    def __init__(self, key_block: torch.Tensor, value_block: torch.Tensor, length: int) -> None:
        super().__init__()
        self.key_block = key_block
        self.value_block = value_block
        self.length = length
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a BlockLayer is created with its storage")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + key_states.shape[-2]
        self.key_block[:, :, self.length : end] = key_states
        self.value_block[:, :, self.length : end] = value_states
        self.length = end
        return self.key_block[:, :, :end], self.value_block[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def resize(self, capacity: int, rows: torch.Tensor | None) -> None:
        self.key_block = self._resized(self.key_block, capacity, rows)
        self.value_block = self._resized(self.value_block, capacity, rows)

    def _resized(self, block: torch.Tensor, capacity: int, rows: torch.Tensor | None) -> torch.Tensor:
        filled = block[:, :, : self.length]
        kept = filled if rows is None else filled.index_select(0, rows)
        resized = kept.new_empty(kept.shape[0], kept.shape[1], capacity, kept.shape[3])
        resized[:, :, : self.length] = kept
        return resized


class BlockCache(Cache):
    """A BlockLayer for each layer of a model, all filled to the same length."""

    def __init__(self, blocks: list[BlockLayer]) -> None:
        super().__init__(layers=list(blocks))
        self.blocks = blocks

    @property
    def capacity(self) -> int:
        return self.blocks[0].key_block.shape[2]

    @property
    def length(self) -> int:
        return self.blocks[0].length

    @classmethod
    def allocate(cls, like: DynamicCache, rows: int, length: int, capacity: int) -> BlockCache:
        """Empty blocks for `rows` rows, whose first `length` positions `place` will fill, for the model that filled
        `like`."""
        blocks = []
        for states in _filled(like):
            keys, values = (each.new_empty(rows, each.shape[1], capacity, each.shape[3]) for each in states)
            blocks.append(BlockLayer(keys, values, length))
        return cls(blocks)

    def place(
        self, prefilled: DynamicCache, source_rows: torch.Tensor, target_rows: torch.Tensor, shifts: torch.Tensor
    ) -> None:
        """Copy prompts out of a right-padded batch: row `source_rows[i]` to row `target_rows[i]`, moved right by
        `shifts[i]`.

        All prompts then end at the same position. To the left of a prompt is a copy of its first position: finite, and
        the attention mask must hide it.
        """
        source = (torch.arange(self.length, device=shifts.device) - shifts[:, None]).clamp(min=0)
        for (keys, values), layer in zip(_filled(prefilled), self.blocks, strict=True):
            for states, block in ((keys, layer.key_block), (values, layer.value_block)):
                placed = states[source_rows[:, None], :, source].transpose(1, 2)
                block[:, :, : self.length].index_copy_(0, target_rows, placed)

    def resize(self, capacity: int, rows: torch.Tensor | None = None) -> None:
        """Move to blocks of another capacity, keeping the filled positions of all rows or of those given."""
        for layer in self.blocks:
            layer.resize(capacity, rows)


def _filled(cache: DynamicCache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer of a cache that a model has filled."""
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise TypeError(
                f"the model filled a cache layer of type {type(layer).__name__}, which is not plain attention"
            )
        yield layer.keys, layer.values
