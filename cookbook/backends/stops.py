"""Detection of stop strings, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Watches sequences for one set of stop strings.

    A stop of n bytes lies within the last n tokens, since every token of a text is at least one byte, and it ends in
    the newest one. So text is decoded only when the newest token's own text could end a stop, and then only the tail.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        # A few more, because decoders treat the first token specially.
        self.tail = max(len(stop.encode()) for stop in stops) + 4
        self._may_end: dict[int, bool] = {}

    def found(self, tokens: Sequence[int]) -> bool:
        """Whether the text of `tokens` contains a stop, given that without the newest token it did not."""
        newest = tokens[-1]
        if newest not in self._may_end:
            self._may_end[newest] = self._could_end_a_stop(self._text([newest]))
        if not self._may_end[newest]:
            return False
        tail = self._text(tokens[-self.tail :])
        return any(stop in tail for stop in self._stops)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def _could_end_a_stop(self, text: str) -> bool:
        """Whether a token of this text can hold the last character of a stop.

        So can a part of a character, and a token whose leading space the decoder drops.
        """
        return not text or "\ufffd" in text or any(stop[-1] in text or stop[-1] == " " for stop in self._stops)
