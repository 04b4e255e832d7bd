"""Families with an encoder and a decoder, each one declaration: what all of them have to do, and what is Whisper's own."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from hf_rfa import FAMILIES
from hf_rfa.convert import convert
from hf_rfa.families import SEQ2SEQ
from hf_rfa.inference import cache_num_bytes
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import tiny_seq2seq_config
from tests.families import relative_error, rfa_modules, save_softmax_model

every_seq2seq = pytest.mark.parametrize("family", list(SEQ2SEQ))
#: BART's way, sinusoids, and audio.
CONVERTED = ("bart", "m2m_100", "whisper")
every_converted = pytest.mark.parametrize("family", CONVERTED)
every_text_family = pytest.mark.parametrize("family", [each for each in SEQ2SEQ if each != "whisper"])
LAYERS = [0, 1, 2]
#: With these an RFA model computes what the base model does.
AS_SOFTMAX = {"window_size": 96, "softmax_cross_layers": LAYERS}
#: Attention of every kind is RFA.
ALL_RFA = {"num_features": 8, "num_cross_features": 8, "softmax_encoder_layers": [], "window_size": 3, "gate": True}


def base_and_rfa(family, **fields):
    """Return a tiny softmax model and the RFA model with the same weights."""
    declared = FAMILIES[family]
    config = tiny_seq2seq_config(family)
    base_class, rfa_class = declared.architectures[declared.default_architecture]
    models = []
    for cls, each in ((base_class, config), (rfa_class, declared.rfa_config.from_base(config, **fields))):
        torch.manual_seed(0)
        models.append(cls(each).eval())
    return models


def rfa(family, **fields):
    return base_and_rfa(family, **(fields or ALL_RFA))[1]


def sources(family, rows=2):
    """Return an encoder's inputs, the second row padded; audio has no padding."""
    generator = torch.Generator().manual_seed(3)
    if family == "whisper":
        return {"input_features": torch.randn(rows, 8, 40, generator=generator)}
    ids = torch.randint(3, 61, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 5:], mask[1, 5:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def targets(length=14, rows=2):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(4))


def auto_class(family):
    return AutoModelForSpeechSeq2Seq if family == "whisper" else AutoModelForSeq2SeqLM


@every_seq2seq
@torch.no_grad()
def test_a_window_of_the_texts_length_and_softmax_cross_attention_give_the_base_models_logits_and_tokens(family):
    base, model = base_and_rfa(family, **AS_SOFTMAX)
    assert len(rfa_modules(model)) == len(LAYERS)
    found, expected = (each(**sources(family), decoder_input_ids=targets()).logits for each in (model, base))
    assert relative_error(found, expected) < 1e-5
    for beams in (1, 3):
        options = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
        assert torch.equal(*(each.generate(**sources(family), **options) for each in (model, base)))


@every_seq2seq
@torch.no_grad()
def test_steps_with_a_cache_of_one_size_equal_one_pass(family):
    model, ids = rfa(family), targets(30)
    expected, sizes = model(**sources(family), decoder_input_ids=ids, use_cache=False).logits, set()
    cache, found = None, []
    for piece in ids.split([7, *[1] * 8, 15], dim=1):
        output = model(**sources(family), decoder_input_ids=piece, **cache_argument(cache), use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
        sizes.add(cache_num_bytes(cache))
    assert_close(torch.cat(found, dim=1), expected, atol=3e-4, rtol=1e-4)
    assert len(sizes) == 1


@every_text_family
@torch.no_grad()
def test_padding_of_sources_and_targets_changes_nothing(family):
    model, ids = rfa(family), targets(8)
    mask = torch.ones_like(ids)
    ids[1, 6:], mask[1, 6:] = 1, 0
    both = model(**sources(family), decoder_input_ids=ids, decoder_attention_mask=mask).logits[1, :6]
    alone = model(sources(family)["input_ids"][1:, :5], decoder_input_ids=ids[1:, :6]).logits[0]
    assert_close(both, alone, atol=1e-4, rtol=1e-4)


@every_seq2seq
@torch.no_grad()
def test_saved_and_loaded_and_saved_it_is_the_same(family, tmp_path):
    model = rfa(family)
    expected = model(**sources(family), decoder_input_ids=targets()).logits
    for name in ("first", "second"):
        model.save_pretrained(tmp_path / name)
        model = auto_class(family).from_pretrained(tmp_path / name).eval()
        assert type(model).__module__ == "hf_rfa.models.modeling_rfa_seq2seq"
        assert torch.equal(model(**sources(family), decoder_input_ids=targets()).logits, expected)
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second"))
    assert first == second
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(**sources(family), decoder_input_ids=targets()).logits, expected)


# Conversion


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of softmax checkpoints and of what they are converted to, every family's in one folder of its name."""
    bases, converted = (tmp_path_factory.mktemp(name) for name in ("bases", "converted"))
    for family in CONVERTED:
        save_softmax_model(family, bases / family)
    return bases, converted


@pytest.fixture(scope="module")
def reports(folders):
    bases, converted = folders
    options = {"preset": "rfa", "num_features": 8, "num_cross_features": 16, "max_positions": 120}
    options |= {"cross_layers": "all", "encoder_layers": "all"}
    return {each: convert(bases / each, converted / each, **options) for each in CONVERTED}


@every_converted
def test_it_is_converted_and_calibrated(family, folders, reports):
    report, base = reports[family], auto_class(family).from_pretrained(folders[0] / family)
    assert report.layers == {"causal": (3, 3), "cross": (3, 3), "encoder": (2, 2)}
    assert len(report.gains) == 8
    before, after = (sum(sum(getattr(gain, name)) for gain in report.gains) for name in ("before", "after"))
    assert after < before
    model = auto_class(family).from_pretrained(folders[1] / family)
    assert model.config.max_position_embeddings == 120
    kept = model.state_dict()
    for name, tensor in base.state_dict().items():
        if name.endswith("embed_positions.weight") and not torch.equal(kept[name][: len(tensor)], tensor):
            assert len(kept[name]) - len(tensor) == 120 - 96  # BART's table has two rows before position 0
        else:
            assert torch.equal(kept[name][: len(tensor)], tensor)
    assert auto_class(family).__name__ in (folders[1] / family / "README.md").read_text()


# Whisper


def test_whisper_generates_with_all_that_its_own_generate_returns():
    base, model = base_and_rfa("whisper", **AS_SOFTMAX)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
    found = model.generate(**sources("whisper"), **options, output_attentions=True)
    expected = base.generate(**sources("whisper"), **options, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)
    assert len(found.cross_attentions) == 8


def test_a_decoder_of_whisper_stands_alone():
    config = tiny_seq2seq_config("whisper")
    _, rfa_class = FAMILIES["whisper"].architectures["WhisperForCausalLM"]
    model = rfa_class(FAMILIES["whisper"].rfa_config.from_base(config, num_features=8)).eval()
    ids, source = targets(12), torch.randn(2, 20, 24)
    with torch.no_grad():
        whole = model(ids, encoder_outputs=(source,), use_cache=False).logits
        first = model(ids[:, :7], encoder_outputs=(source,), use_cache=True)
        rest = model(ids[:, 7:], encoder_outputs=(source,), **cache_argument(first.past_key_values), use_cache=True)
    assert_close(torch.cat([first.logits, rest.logits], dim=1), whole, atol=1e-4, rtol=1e-4)
