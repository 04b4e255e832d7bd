"""Memories at the ends of prompts and answers: a text that begins as one of them does goes on from there.

A memory is found by the hash of its tokens, into which the model, the owner's key and a secret go as well: nobody finds what
another owner has said, or another model has read.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..errors import InputError
from ..inference.cache_files import cache_num_bytes, load_cache, read_notes, save_cache
from .rows import copy_row

#: Numbers of each tensor that go into a model's digest.
DIGEST_NUMBERS = 1024
#: Names of files: a key, and a number of tokens.
FILE_NAME = re.compile(r"([0-9a-f]{64})-(\d+)\.memory")

logger = logging.getLogger(__name__)


def model_digest(model: PreTrainedModel) -> str:
    """Return a digest of a model: of its configuration, and of some numbers of every tensor."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // DIGEST_NUMBERS)].float().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


@dataclass
class _Entry:
    """A memory of so many tokens and bytes: in the process where it has a cache, in a file, or both."""

    length: int
    num_bytes: int
    cache: Cache | None = None
    in_file: bool = False


class Sessions:
    """Keeps memories of texts, in the process and then in files. What was used least recently goes first.

    Args:
        model: the model whose memories they are.
        memory: most bytes in the process.
        folder: for files, made if it is not there; None for none. What another process kept there is found again.
        disk: most bytes of the files.
    """

    def __init__(self, model: PreTrainedModel, *, memory: int, folder: Path | None = None, disk: int = 0) -> None:
        self._model, self._memory, self._folder, self._disk = model, memory, folder, disk
        self._digest, self._secret = model_digest(model), secrets.token_bytes(32)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one that was used last comes last
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = folder / "secret"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_bytes(self._secret)
        self._secret = secret.read_bytes()
        for path in sorted(folder.glob("*.memory"), key=lambda path: path.stat().st_mtime):
            if name := FILE_NAME.fullmatch(path.name):
                self._entries[name[1]] = _Entry(int(name[2]), path.stat().st_size, in_file=True)

    def find(self, owner: str, tokens: list[int]) -> Cache | None:
        """Return a copy of the memory of the longest beginning of some tokens, not of all of them; None if there is none."""
        lengths = {entry.length for entry in self._entries.values() if entry.length < len(tokens)}
        keys = [key for key in self._keys(owner, tokens, sorted(lengths)) if key in self._entries]
        for key in reversed(keys):
            entry = self._entries[key]
            cache = self._load(key, entry) if entry.cache is None else entry.cache
            if cache is not None:
                self._entries.move_to_end(key)
                return copy_row(self._model, cache, 0, entry.length, self._model.device)
        return None

    def keep(self, owner: str, tokens: list[int], cache: Cache, *, write: bool = False) -> None:
        """Keep the memory of some tokens, which nobody else may change; in a file at once if it is to outlive the process."""
        (key,) = self._keys(owner, tokens, [len(tokens)])
        entry = self._entries.setdefault(key, _Entry(len(tokens), cache_num_bytes(cache)))
        entry.cache = cache
        self._entries.move_to_end(key)
        if write:
            self._write(key, entry)
        self._fit()

    def close(self) -> None:
        """Write what is in no file yet."""
        self._memory = 0
        self._fit()

    def _keys(self, owner: str, tokens: list[int], lengths: Iterable[int]) -> Iterator[str]:
        """Yield the keys of the beginnings of some lengths, which rise."""
        state = hashlib.blake2b(f"{self._digest}{owner}\0".encode(), key=self._secret, digest_size=32)
        data, done = array("q", tokens), 0
        for length in lengths:
            state.update(data[done:length].tobytes())
            done = length
            yield state.hexdigest()

    def _path(self, key: str, entry: _Entry) -> Path:
        return (self._folder or Path()) / f"{key}-{entry.length}.memory"

    def _write(self, key: str, entry: _Entry) -> None:
        """Put a memory into a file, if there is a folder; a disk that is full costs the memory alone."""
        if self._folder is None or entry.in_file or entry.cache is None or entry.num_bytes > self._disk:
            return
        try:
            save_cache(entry.cache, self._path(key, entry), notes={"key": key})
            entry.in_file = True
        except (OSError, InputError) as error:
            logger.warning("a session is not kept in a file: %s", error)

    def _load(self, key: str, entry: _Entry) -> Cache | None:
        """Return the memory of a file; None if it is torn, or another text's, owner's or model's: then it goes."""
        path = self._path(key, entry)
        try:
            cache = load_cache(path, self._model)
            if read_notes(path) != {"key": key}:
                raise InputError(f"{path} is another session's.")
            path.touch()  # used last, for a later process too
            return cache
        except InputError as error:
            logger.warning("a session is left out: %s", error)
            path.unlink(missing_ok=True)
            del self._entries[key]
            return None

    def _fit(self) -> None:
        """Let go what is too much."""
        memory = sum(entry.num_bytes for entry in self._entries.values() if entry.cache is not None)
        for key, entry in self._entries.items():
            if memory > self._memory and entry.cache is not None:
                self._write(key, entry)
                memory, entry.cache = memory - entry.num_bytes, None
        disk = sum(entry.num_bytes for entry in self._entries.values() if entry.in_file)
        for key, entry in list(self._entries.items()):
            if disk > self._disk and entry.in_file:
                self._path(key, entry).unlink(missing_ok=True)
                disk, entry.in_file = disk - entry.num_bytes, False
            if entry.cache is None and not entry.in_file:
                del self._entries[key]
