"""A conversation whose memory has one size: each turn reads what is new, and costs what the first one did."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import InputError
from ..inference.cache_files import read_notes
from ..inference.generation import Generation, messages_text
from ..inference.loading import check_tokens
from ..inference.streams import Reading, continue_stream
from .sessions import model_digest

#: Stands for an answer, to see what a chat template writes behind one.
ANSWER = "◊answer◊"


class Conversation:
    """A conversation by the tokenizer's chat template, after a system message or none.

    Raises:
        InputError: if there is no chat template, or one that does not write answers as they are.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, system: str | None = None) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.reading, self.turns = Reading(), 0
        self._before: tuple[Reading, int] | None = None
        template = json.dumps(tokenizer.chat_template)
        self._facts = {"model": model_digest(model), "template": hashlib.sha256(template.encode()).hexdigest()}
        self._later_turn("")

    def say(self, message: str, *, seed: int = 0, **options: Any) -> Generation:
        """Read a message and answer it, by `continue_stream` with its options. What an interruption leaves stays."""
        if self.turns:
            text = self._later_turn(message)
        else:
            text = messages_text(self._tokenizer, [*self._start, {"role": "user", "content": message}])
        tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        check_tokens(tokens, self._model.config)
        self._before = copy.deepcopy(self.reading), self.turns
        ends: Any = self._model.generation_config.eos_token_id
        if self.turns and self.reading.pending[-1] in (ends if isinstance(ends, list) else [ends]):
            self.reading.pending.pop()  # the template writes it
        self.reading.pending += tokens
        self.turns += 1
        return continue_stream(self._model, self._tokenizer, self.reading, seed=(seed + self.turns) % 2**32, **options)

    def undo(self) -> bool:
        """Take the last turn back; return whether there was one to take back."""
        if self._before is None:
            return False
        (self.reading, self.turns), self._before = self._before, None
        return True

    def save(self, path: Path) -> None:
        """Write the conversation to a file, as `hf_rfa.inference.save_cache` does and with its errors."""
        self.reading.save(path, self._model, {"conversation": {**self._facts, "turns": self.turns}})

    def load(self, path: Path) -> None:
        """Go on with the conversation of a file.

        Raises:
            InputError: if it is damaged, no conversation, or one with another model or template; nothing has changed then.
        """
        reading = Reading.load(path, self._model)
        notes: Any = (read_notes(path) or {}).get("conversation")
        if notes is None:
            raise InputError(f"{path} holds a text that was read, and no conversation.")
        for what, digest in self._facts.items():
            if notes[what] != digest:
                raise InputError(f"{path} is a conversation with another {what}: go on with the one that wrote it.")
        self.reading, self.turns, self._before = reading, notes["turns"], None

    def _later_turn(self, message: str) -> str:
        """Return what the template writes behind an answer, up to where the next one begins."""
        said = [("user", "-"), ("assistant", ANSWER), ("user", message)]
        text = messages_text(self._tokenizer, [{"role": role, "content": content} for role, content in said])
        _, found, later = text.partition(ANSWER)
        if not found:
            raise InputError("the tokenizer's chat template does not write answers as they are.")
        return later
