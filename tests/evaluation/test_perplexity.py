"""Texts, perplexity, also of windows without end, and generation reports."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2LMHeadModel

from hf_rfa import InputError
from hf_rfa.convert.checkpoint.source import open_checkpoint
from hf_rfa.evaluation import perplexity
from hf_rfa.evaluation.perplexity import logits_of_pieces
from hf_rfa.finetune.arguments import FinetuneArguments
from hf_rfa.finetune.data import single_documents
from hf_rfa.finetune.tasks import load_config_and_tokenizer
from hf_rfa.inference import generate_text, load_model
from hf_rfa.io.text_io import read_documents, text_ids, tokenize
from hf_rfa.models.cache_names import cache_argument
from hf_rfa_cli.bench import bench_command
from tests.conftest import DEMO_MODEL, save_tiny_tokenizer, shared, tiny_parent_config, words
from tests.families import make_gpt2


def test_texts_are_read_plain_and_gzipped(tmp_path):
    records = [{"id": 1, "text": "one — two"}, {"text": "three"}]
    lines = "\n".join(json.dumps(record) for record in records) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt").write_text("one\n\ntwo")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("ünï".encode()))
    (tmp_path / "e.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")  # a byte order mark
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.replace("\n", "\r\n").encode())
    documents = {path.name: list(read_documents(path)) for path in tmp_path.iterdir()}
    both = ["one — two", "three"]
    assert documents == {"a.jsonl": both, "b.jsonl.gz": both, "c.txt": ["one\n\ntwo"], "d.txt.gz": ["ünï"]} | {
        "e.txt": ["one\ntwo\nthree"],
        "f.jsonl": both,
    }


#: What a tokenizer puts around a text by itself, and the tokens of what a decoder reads of it.
SPECIAL = {"$A": [], "<s> $A": [0], "$A </s>": [], "<s> $A </s>": [0], "<s> w9 $A </s> </s>": [0, 9]}


@pytest.mark.parametrize("template", SPECIAL)
def test_a_decoder_reads_what_begins_a_text_and_one_end_where_it_ends(template, tmp_path):
    save_tiny_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    special = [("<s>", 0), ("</s>", 2), ("w9", 9)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    start = SPECIAL[template]
    assert list(text_ids(tokenizer, ["w5 w6", "", "w7 </s>"])) == [[*start, 5, 6], start, [*start, 7, 2]]
    expected = [*start, 5, 6, 2, *start, 7, 2]
    assert tokenize(tokenizer, ["w5 w6", "w7 </s>"]).tolist() == expected
    rows = {"text": ["w5 w6", "w7 </s>"]}
    assert single_documents(Dataset.from_dict(rows), tokenizer, length=9)["input_ids"] == [
        [*start, 5, 6, 2],
        [*start, 7, 2],
    ]
    prompted = Dataset.from_dict({"prompt": ["w5"], "text": ["w6"]})
    (row,) = single_documents(prompted, tokenizer, length=9)
    assert row["input_ids"] == [*start, 5, 6, 2]
    assert row["labels"] == [*[-100] * (len(start) + 1), 6, 2]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", b'{"text": "x"}\n{oops\n', "a.jsonl, line 2: not a JSON object"),
        ("b.jsonl", b'{"body": "x", "id": 3}\n', r"b.jsonl, line 1: no string field 'text' \(found: body, id\)"),
        ("c.jsonl", b'{"text": 5}\n', "c.jsonl, line 1: field 'text' is of type int, not text"),
        ("c.jsonl", b'{"text": "half \\ud83d"}\n', "c.jsonl, line 1: field 'text' has half of a character"),
        ("d.txt", b"  \n ", "has no text in it"),
        ("e.txt", b"\xff\xfe\x00", "cannot read .*e.txt as UTF-8"),
        ("g.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-12], "cannot read .*g.txt.gz"),
    ],
)
def test_bad_texts_name_file_and_line(name, content, match, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=match):
        list(read_documents(tmp_path / name))


def test_perplexity_is_the_likelihood_of_a_loop():
    model = GPT2LMHeadModel(tiny_parent_config()).eval()
    ids = torch.randint(0, 61, (103,))
    total, counted = 0.0, 0
    with torch.no_grad():
        for window in ids.split(20):
            total += float(F.cross_entropy(model(window[None]).logits[0, :-1], window[1:], reduction="sum"))
            counted += len(window) - 1
    for batch_size in (1, 4, 100):
        result = perplexity(model, ids, context_length=20, batch_size=batch_size)
        assert result.tokens == counted
        assert result.perplexity == pytest.approx(math.exp(total / counted), rel=1e-5)
        assert "disjoint windows of 20 tokens" in result.protocol
        assert f"{counted} of 103 tokens counted" in result.protocol


def test_overlapping_windows_count_every_token_once():
    model = GPT2LMHeadModel(tiny_parent_config()).eval()
    for length in (24, 25, 100, 101):
        ids = torch.randint(0, 61, (length,))
        result = perplexity(model, ids, context_length=24, stride=7)
        assert result.tokens == length - 1
        with torch.no_grad():
            total = 0.0
            for position in range(1, length):
                start = 0 if position < 24 else math.ceil((position - 23) / 7) * 7
                logits = model(ids[None, start:position]).logits[0, -1]
                total -= float(logits.log_softmax(-1)[ids[position]])
        assert result.nats == pytest.approx(total / (length - 1), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "ids", "match"),
    [
        ({"context_length": 97}, [0] * 50, "context of 97 tokens is longer than the model's 96 positions"),
        ({"context_length": 1}, [0] * 50, "context_length must be at least 2"),
        ({"context_length": 10, "stride": 11}, [0] * 50, "stride from 1 to it, got 10 and 11"),
        ({}, [0], "the text has 1 tokens"),
        ({}, [61] * 5, "token 61, but the model's vocabulary has 61 entries"),  # a tokenizer of another model
    ],
)
def test_impossible_protocols_are_refused(options, ids, match):
    with pytest.raises(InputError, match=match):
        perplexity(GPT2LMHeadModel(tiny_parent_config()), torch.tensor(ids), **options)


def test_shared_model_has_its_published_perplexity():
    model, tokenizer = load_model(str(shared("models/gpt2-wiki-mini")))
    ids = tokenize(tokenizer, read_documents(shared("data/enwiki/valid.jsonl.gz")))
    assert len(ids) == 257_088
    result = perplexity(model, ids[: 512 * 16], context_length=512)
    assert result.perplexity == pytest.approx(149.3, abs=0.3)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_batch_of_prompts_gives_what_each_gives_alone(beams, checkpoints):
    """Padding to the left of a decoder's prompts, and to the right of an encoder's sources, changes nothing."""
    prompts = {str(DEMO_MODEL): ["The whale", "It was the ship of all that", "He"]}
    prompts[str(checkpoints["bart"])] = [words(9), words(2), words(5, start=3)]
    for name, texts in prompts.items():
        model, tokenizer = load_model(name)
        options = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
        alone = [generate_text(model, tokenizer, text, **options) for text in texts]
        together = generate_text(model, tokenizer, texts, **options)
        assert list(together.texts) == [each.text for each in alone]
        assert list(together.whole_texts) == [each.whole_texts[0] for each in alone]
        assert together.prompt_tokens == sum(each.prompt_tokens for each in alone)
        assert together.new_tokens == sum(each.new_tokens for each in alone)
        if name == str(DEMO_MODEL):
            assert all(whole.startswith(text) for whole, text in zip(together.whole_texts, texts, strict=True))


def test_checkpoints_that_cannot_be_loaded(tmp_path):
    for name, match in ((str(tmp_path), "no config.json"), ("no-such-model", "cannot read the configuration")):
        with pytest.raises(InputError, match=match):
            load_model(name)
    with pytest.raises(InputError, match="dtype must be"):
        load_model(str(DEMO_MODEL), dtype="int4")
    GPT2LMHeadModel(tiny_parent_config()).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="there is no tokenizer in it"):
        load_model(str(tmp_path))
    assert load_model(str(tmp_path), need_tokenizer=False)[1] is None


READERS = {
    "load_model": lambda path: load_model(path),
    "open_checkpoint": lambda path: open_checkpoint(Path(path)),
    "finetune": lambda path: load_config_and_tokenizer(FinetuneArguments(task="clm", train="a.txt", model=path)),
    "bench": lambda path: bench_command(model=path, batches=[1], sources=[1]),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_configuration_that_cannot_be_used_is_told_in_one_line(reader, tmp_path):
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": "four"}))
    with pytest.raises(InputError, match="'n_layer' expected int") as error:
        READERS[reader](str(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_that_are_cut_short_are_told_in_one_line(tmp_path):
    for file in DEMO_MODEL.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:5000] if file.suffix == ".safetensors" else content)
    with pytest.raises(InputError, match=rf"cannot load .*{tmp_path}"):
        load_model(str(tmp_path))


# Windows longer than a model's positions, the state carried from piece to piece

POSITIONS = 96
KINDS = {
    "features": {},
    "gates": {"gate": True},
    "a window": {"window_size": 5, "num_sinks": 2},
    "slots": {"window_size": 5, "num_sinks": 2, "num_slots": 4, "feature_map": "none", "num_features": None},
}


def model_of(kind: str, **options):
    return make_gpt2(KINDS[kind], **options)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(length=st.integers(2, 70), piece=st.integers(1, 40))
def test_pieces_give_the_logits_of_tokens_read_one_by_one(kind, length, piece):
    model = model_of(kind)
    ids = torch.randint(3, 61, (2, length))
    cache, expected = None, []
    with torch.no_grad():
        for place in range(length):
            positions = torch.full((2, 1), place % piece)
            outputs = model(ids[:, place : place + 1], position_ids=positions, **cache_argument(cache), use_cache=True)
            cache = outputs.past_key_values
            expected.append(outputs.logits)
    found = torch.cat([*logits_of_pieces(model, ids, piece)], 1)
    torch.testing.assert_close(found, torch.cat(expected, 1), atol=2e-4, rtol=2e-4)


def test_windows_may_be_longer_than_the_positions():
    model = model_of("features")
    assert model.config.max_position_embeddings == POSITIONS
    ids = torch.randint(3, 61, (2 * 250,))
    found = perplexity(model, ids, context_length=250, carry_state=True, batch_size=1)
    logits = torch.cat([*logits_of_pieces(model, ids.view(2, 250), POSITIONS)], 1)[:, :-1].log_softmax(-1)
    expected = -logits.gather(-1, ids.view(2, 250)[:, 1:, None]).double().mean()
    assert found.nats == pytest.approx(float(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    overlapping = perplexity(model, ids, context_length=250, stride=100, carry_state=True)
    assert overlapping.tokens == 499


def test_models_without_a_state_to_carry_are_refused():
    ids = torch.randint(3, 61, (300,))
    with pytest.raises(InputError, match=r"carry_state: the cache of gpt2 grows \(every layer\)"):
        perplexity(GPT2LMHeadModel(tiny_parent_config()), ids, carry_state=True)
    with pytest.raises(InputError, match=r"the cache of rfa_gpt2 grows \(1\)"):
        perplexity(model_of("features", softmax_layers=[1]), ids, carry_state=True)
