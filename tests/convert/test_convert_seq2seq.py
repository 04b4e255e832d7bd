"""Conversion of models with an encoder, and evaluation by generation."""

from __future__ import annotations

import gzip
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM

from hf_rfa.convert import InputError, convert, inputs
from hf_rfa.convert.calibrate import calibration
from hf_rfa.convert.calibrate.calibration import calibrate
from hf_rfa.convert.checkpoint.base_model import softmax_base_model
from hf_rfa.convert.inputs import batches, text_sources
from hf_rfa.evaluation.generation_scores import bleu, evaluate_generation, rouge
from hf_rfa.evaluation.perplexity import score_labels
from hf_rfa.inference import generate_text, load_model
from hf_rfa.io.text_io import read_lines, read_pairs
from tests.conftest import leftovers, shared, tiny_seq2seq_config
from tests.families import make, save_softmax_model, softmax_model


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_calibration_on_text_brings_every_kind_closer_to_the_parent(family, text, checkpoints, tmp_path, monkeypatch):
    """The parent answers the sources itself; padding between them plays no part."""
    monkeypatch.setattr(inputs, "OUTPUT_TOKENS", 128)
    monkeypatch.setattr(calibration, "COMPARED_TOKENS", 1024)
    # random weights leave little of the answers
    options = {"calibrate_on": text, "cross_layers": "all", "encoder_layers": "all", "force": True}
    report = convert(checkpoints[family], tmp_path / "out", **options)
    assert len(report.gains) == 8
    assert all(sum(gain.after) < sum(gain.before) for gain in report.gains)
    for kind, count in {"causal": 9, "cross": 9, "encoder": 4}.items():
        part = {"causal": "decoder.*self_attn", "cross": "encoder_attn", "encoder": "encoder.*self_attn"}[kind]
        gains = [gain for gain in report.gains if re.search(rf"\b{part}$", gain.name)]
        found = [[value for gain in gains for value in getattr(gain, when)] for when in ("before", "after")]
        assert [len(values) for values in found] == [count, count]
        assert report.divergences[kind] == pytest.approx([sum(values) / count for values in found])
        assert f"KL to the softmax weights, {kind}" in dict(report.rows())
    assert report.perplexities.own_outputs
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "the base model's own outputs" in card.content
    assert "AutoModelForSeq2SeqLM" in card.content


@torch.no_grad()
def test_a_decoder_may_have_a_vocabulary_of_its_own(text, tmp_path):
    """Marian's: what it writes has other tokens than what it reads."""
    unshared = {"decoder_vocab_size": 40, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    save_softmax_model("marian", tmp_path / "softmax", **unshared)
    convert(tmp_path / "softmax", tmp_path / "random")
    convert(tmp_path / "softmax", tmp_path / "rfa", calibrate_on=text, force=True)
    model, softmax = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).eval() for name in ("rfa", "softmax"))
    source = torch.randint(40, 61, (2, 9))
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    assert torch.equal(model.generate(source, **options), softmax.generate(source, **options))


def test_answers_of_the_parent_are_masked_after_their_end(text, checkpoints, tmp_path):
    convert(checkpoints["bart"], tmp_path / "out")
    model, tokenizer = load_model(str(tmp_path / "out"))
    config = tiny_seq2seq_config("bart", eos_token_id=2)
    twin = softmax_base_model(model, "BartForConditionalGeneration", config)
    sources = text_sources(tokenizer, [text.read_text()], 96)
    end = int(inputs.add_outputs(twin, sources)["decoder_input_ids"][0, 9])  # a token that the answers come to
    twin.config.eos_token_id = twin.generation_config.eos_token_id = end
    answers = inputs.add_outputs(twin, sources)
    assert not answers["decoder_attention_mask"].all()
    for row in range(0, 40, 9):
        ids = sources["input_ids"][row][sources["attention_mask"][row].bool()][None]
        alone = twin.generate(ids, max_new_tokens=inputs.OUTPUT_TOKENS, num_beams=1, do_sample=False)[0]
        kept = answers["decoder_attention_mask"][row].bool()
        assert answers["decoder_input_ids"][row][kept].tolist() == alone[:-1].tolist()
        labels = answers["labels"][row]
        assert labels[labels != -100].tolist() == alone[1:].tolist()


