"""Texts of any length: read piece by piece, gone on from, interrupted and kept, with no token lost or doubled."""

from __future__ import annotations

import gzip
import io
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_rfa import InputError
from hf_rfa.evaluation import perplexity
from hf_rfa.inference import Reading, continue_stream, read_stream, streams
from hf_rfa.inference.loading import check_length, position_limit
from hf_rfa.io.text_io import stream_text
from hf_rfa.models.rfa_classes import RFAPreTrainedMixin
from tests.conftest import DEMO_MODEL, DEMO_TEXT, save_tiny_tokenizer, tiny_parent_config, words
from tests.families import WITHOUT_END, make

LENGTH = 300
assert_close = torch.testing.assert_close


@pytest.fixture(scope="module")
def model() -> Any:
    return make("llama", WITHOUT_END)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def _short_cuts(monkeypatch):
    monkeypatch.setattr(streams, "CUT_CHARACTERS", 50)


def ids_of(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


@torch.no_grad()
def greedy(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    """Return the tokens that follow, by calls on the whole text."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, -count:].tolist()


def pieces(text: str, size: int = 37) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("piece_length", [1, 7, 64, 512])
def test_a_text_past_the_positions_is_read_as_in_one_call(model, tokenizer, piece_length):
    text, shown = words(LENGTH), []
    assert model.config.max_position_embeddings < LENGTH
    reading = read_stream(model, tokenizer, pieces(text), piece_length=piece_length, on_tokens=shown.append)
    ids = ids_of(tokenizer, text)
    assert (reading.tokens, reading.pending, reading.unread) == (LENGTH, ids[0, -1:].tolist(), "")
    assert shown == [min(read + piece_length, LENGTH - 1) for read in range(0, LENGTH - 1, piece_length)]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1]
    assert_close(reading.feed(model, 1), expected, atol=1e-4, rtol=1e-4)
    assert (reading.pending, reading.tokens_read) == ([], LENGTH)


def test_writing_on_gives_what_calls_on_the_whole_text_give(model, tokenizer):
    text, prompt = words(150), words(9, 3)
    ids = ids_of(tokenizer, f"{text} {prompt}")
    reading = read_stream(model, tokenizer, [text])
    first = continue_stream(model, tokenizer, reading, prompt=prompt, max_new_tokens=12, ignore_eos=True)
    new = greedy(model, ids, 12)
    assert first.text == tokenizer.decode(new)
    assert first.whole_texts == (f"{prompt} {first.text}",)
    assert (reading.pending, reading.tokens, first.new_tokens) == (new[-1:], 171, 12)
    second = continue_stream(model, tokenizer, reading, max_new_tokens=5, ignore_eos=True)
    assert second.text == tokenizer.decode(greedy(model, torch.cat([ids, torch.tensor([new])], 1), 5))
    nothing = continue_stream(model, tokenizer, reading, prompt="w7 w8", max_new_tokens=0)
    assert (nothing.text, reading.tokens, reading.pending) == ("", 178, ids_of(tokenizer, "w7 w8")[0].tolist())


def test_ctrl_c_waits_for_the_end_of_a_piece(model, tokenizer):
    """A signal in the middle of a layer, while a text is read and while it is gone on with."""
    reading, text = Reading(), words(LENGTH)
    assert position_limit(model) is None  # which runs layers as well, the first time

    def interrupted(function: Any, *arguments: Any, **options: Any) -> None:
        hook = model.model.layers[1].register_forward_pre_hook(lambda *args: signal.raise_signal(signal.SIGINT))
        with hook, pytest.raises(KeyboardInterrupt):
            function(model, tokenizer, *arguments, **options)
        (length,) = {int(layer.get_seq_length()) for layer in reading.cache.layers}
        assert length == reading.tokens_read

    interrupted(read_stream, [text], reading, piece_length=32)
    assert (reading.tokens_read, reading.tokens) == (32, LENGTH - len(reading.unread.split()))
    read_stream(model, tokenizer, (), reading)
    interrupted(continue_stream, reading, max_new_tokens=5)
    expected = greedy(model, ids_of(tokenizer, text), 6)
    assert (reading.tokens, reading.pending) == (LENGTH + 1, expected[:1])
    new = continue_stream(model, tokenizer, reading, max_new_tokens=5, ignore_eos=True)
    assert new.text == tokenizer.decode(expected[1:])


def test_models_that_end_read_their_last_tokens_again(tokenizer, tmp_path):
    """Wherever the positions end, a quarter of them; and the same from a file."""
    text = words(LENGTH)
    ids = ids_of(tokenizer, text)
    for ends in (make("llama", {"num_features": 8}), GPT2LMHeadModel(tiny_parent_config()).eval()):
        assert position_limit(ends) == 96
        with pytest.raises(InputError, match="97, but this model has 96 positions"):
            check_length(ends, 97)
        first, read = 0, 0
        while read < LENGTH - 1:
            count = min(32, LENGTH - 1 - read)
            first = read - 24 if read - first + count > 96 else first
            read += count
        assert 0 < first < read - 24
        reading = read_stream(ends, tokenizer, pieces(text), piece_length=32)
        assert (reading.tokens_read, reading.tokens) == (LENGTH - 1, LENGTH)
        count = min(5, 96 - (LENGTH - first))
        expected = tokenizer.decode(greedy(ends, ids[:, first:], count), skip_special_tokens=True)
        if isinstance(ends, RFAPreTrainedMixin):
            reading.save(tmp_path / "cache", ends)
            reading = Reading.load(tmp_path / "cache", ends)
        assert continue_stream(ends, tokenizer, reading, max_new_tokens=count, ignore_eos=True).text == expected
        assert continue_stream(ends, tokenizer, reading, max_new_tokens=150, ignore_eos=True).new_tokens == 150


def test_models_without_end_have_no_limit(model):
    assert position_limit(model) is None
    check_length(model, 10**9)
    ids = torch.randint(3, 61, (2000,))
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    expected = -float(logits.gather(-1, ids[1:, None]).mean())
    for carry_state in (False, True):
        found = perplexity(model, ids, context_length=2000, carry_state=carry_state)
        assert found.nats == pytest.approx(expected, rel=1e-5)
        assert "carried" not in found.protocol
    assert "windows of 96 tokens" in perplexity(model, ids).protocol
    with pytest.raises(InputError, match="carry_state: rotary positions go on"):
        perplexity(make("llama", {"num_features": 8}), ids, context_length=2000, carry_state=True)


def tokenizer_like_sentencepiece() -> Any:
    """Return a tokenizer of single characters that puts a space before every text."""
    core = Tokenizer(BPE({chr(code): code for code in (*range(256), ord("▁"))}, [], unk_token="?"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")


@pytest.mark.parametrize("size", [1, 4096])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_parts_have_the_tokens_of_the_whole_text(kind, size):
    """Where a text is cut between words; it starts with the token that starts texts."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL) if kind == "bytes" else tokenizer_like_sentencepiece()
    with gzip.open(DEMO_TEXT, "rt") as file:
        text = file.read(9_000)
    taken: list[int] = []

    class Kept(Reading):
        def feed(self, model: Any, count: int) -> torch.Tensor:
            taken.extend(self.pending[:count])
            self.pending = self.pending[count:]
            return torch.zeros(1, 1)

    model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=10**5))
    reading = read_stream(model, tokenizer, pieces(text, size), Kept())
    assert len(taken) > 1000
    assert taken + reading.pending == tokenizer(text)["input_ids"]


def test_texts_come_in_pieces_from_files_and_stdin(tmp_path, monkeypatch):
    text = "naïve\r\nwörds " * 30_000
    plain, zipped, shown = tmp_path / "text.txt", tmp_path / "text.txt.gz", []
    plain.write_bytes(text.encode())
    zipped.write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    expected = text.replace("\r\n", "\n")
    for path in (plain, zipped, None):
        parts = [*stream_text(path, on_bytes=lambda done, size: shown.append((done, size)))]
        assert "".join(parts) == expected
        assert len(parts) > 2
        size = None if path is None else path.stat().st_size
        assert shown[-1] == (size or 0, size)
    for skip in (1, 100_000, 10**9):
        assert "".join(stream_text(zipped, skip=skip)) == expected[skip:]
    plain.write_bytes(b"good \xff")
    with pytest.raises(InputError, match=r"cannot read .*text\.txt as UTF-8 text"):
        [*stream_text(plain)]
    with pytest.raises(InputError, match="cannot read"):
        [*stream_text(Path(tmp_path / "missing"))]
