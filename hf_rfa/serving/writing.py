"""The text of an answer, as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Writing:
    """Turns tokens into text: whole characters, up to where a stop string begins; ``stopped`` says whether one came."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.stopped, self._stops, self._held = False, stops, ""
        self._tokenizer, self._stream = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)

    def put(self, token: int) -> str:
        """Return the text that a token adds; what could be the beginning of a stop string is held back."""
        self._held += self._stream.step(self._tokenizer, token) or ""
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(self._held) - max(map(self._overlap, self._stops), default=0)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def rest(self) -> str:
        """Return what was held back, at the end."""
        return "" if self.stopped else self._held

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end of the text begin a stop string."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n])), 0)
