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
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..errors import InputError
from ..inference.cache_files import cache_num_bytes, load_cache, read_notes, save_cache
from .rows import copy_row

#: Numbers of each tensor that go into a model's digest.
DIGEST_NUMBERS = 1024
#: Names of files: the two parts of a key.
FILE_NAME = re.compile(r"([0-9a-f]{64})-(\d+)\.memory")
#: Most memories that wait to be written. A disk that is slower than the answers holds these up, and fills no memory.
MOST_WRITES = 8

logger = logging.getLogger(__name__)


def model_digest(model: PreTrainedModel) -> str:
    """Return a digest of a model: of its configuration, and of some numbers of every tensor."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // DIGEST_NUMBERS)].float().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


class _Key(NamedTuple):
    """A hash of tokens, and their number."""

    digest: str
    length: int


class Sessions:
    """Keeps memories of texts, in the process and then in files. What was used least recently goes first.

    All of it runs in the thread that calls it, but for the writing of files.

    Args:
        model: the model whose memories they are, all of one size.
        memory: most bytes in the process.
        folder: for files, made if it is not there; None for none. What another process kept there is found again.
        disk: most bytes of the files.
    """

    def __init__(self, model: PreTrainedModel, *, memory: int, folder: Path | None = None, disk: int = 0) -> None:
        self._model, self._memory, self._folder, self._disk = model, memory, folder, disk
        self._digest, self._secret = model_digest(model), secrets.token_bytes(32)
        # of each the one that was used, or came, last comes last
        self._caches: OrderedDict[_Key, Cache] = OrderedDict()
        self._writing: OrderedDict[_Key, tuple[Cache, Future[int]]] = OrderedDict()
        self._files: OrderedDict[_Key, int] = OrderedDict()  # their bytes
        self._used = 0  # by all files
        self._writer = ThreadPoolExecutor(1, "sessions")
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = folder / "secret"
        if not secret.exists() or not secret.stat().st_size:
            with NamedTemporaryFile(dir=folder, delete=False) as file:  # which nobody else may read
                file.write(self._secret)
            Path(file.name).replace(secret)
        self._secret = secret.read_bytes()
        for path in sorted(folder.glob("*.memory"), key=lambda path: path.stat().st_mtime):
            if name := FILE_NAME.fullmatch(path.name):
                self._add_file(_Key(name[1], int(name[2])), path.stat().st_size)

    def find(self, owner: str, tokens: list[int]) -> Cache | None:
        """Return a copy of the memory of the longest beginning of some tokens, not of all of them; None if there is none."""
        self._settle()
        keys = chain(self._caches, self._writing, self._files)
        lengths = sorted({key.length for key in keys if key.length < len(tokens)})
        for key in reversed(list(self._keys(owner, tokens, lengths))):
            if (cache := self._get(key)) is not None:
                return copy_row(self._model, cache, 0, key.length, self._model.device)
        return None

    def keep(self, owner: str, tokens: list[int], cache: Cache, *, write: bool = False) -> Future[int] | None:
        """Keep the memory of some tokens, which nobody else may change.

        Args:
            owner: who may find it.
            tokens: what was read.
            cache: the memory of it.
            write: put it into a file at once, so that it outlives the process.

        Returns:
            What ends when the file that is being written is there, or could not be written; None if no file is.
        """
        (key,) = self._keys(owner, tokens, [len(tokens)])
        self._caches[key] = cache
        self._caches.move_to_end(key)
        if write:
            self._write(key, cache)
        while len(self._caches) * cache_num_bytes(cache) > self._memory:
            self._write(*self._caches.popitem(last=False))
        self._settle()
        return self._writing[key][1] if key in self._writing else None

    def close(self) -> None:
        """Write what is in no file yet, and wait for the files."""
        for key, cache in self._caches.items():
            self._write(key, cache)
        self._writer.shutdown()
        self._settle()

    def _keys(self, owner: str, tokens: list[int], lengths: Iterable[int]) -> Iterator[_Key]:
        """Yield the keys of the beginnings of some lengths, which rise."""
        state = hashlib.blake2b(f"{self._digest}{owner}\0".encode(), key=self._secret, digest_size=32)
        data, done = array("q", tokens), 0
        for length in lengths:
            state.update(data[done:length].tobytes())
            done = length
            yield _Key(state.hexdigest(), length)

    def _path(self, key: _Key) -> Path:
        return (self._folder or Path()) / f"{key.digest}-{key.length}.memory"

    def _write(self, key: _Key, cache: Cache) -> None:
        """Have a memory put into a file, if there is a folder and it is in no file."""
        written = key in self._files or key in self._writing
        if self._folder is None or written or cache_num_bytes(cache) > self._disk:
            return
        self._writing[key] = cache, self._writer.submit(self._save, key, cache)
        if len(self._writing) > MOST_WRITES:
            next(iter(self._writing.values()))[1].result()

    def _save(self, key: _Key, cache: Cache) -> int:
        """Write a file, in a thread of its own; return its bytes. A disk that is full costs the memory alone: 0."""
        try:
            save_cache(cache, self._path(key), notes={"key": key.digest})
            return self._path(key).stat().st_size
        except (OSError, InputError, SafetensorError) as error:
            logger.warning("a session is not kept in a file: %s", error)
            return 0

    def _add_file(self, key: _Key, num_bytes: int) -> None:
        self._files[key] = num_bytes
        self._used += num_bytes

    def _settle(self) -> None:
        """Count the files that have been written, and let the first ones go where they are too much."""
        while self._writing and next(iter(self._writing.values()))[1].done():
            key, (_, written) = self._writing.popitem(last=False)
            if written.result():
                self._add_file(key, written.result())
        while self._used > self._disk:
            key, num_bytes = self._files.popitem(last=False)
            self._path(key).unlink(missing_ok=True)
            self._used -= num_bytes

    def _get(self, key: _Key) -> Cache | None:
        """Return a memory that is kept; a file that is torn, or another text's, owner's or model's, goes."""
        for place in (self._caches, self._files):
            if key in place:
                place.move_to_end(key)
        if key in self._caches:
            return self._caches[key]
        if key in self._writing:
            return self._writing[key][0]
        if key not in self._files:
            return None
        path = self._path(key)
        try:
            cache = load_cache(path, self._model)
            if read_notes(path) != {"key": key.digest}:
                raise InputError(f"{path} is another session's.")
            path.touch()  # used last, for a later process too
            return cache
        except InputError as error:
            logger.warning("a session is left out: %s", error)
            path.unlink(missing_ok=True)
            self._used -= self._files.pop(key)
            return None
