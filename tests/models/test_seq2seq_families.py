"""Families with an encoder and a decoder, each one declaration: what all of them have to do, and what is Whisper's own."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor, pipeline

from hf_rfa import FAMILIES, InputError
from hf_rfa.bench import pair
from hf_rfa.convert import convert
from hf_rfa.families import SEQ2SEQ
from hf_rfa.inference import cache_num_bytes, load_model
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.configuration_rfa_seq2seq import seq2seq_config_class
from tests.conftest import tiny_seq2seq_config
from tests.families import relative_error, rfa_modules, save_softmax_model
from tests.without_package import assert_loads_without_package

every_seq2seq = pytest.mark.parametrize("family", list(SEQ2SEQ))
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
def test_beams_with_a_cache_find_what_beams_without_one_do(family):
    model = rfa(family)
    options = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False}
    found = [model.generate(**sources(family), **options, use_cache=use) for use in (True, False)]
    assert torch.equal(*found)


@every_seq2seq
@torch.no_grad()
def test_attention_weights_are_returned_and_sum_to_one(family):
    model = rfa(family)
    output = model(**sources(family), decoder_input_ids=targets(6), output_attentions=True)
    for name, count in (("decoder_attentions", 3), ("cross_attentions", 3), ("encoder_attentions", 2)):
        assert len(output[name]) == count
        assert_close(output[name][-1].sum(-1)[0], torch.ones_like(output[name][-1][0, ..., 0]))


@every_seq2seq
def test_a_gradient_step_is_finite(family):
    model = rfa(family).train()
    loss = model(**sources(family), labels=targets(6)).loss
    loss.backward()
    assert loss.isfinite()
    assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)
    names = {name for name, each in model.named_parameters() if each.grad is not None}
    assert any(".gate." in name for name in names)


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


@pytest.mark.parametrize(
    ("family", "head"), [(each, head) for each in SEQ2SEQ for head in FAMILIES[each].architectures]
)
def test_softmax_weights_load_into_every_head_which_gets_the_feature_maps_of_its_seed(family, head, tmp_path):
    base_class, rfa_class = FAMILIES[family].architectures[head]
    config = tiny_seq2seq_config(family)
    base_class(config).save_pretrained(tmp_path)
    rfa_config = FAMILIES[family].rfa_config.from_base(config, num_features=8)
    model, drawn = rfa_class.from_pretrained(tmp_path, config=rfa_config), rfa_class(rfa_config)
    expected = {name: each.feature_map.state_dict() for name, each in rfa_modules(drawn).items()}
    assert len(expected) == 2 * len(LAYERS)
    for name, module in rfa_modules(model).items():
        assert_close(module.feature_map.state_dict(), expected[name])


# Conversion


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of softmax checkpoints and of what they are converted to, every family's in one folder of its name."""
    bases, converted = (tmp_path_factory.mktemp(name) for name in ("bases", "converted"))
    for family in SEQ2SEQ:
        save_softmax_model(family, bases / family)
    (bases / "whisper" / "preprocessor_config.json").write_text('{"feature_size": 8}')
    return bases, converted


@pytest.fixture(scope="module")
def reports(folders):
    bases, converted = folders
    options = {
        "preset": "rfa",
        "num_features": 8,
        "num_cross_features": 16,
        "cross_layers": "all",
        "encoder_layers": "all",
        "max_positions": 120,
    }
    return {each: convert(bases / each, converted / each, **options) for each in SEQ2SEQ}


@every_seq2seq
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


def test_every_checkpoint_works_without_the_package(folders, reports, tmp_path):
    for auto in (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq):
        names = [family for family in SEQ2SEQ if auto_class(family) is auto]
        models = {family: auto.from_pretrained(folders[1] / family).eval() for family in names}
        assert_loads_without_package(folders[1], auto.__name__, models, tmp_path)


@every_seq2seq
def test_the_benchmark_pairs_it(family):
    softmax, model = pair(tiny_seq2seq_config(family), 30)
    assert softmax.config.model_type == family
    assert type(model.config) is seq2seq_config_class(type(softmax.config))
    assert model.config.max_position_embeddings == 30


# Whisper


def test_whisper_is_calibrated_on_noise(reports):
    assert any("noise" in each for each in reports["whisper"].notes)
    assert any("120 tokens of output and 20 of audio" in name for name, _ in reports["whisper"].rows())


def test_whisper_keeps_its_processor(folders, reports):
    kept = folders[1] / "whisper"
    assert (kept / "preprocessor_config.json").read_text() == '{"feature_size": 8}'
    assert (kept / "tokenizer.json").is_file()


def test_whisper_generates_with_all_that_its_own_generate_returns():
    base, model = base_and_rfa("whisper", **AS_SOFTMAX)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
    found = model.generate(**sources("whisper"), **options, output_attentions=True)
    expected = base.generate(**sources("whisper"), **options, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)
    assert len(found.cross_attentions) == 8


def test_whisper_transcribes_long_audio_with_time_stamps_as_its_base_model():
    models = [*base_and_rfa("whisper", **AS_SOFTMAX), rfa("whisper", **ALL_RFA | {"gate": False})]
    audio = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(1))
    long, stamps = [], []
    for model in models:
        names = {"no_timestamps_token_id": 50, "max_initial_timestamp_index": 3, "alignment_heads": [[0, 0], [1, 1]]}
        vars(model.generation_config).update(names, max_length=90)
        options = {"return_timestamps": True, "max_new_tokens": 10}
        long.append(model.generate(audio, **options))
        stamps.append(model.generate(audio[..., :40], **options, return_token_timestamps=True)["token_timestamps"])
    assert torch.equal(long[0], long[1])
    assert len(long[2]) == 1
    assert_close(stamps[0], stamps[1])
    assert stamps[2].max() > 0


def test_whisper_transcribes_in_a_pipeline(folders, reports, tmp_path):
    shutil.copytree(folders[1] / "whisper", tmp_path / "whisper")
    features = WhisperFeatureExtractor(feature_size=8, chunk_length=0.4)  # 40 frames
    features.save_pretrained(tmp_path / "whisper")
    recognize = pipeline("automatic-speech-recognition", model=str(tmp_path / "whisper"))
    sound = {"raw": np.sin(np.arange(6400, dtype=np.float32)), "sampling_rate": 16000}
    assert len(recognize(sound, generate_kwargs={"max_new_tokens": 5})["text"].split()) == 5


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


def test_text_commands_say_that_whisper_reads_audio(folders, reports):
    with pytest.raises(InputError, match="reads audio, and this needs a model that reads text"):
        load_model(str(folders[1] / "whisper"))
