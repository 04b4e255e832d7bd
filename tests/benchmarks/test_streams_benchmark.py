"""``benchmarks/streams`` on tiny models: StreamingLLM's rule, losses and windows against loops."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from benchmarks.streams import __main__ as program
from benchmarks.streams import measure
from benchmarks.streams.readers import CacheReader, StreamingLLM
from hf_rfa.convert import convert
from tests.conftest import save_tiny_tokenizer
from tests.decoders import parent
from tests.stream_by_loop import rotated

#: Tokens of a block here.
BLOCK = 40


def by_cache_index(model: Any, ids: Tensor, window: int, sinks: int) -> Tensor:
    """Return the logits [T, vocabulary] of a model in float64 whose every token has a cache evicted and numbered anew.

    Nothing is rotated by the model itself, which reads all tokens at position 0.
    """

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **kwargs: Any):
        frequency = model.model.rotary_emb.inv_freq.double()
        output = torch.zeros_like(query)
        groups = query.shape[1] // key.shape[1]
        cache: list[int] = []
        for t in range(query.shape[2]):
            cache.append(t)
            if len(cache) > sinks + window:
                del cache[sinks]
            for head in range(query.shape[1]):
                q = rotated(query[0, head, t], torch.tensor(len(cache) - 1), frequency)
                k = rotated(key[0, head // groups, cache], torch.arange(len(cache)), frequency)
                output[0, head, t] = (k @ q * scaling).softmax(0) @ value[0, head // groups, cache]
        return output.transpose(1, 2), None

    AttentionInterface.register("by_cache_index", attention)
    model.set_attn_implementation("by_cache_index")
    with torch.no_grad():
        return model(ids[None], position_ids=torch.zeros_like(ids)[None], use_cache=False).logits[0]


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[3] + [1] * 57, [5, 20, 2, 13, 20]], ids=["tokens", "pieces"])
def test_streaming_llm_numbers_keys_by_their_place_in_the_cache(pieces, tmp_path):
    model = parent("llama").double()
    ids = torch.randint(3, 61, (60,))
    reader = StreamingLLM(model, 10, sinks=3)
    logits = []
    for number, piece in enumerate(ids.split(pieces)):
        logits.append(reader.read(piece, len(piece)))
        if number == 2:  # from a file, too
            reader.save(tmp_path / "kept")
            reader = StreamingLLM(model, 10, sinks=3)
            reader.load(tmp_path / "kept")
    assert {kept.keys.shape[2] for kept in reader.kept.values()} == {6}
    torch.testing.assert_close(torch.cat(logits), by_cache_index(model, ids, 7, 3), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_windows_are_read_from_scratch():
    model, ids = parent("llama").double(), torch.randint(3, 61, (90,))
    found = measure.span_nats(model, ids, torch.tensor([30, 71]), 12)
    for start, row in zip((30, 71), found, strict=True):
        lengths = []
        for index in range(9):
            before = ids[start - 8 : start + index]
            lengths.append(len(before))
            nats = -model(before[None]).logits[0, -1].log_softmax(-1)[ids[start + index]]
            assert row[index].item() == pytest.approx(nats.item(), abs=1e-5)
        assert sum(lengths) / 9 == 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    parent("llama", max_position_embeddings=64).save_pretrained(folder / "base")
    save_tiny_tokenizer(folder / "base")
    convert(folder / "base", folder / "rfa", preset="exact", window_size=12, num_sinks=2, num_slots=4)
    words = [f"w{4 + (7 * n * n + n) % 53}" for n in range(400)]
    (folder / "a.txt").write_text(" ".join(words[:150]) + " ")
    (folder / "b.txt").write_text(" ".join(words[150:]))
    return folder


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Blocks and pieces of a few tokens."""
    sizes = {"BLOCK": BLOCK, "LEAST_CONTEXT": 40, "SAVED_EVERY": 3}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(measure, name, value)
        patch.setattr(program, "BLOCK", BLOCK)
        patch.setattr(program, "TOLERANCE", 0.5)
        patch.setattr(CacheReader, "piece", 16)
        patch.setattr(StreamingLLM, "piece", 16)
        yield


def run(*words: Any) -> None:
    """Run a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["streams", *map(str, words)])
        program.main()


def texts(folder: Path, output: Path) -> list[Any]:
    """Return the options that name the texts and the folder of results."""
    return ["--texts", folder / "a.txt", folder / "b.txt", "--output", output]


SOME = ["--tokens", 8 * BLOCK + 7, "--every", 3, "--score-from", 7 * BLOCK]


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory) -> Path:
    """A folder with all measurements, of a stream of eight blocks."""
    output = tmp_path_factory.mktemp("measured")
    stream = texts(folder, output)
    run("softmax", folder / "base", *stream, *SOME)
    run("ours", folder / "base", folder / "rfa", "--memory", 18, *stream, *SOME)
    run("streaming-llm", folder / "base", "--memory", 18, *stream, *SOME)
    run("recomputed", folder / "base", "--memory", 18, "--windows", 8, *stream, *SOME)
    return output


def tokens(folder: Path) -> Tensor:
    """Return the stream's tokens."""
    model = json.loads((folder / "base" / "tokenizer.json").read_text())["model"]["vocab"]
    text = (folder / "a.txt").read_text() + (folder / "b.txt").read_text()
    return torch.tensor([model[word] for word in text.split()])


@torch.no_grad()
def test_a_stream_is_measured_as_one_forward_would(folder, measured, capsys):
    ids = tokens(folder)[: 8 * BLOCK]
    data = json.loads((measured / "streams.json").read_text())
    logits = {"ours-18": AutoModelForCausalLM.from_pretrained(folder / "rfa").eval()(ids[None]).logits[0]}
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    logits["softmax"] = base(ids.view(8, BLOCK)).logits.flatten(0, 1)
    logits["streaming-llm-18"] = StreamingLLM(base, 18).read(ids, len(ids))
    assert list(data["blocks"]) == ["softmax", "ours-18", "streaming-llm-18"]
    nats: dict[str, Tensor] = {}
    for name, rows in data["blocks"].items():
        every = -logits[name][:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        nats[name] = torch.cat([torch.tensor([torch.nan]), every])
        scored = {row["block"]: row["nats"] for row in rows if "nats" in row}
        assert list(scored) == [0, 3, 6, 7]
        for block, mean in scored.items():
            assert mean == pytest.approx(nats[name].view(8, BLOCK)[block, 1:].mean().item(), rel=1e-4)
    assert [row["block"] for row in data["blocks"]["ours-18"]] == list(range(8))

    (first, *_), files = data["windows"], sorted((measured / "recomputed-18").glob("*.pt"))
    (window,) = (torch.load(path) for path in files)
    spans = window["starts"][:, None] + torch.arange(9)
    difference = (nats["ours-18"][spans] - window["nats"]).mean(1)
    assert (first["row"], first["other"], first["windows"]) == ("ours", "recomputed", 8)
    assert first["ratio"] == pytest.approx(difference.mean().exp().item(), rel=1e-4)
    assert first["standard_error"] == pytest.approx(first["ratio"] * difference.std().item() / math.sqrt(8), rel=1e-3)

    capsys.readouterr()
    run("show", measured)
    difference = (nats["ours-18"] - nats["softmax"]).view(8, BLOCK)[[0, 3, 6, 7], 1:]
    ratio = difference.mean().exp().item()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| all |"))
    assert float(line.split("|")[3]) == pytest.approx(ratio, abs=1e-3)
