"""The text of an answer, as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Writing:
    """Turns tokens into text: whole characters, up to where a stop string begins; ``stopped`` says whether one came."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._begin = self._done = (
            0  # tokens before the first are not looked at any more, and before the second are text
        )
        self._held = ""

    def put(self, token: int) -> str:
        """Return the text that a token adds; what could be the beginning of a stop string is held back."""
        self._tokens.append(token)
        text = self._new_text()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # a part of a character
            return ""
        self._begin, self._done = self._done if text else self._begin, len(self._tokens)
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(self._held) - max(map(self._overlap, self._stops), default=0)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def rest(self) -> str:
        """Return what was held back, at the end."""
        return "" if self.stopped else self._held + self._new_text()

    def _new_text(self) -> str:
        """Return the text behind what is done: of a word a tokenizer writes otherwise at the beginning of a text."""
        before, both = (
            self._tokenizer.decode(self._tokens[self._begin : end], skip_special_tokens=True)
            for end in (self._done, None)
        )
        return both[len(before) :]

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end of the text begin a stop string."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n])), 0)