@torch.no_grad()
def test_a_perplexity_is_the_mean_over_tokens_and_not_over_batches(checkpoints, monkeypatch):
    monkeypatch.setattr("hf_rfa.convert.inputs.SCORED_TOKENS", 12)  # two rows at a time
    model, _ = load_model(str(checkpoints["bart"]))
    rows, counts = torch.randint(4, 61, (5, 6)), (6, 1, 4, 2, 5)
    kept = torch.tensor([[index < count for index in range(6)] for count in counts])
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "decoder_input_ids": rows.flip(1)}
    inputs |= {"decoder_attention_mask": kept.long(), "labels": rows.masked_fill(~kept, -100)}
    losses = [float(model(**{key: each[n : n + 1] for key, each in inputs.items()}).loss) for n in range(5)]
    expected = math.exp(sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts))
    score = score_labels(model, batches(inputs))
    assert score.perplexity == pytest.approx(expected, rel=1e-5)
    assert score.tokens == sum(counts)


@torch.no_grad()
def test_padding_does_not_enter_calibration():
    """Any tokens after sources and outputs give the same constants."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1}
    model = make("bart", {"softmax_encoder_layers": [], "num_features": 8}, **sizes)
    parent = softmax_model(model, "bart", **sizes)
    ids, lengths = torch.randint(4, 61, (3, 11)), {"": [5, 11, 7], "decoder_": [9, 2, 4]}
    constants = []
    for pads in (0, 4):
        inputs = {}
        for side, counts in lengths.items():
            mask = torch.arange(11 + pads) < torch.tensor(counts)[:, None]
            inputs[f"{side}input_ids"] = torch.where(mask, F.pad(ids, (0, pads)), torch.randint(4, 61, mask.shape))
            inputs[f"{side}attention_mask"] = mask.long()
        calibrate(model, parent, inputs, on_layer=lambda: None)
        constants.append({name: tensor.clone() for name, tensor in model.state_dict().items() if "feature_map" in name})
    assert_close(constants[1], constants[0])


# Bad input


@pytest.fixture
def pairs(tmp_path):
    (tmp_path / "a.en").write_text("w5 w6\nw7\nw8 w9 w10\n")
    (tmp_path / "a.de").write_text("w5\nw6\nw7\n")
    (tmp_path / "short.de").write_text("w5\nw6\n")
    (tmp_path / "gap.en").write_text("w5\n  \nw6\n")
    (tmp_path / "long.en").write_text("w5\n" + "w6 " * 120 + "\nw7\n")
    record = {"source": "w5", "target": "w6"}
    (tmp_path / "b.jsonl").write_text(json.dumps(record) + "\n" + json.dumps({"source": "w5"}) + "\n")
    return tmp_path


PAIR = ["a.en", "--references", "a.de"]


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("bart", ["a.en", "--references", "short.de"], "a.en has 3 lines, but short.de has 2"),
        ("bart", ["gap.en", "--references", "a.de"], "gap.en, line 2: the source is empty"),
        ("bart", ["long.en", "--references", "a.de"], "source 2 of 3 has 121 tokens, but the encoder has 96 positions"),
        ("bart", ["a.en"], "a.en holds no references"),
        ("bart", ["b.jsonl"], "b.jsonl, line 2: no string field 'target' (found: source)"),
        ("bart", [*PAIR, "--max-new-tokens", "96"], "this model has 96 positions"),
        ("gpt2", PAIR, "is a gpt2 model, a decoder that stands alone, but this needs an encoder and a"),
    ],
)
def test_bad_pairs_are_refused(model, arguments, words, pairs, checkpoints, monkeypatch, refused_command):
    before = leftovers(pairs)
    monkeypatch.chdir(pairs)
    assert words in refused_command("evaluate", checkpoints[model], *arguments, "--task", "translation")
    assert leftovers(pairs) == before


def test_an_empty_or_too_long_source(checkpoints):
    model, tokenizer = load_model(str(checkpoints["bart"]))
    with pytest.raises(InputError, match="the source is empty"):
        generate_text(model, tokenizer, " ", max_new_tokens=3)
    with pytest.raises(InputError, match="source's tokens are 101, but this model has 96 positions"):
        generate_text(model, tokenizer, "w5 " * 100, max_new_tokens=3)
    with pytest.raises(InputError, match="start token and the new tokens are 97"):
        generate_text(model, tokenizer, "w5", max_new_tokens=96)


# Evaluation


def test_pairs_are_read_line_by_line(tmp_path):
    """Only newlines end a line: other separators, as U+2028, are part of it."""
    (tmp_path / "a.txt").write_bytes("one\u2028two\r\nthree\x0bfour\nfive".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"1\n\n3\n"))
    lines = ["one\u2028two", "three\x0bfour", "five"]
    assert read_pairs(tmp_path / "a.txt", tmp_path / "b.txt.gz") == (lines, ["1", "", "3"])
    (tmp_path / "c.jsonl").write_text(json.dumps({"source": "a\nb", "target": "c"}) + "\n")
    assert read_pairs(tmp_path / "c.jsonl") == (["a\nb"], ["c"])


def test_metrics_are_what_their_papers_say():
    predictions, references = ["the cat sat on the mat", "a dog"], ["the cat sat on a mat", "the dogs"]
    score, signature = bleu(predictions, references)
    # of 8, 6, 4 and 3 n-grams 5, 3, 2 and 1 match ("the" once only), and the lengths are equal
    assert score == pytest.approx(100 * (5 / 8 * 3 / 6 * 2 / 4 * 1 / 3) ** 0.25)
    assert "tok:13a" in signature
    scores = rouge(predictions, references)
    # unigrams: 5 of 6 and 6 match; "dogs" is "dog" to the stemmer, 1 of 2
    assert scores["rouge1"] == pytest.approx(100 * (5 / 6 + 1 / 2) / 2)
    # bigrams: the-cat, cat-sat, sat-on match, of 5 and 5
    assert scores["rouge2"] == pytest.approx(100 * (3 / 5 + 0) / 2)


@pytest.mark.parametrize("beams", [1, 3])
def test_evaluation_generates_as_the_model_does(beams, pairs, checkpoints):
    model, tokenizer = load_model(str(checkpoints["marian"]))
    sources, references = read_pairs(pairs / "a.en", pairs / "a.de")
    options = {"num_beams": beams, "max_new_tokens": 9}
    done, given = [], {"task": "summarization", "batch_size": 2, "on_batch": lambda *progress: done.append(progress)}
    found = evaluate_generation(model, tokenizer, sources, references, **given, **options)
    assert done == [(2, 3), (3, 3)]
    for source, prediction in zip(sources, found.predictions, strict=True):
        ids = tokenizer(source, return_tensors="pt")["input_ids"]
        output = model.generate(ids, do_sample=False, **options)
        assert prediction == tokenizer.decode(output[0], skip_special_tokens=True).strip()
    assert set(found.scores) == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    assert ("3 beams" if beams == 3 else "greedy search") in found.protocol


# Shared checkpoints


@pytest.fixture(scope="module")
def test_set() -> tuple[list[str], list[str]]:
    folder = shared("data/multi30k")
    return read_pairs(folder / "test_2016_flickr.en.gz", folder / "test_2016_flickr.de.gz")


@pytest.mark.slow
@pytest.mark.parametrize(("beams", "bleu"), [(1, 35.65), (4, 37.13)])
def test_the_shared_model_has_its_published_bleu(beams, bleu, test_set):
    model, tokenizer = load_model(str(shared("models/bart-multi30k-mini")), kind="seq2seq")
    options = {"task": "translation", "num_beams": beams, "max_new_tokens": 60, "batch_size": 50}
    found = evaluate_generation(model, tokenizer, *test_set, **options)
    assert found.scores["sacreBLEU"] == pytest.approx(bleu, abs=0.05)


def test_the_shared_model_converts_and_translates(test_set, tmp_path):
    """Without any training: causal attention alone costs little, cross attention is what has to be trained."""
    folder, (sources, references) = shared("data/multi30k"), ([*lines[:60]] for lines in test_set)
    (tmp_path / "sentences.txt").write_text("\n".join(read_lines(folder / "val.en.gz")[:100]), encoding="utf-8")
    scores, text = {}, tmp_path / "sentences.txt"
    for name, options in {"both": {"cross_layers": "all"}, "causal": {}}.items():
        convert(shared("models/bart-multi30k-mini"), tmp_path / name, calibrate_on=text, **options)
        model, tokenizer = load_model(str(tmp_path / name), kind="seq2seq")
        options = {"task": "translation", "num_beams": 1, "max_new_tokens": 60, "batch_size": 60}
        scored = evaluate_generation(model, tokenizer, sources, references, **options)
        scores[name] = scored.scores["sacreBLEU"]
    assert scores["causal"] > 28, scores
    assert scores["both"] > 15, scores
