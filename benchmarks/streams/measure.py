"""What is measured of readers: losses of blocks of a stream, and of windows read from scratch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rfa.process_memory import process_bytes

from ..figures import RowFile
from .readers import CacheReader, Reader

#: Tokens of a block.
BLOCK = 8192
#: Blocks after which what a reader holds is written to disk.
SAVED_EVERY = 8
#: Consecutive tokens that are scored at the end of a window, read at once in a batch of windows.
SPAN, BATCH = 9, 16
#: The first token of a stream that a window may be scored at.
LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class Blocks:
    """Which blocks of a stream are read, and which of them are scored.

    Attributes:
        tokens: of the stream; those after its last whole block are left out.
        every: every how many blocks one is scored.
        score_from: the token from whose block on all are scored; None for nothing more.
    """

    tokens: int
    every: int = 1
    score_from: int | None = None

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self.tokens // BLOCK

    def is_scored(self, block: int) -> bool:
        """Return whether a block is scored."""
        is_late = self.score_from is not None and block >= self.score_from // BLOCK
        return block % self.every == 0 or is_late

    def scored(self) -> list[int]:
        """Return the blocks that are scored."""
        return [block for block in range(len(self)) if self.is_scored(block)]


def read_block(reader: Reader, ids: Tensor, *, scored: bool, advance: Callable[[int], object]) -> Tensor | None:
    """Read a block, [T], and return the nats of its tokens but the first, [T − 1], or None unless it is ``scored``.

    The first token is left out everywhere, since a softmax model that reads the block anew has nothing to predict it from.
    """
    nats = []
    for start in range(0, len(ids), reader.piece):
        piece = ids[start : start + reader.piece]
        logits = reader.read(piece, len(piece) if scored else 1)
        if scored:
            targets = ids[start + 1 : start + 1 + len(piece)]
            nats.append(F.cross_entropy(logits[: len(targets)].float(), targets, reduction="none"))
        advance(len(piece))
    return torch.cat(nats) if scored else None


def save_tensors(tensors: Any, path: Path) -> None:
    """Write tensors to a file, whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save(tensors, partial)
    partial.replace(path)


def last_saved(folder: Path) -> tuple[int, Path | None]:
    """Return the number of blocks that a reader had read when it was written to a folder last, and the file."""
    files = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"after-(\d+)", path.name))}
    return max(files.items(), default=(0, None))


@torch.no_grad()
def read_stream(reader: Reader, ids: Tensor, blocks: Blocks, folder: Path, advance: Callable[[int], object]) -> None:
    """Read a stream, and write a row for every block to ``rows.json``, and the nats of a scored one to ``BLOCK.pt``.

    It goes on from where the reader was written last, to ``after-BLOCKS``: every `SAVED_EVERY` blocks, and at the end.

    Args:
        reader: one that has read nothing.
        ids: the tokens.
        blocks: which are read and scored.
        folder: that of this reader's files.
        advance: is called with the number of tokens that are done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = RowFile(folder / "rows.json")
    done, saved = last_saved(folder)
    if saved is not None:
        reader.load(saved)
    advance(min(len(blocks), done) * BLOCK)
    for block in range(done, len(blocks)):
        row = timed_block(reader, ids, blocks, block, folder, advance)
        if not file.has({"block": block}):
            file.add(row)
        if (block + 1) % SAVED_EVERY == 0 or block + 1 == len(blocks):
            reader.save(folder / f"after-{block + 1}")
            if saved is not None:
                saved.unlink()
            saved = folder / f"after-{block + 1}"


@torch.no_grad()
def read_anew(model: Any, ids: Tensor, blocks: Blocks, folder: Path, advance: Callable[[int], object]) -> None:
    """Read every scored block as a text of its own, and write what `read_stream` does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = RowFile(folder / "rows.json")
    for block in blocks.scored():
        if file.has({"block": block}):
            advance(BLOCK)
        else:
            file.add(timed_block(CacheReader(model), ids, blocks, block, folder, advance))


def timed_block(
    reader: Reader, ids: Tensor, blocks: Blocks, block: int, folder: Path, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Read a block, write its nats, and return its row: seconds, bytes of the process, mean nats."""
    start = time.perf_counter()
    of_block = ids[block * BLOCK : (block + 1) * BLOCK]
    nats = read_block(reader, of_block, scored=blocks.is_scored(block), advance=advance)
    seconds, held = time.perf_counter() - start, process_bytes()
    row = {"block": block, "tokens": BLOCK, "seconds": seconds, "process_bytes": held}
    if nats is not None:
        save_tensors(nats, folder / f"{block}.pt")
        row["nats"] = float(nats.double().mean())
    return row


def window_starts(blocks: Blocks, count: int, seed: int = 0) -> Tensor:
    """Return ``count`` tokens of a stream at which windows are scored from, [count], drawn from blocks that are scored.

    They do not depend on the memory. A larger count has the smaller's first. The tokens of two windows never overlap.
    """
    firsts = [block * BLOCK + 1 for block in blocks.scored()]  # the first token of a block is not scored
    places = [first + SPAN * place for first in firsts for place in range((BLOCK - 1) // SPAN)]
    allowed = torch.tensor([place for place in places if place >= LEAST_CONTEXT])
    order = torch.randperm(len(allowed), generator=torch.Generator().manual_seed(seed))
    return allowed[order[:count]]


def span_nats(model: Any, ids: Tensor, starts: Tensor, memory: int) -> Tensor:
    """Return the nats of `SPAN` tokens from every start on, [N, SPAN], by a model that reads a window before them and them.

    The tokens before the first are ``memory`` − 4, and before the last ``memory`` + 4: ``memory`` in the mean.
    """
    before = memory - SPAN // 2
    windows = torch.stack([ids[start - before : start + SPAN] for start in starts.tolist()])
    logits = model(windows[:, :-1], use_cache=False, logits_to_keep=SPAN).logits.float()
    return F.cross_entropy(logits.transpose(1, 2), windows[:, -SPAN:], reduction="none")


@torch.no_grad()
def read_windows(
    model: Any, ids: Tensor, starts: Tensor, memory: int, folder: Path, advance: Callable[[int], object]
) -> None:
    """Write the nats of windows read from scratch, batch by batch, to ``BATCH.pt`` of a folder; those that are there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(starts.split(BATCH)):
        path = folder / f"{number}.pt"
        if not (path.is_file() and torch.equal(torch.load(path)["starts"], batch)):
            save_tensors({"starts": batch, "nats": span_nats(model, ids, batch, memory)}, path)
        advance(len(batch))


def nats_in_blocks(folder: Path, starts: Tensor) -> Tensor:
    """Return the nats of `SPAN` tokens from every start on as a stream's blocks have them, [N, SPAN], NaN where none has."""
    found = torch.full((len(starts), SPAN), torch.nan)
    for block in set((starts // BLOCK).tolist()):
        path = folder / f"{block}.pt"
        if path.is_file():
            nats = torch.load(path)
            for row in (starts // BLOCK == block).nonzero()[:, 0].tolist():
                first = int(starts[row]) % BLOCK - 1
                found[row] = nats[first : first + SPAN]
    return found
