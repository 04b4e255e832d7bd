"""Texts, perplexity and generation reports."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2LMHeadModel

from hf_rfa import InputError
from hf_rfa.convert.checkpoint.source import open_checkpoint
from hf_rfa.evaluation import perplexity
from hf_rfa.evaluation.perplexity import perplexity_of, shown
from hf_rfa.finetune.arguments import FinetuneArguments
from hf_rfa.finetune.data import single_documents
from hf_rfa.finetune.tasks import load_config_and_tokenizer, load_model_to_train
from hf_rfa.inference import generate_text, load_model
from hf_rfa.io.text_io import read_documents, text_ids, tokenize
from hf_rfa_cli.bench import bench_command
from tests.conftest import DEMO_MODEL, DEMO_TEXT, save_tiny_tokenizer, shared, tiny_parent_config, words


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
        ("c.jsonl", b"[1]\n", "line 1: no string field 'text'"),
        ("c.jsonl", b'{"text": "x"}\n{"text": null}\n', "c.jsonl, line 2: field 'text' is null, not text"),
        ("c.jsonl", b'{"text": 5}\n', "c.jsonl, line 1: field 'text' is of type int, not text"),
        ("c.jsonl", b'{"text": "half \\ud83d"}\n', "c.jsonl, line 1: field 'text' has half of a character"),
        ("d.txt", b"  \n ", "has no text in it"),
        ("e.txt", b"\xff\xfe\x00", "cannot read .*e.txt as UTF-8"),
        ("f.txt.gz", b"not gzip", "cannot read .*f.txt.gz"),
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


def test_a_perplexity_without_a_number_is_none():
    assert math.isnan(perplexity_of(math.nan))
    assert perplexity_of(800.0) == math.inf
    assert perplexity_of(2.0) == pytest.approx(math.e**2)
    assert [shown(each) for each in (12.345, 1e300, math.inf, math.nan)] == ["12.35", "1.00e+300", "inf", "nan"]


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


def test_generation_reports_what_it_did():
    model, tokenizer = load_model(str(DEMO_MODEL))
    result = generate_text(model, tokenizer, "The whale", max_new_tokens=9, do_sample=False, ignore_eos=True)
    assert result.new_tokens == 9
    assert result.text
    assert result.seconds > 0
    tokens = result.prompt_tokens + 8  # the last new token is not fed back
    assert result.cache_bytes == 2 * 4 * 128 * 4 * tokens


@pytest.mark.parametrize("beams", [1, 2])
def test_a_batch_of_prompts_gives_what_each_gives_alone(beams, tiny_seq2seq_parents):
    """Padding to the left of a decoder's prompts, and to the right of an encoder's sources, changes nothing."""
    prompts = {str(DEMO_MODEL): ["The whale", "It was the ship of all that", "He"]}
    prompts[str(tiny_seq2seq_parents["bart"])] = [words(9), words(2), words(5, start=3)]
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
BROKEN_CONFIGS = {
    "feature_map": ({"model_type": "rfa_gpt2", "feature_map": "nope"}, "feature_map='nope' is unknown"),
    "type": ({"n_layer": "four"}, "'n_layer' expected int"),
}


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
@pytest.mark.parametrize("reader", READERS)
def test_a_configuration_that_cannot_be_used_is_told_in_one_line(name, reader, tmp_path):
    changed, match = BROKEN_CONFIGS[name]
    if (name, reader) == ("feature_map", "open_checkpoint"):
        match = "is an RFA checkpoint already"  # which is known before the configuration is read
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(InputError) as error:
        READERS[reader](str(tmp_path))
    assert match in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def load_to_train(path: str):
    arguments = FinetuneArguments(task="clm", train="a.txt", model=path)
    return load_model_to_train(arguments, load_config_and_tokenizer(arguments)[0])


@pytest.mark.parametrize("load", [load_model, load_to_train])
def test_weights_that_are_cut_short_are_told_in_one_line(load, tmp_path):
    for file in DEMO_MODEL.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:5000] if file.suffix == ".safetensors" else content)
    with pytest.raises(InputError, match=rf"cannot load .*{tmp_path}"):
        load(str(tmp_path))


def test_demo_model_is_small_and_trained():
    size = sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) + DEMO_TEXT.stat().st_size
    assert size < 6_000_000
    model, tokenizer = load_model(str(DEMO_MODEL))
    ids = tokenize(tokenizer, read_documents(DEMO_TEXT))[:4096]
    assert perplexity(model, ids).perplexity < 110
