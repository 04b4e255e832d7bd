"""Configurations and tokenizers that transformers runs, and that say something which conversion cannot take as it stands."""

from __future__ import annotations

import json
import logging
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from hf_rfa.convert import InputError, convert
from hf_rfa.convert.checkpoint.source import locate
from hf_rfa.inference import generate_text, load_model
from tests.conftest import copy_of, leftovers, refused, save_tiny_tokenizer, words
from tests.convert.conftest import fields, load
from tests.decoders import saved

#: A window over the whole text, so that the result computes what its source does.
EXACT: dict[str, Any] = {"preset": "exact", "window_size": 96, "num_sinks": 0, "num_slots": 0}


@pytest.fixture
def source(checkpoints, tmp_path) -> Path:
    """A folder with a softmax Llama and a tokenizer, to be changed."""
    return copy_of(checkpoints["llama"], tmp_path / "source")


@pytest.fixture
def warned(caplog) -> Any:
    """What was warned of; each warning counts as not given before."""
    transformers_logging.warning_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="hf_rfa")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("hf_rfa")]


def with_fields(folder: Path, **changed: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields(folder) | changed))
    return folder


def assert_same_logits(source: Path, result: Path) -> None:
    ids = torch.randint(4, 61, (2, 20))
    with torch.no_grad():
        found, expected = (load(folder)(ids, return_dict=True).logits for folder in (result, source))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"), [("output_attentions", True), ("return_dict", False), ("use_cache", False)]
)
def test_what_calls_return_is_no_obstacle(field, value, source, tmp_path, warned, run_cli):
    """Conversion, generation, and saving again: the first two fields are read as the programs need them, and that is said."""
    with_fields(source, **{field: value})
    convert(source, tmp_path / "out", **EXACT)
    said = [message for message in warned() if field in message]
    kept = fields(tmp_path / "out").get(field, not value)
    if field == "use_cache":
        assert not said
        assert kept == value
    else:
        assert [f"has {field}={value}, and is read with {field}={not value}" in message for message in said] == [True]
        assert kept != value
    for folder in (source, tmp_path / "out"):
        model, tokenizer = load_model(str(folder))
        assert generate_text(model, tokenizer, words(5), max_new_tokens=3, ignore_eos=True).new_tokens == 3
        model.save_pretrained(tmp_path / "again")
    assert_same_logits(with_fields(source, **{field: kept}), tmp_path / "out")


@pytest.mark.parametrize(
    ("field", "stated", "taken"),
    [("_attn_implementation", "flash_attention_2", "sdpa"), ("attn_implementation", "eager", "eager")],
)
def test_attention_that_this_machine_lacks_is_chosen_anew(field, stated, taken, source, tmp_path, warned):
    with_fields(source, **{field: stated})
    convert(source, tmp_path / "out", device="cpu", **EXACT)
    model, _ = load_model(str(source), device="cpu")
    assert model.config._attn_implementation == taken
    assert ["which cannot be computed here" in message for message in warned()] == [True] * (stated != taken)
    assert_same_logits(with_fields(source, **{field: taken}), tmp_path / "out")


def test_a_field_of_another_family_counts_as_little_as_in_transformers(tmp_path):
    source = with_fields(saved("opt", tmp_path / "source"), num_key_value_heads=3)
    convert(source, tmp_path / "out", **EXACT)
    assert_same_logits(source, tmp_path / "out")


def test_a_source_has_no_fields_of_features(source, tmp_path):
    convert(source, tmp_path / "a", command="the command")
    rfa_fields = {"num_sinks": 3, "feature_map": "x", "num_features": -3, "window_size": 5, "gate": True}
    convert(with_fields(source, **rfa_fields), tmp_path / "b", command="the command")
    assert fields(tmp_path / "a") == fields(tmp_path / "b")


def test_other_classes_are_refused(source, tmp_path):
    with_fields(source, architectures=["BertModel"])
    refused("is a BertModel, which cannot be converted. Supported: Llama", source, tmp_path)


def test_a_tokenizer_with_one_entry_more(source, text, tmp_path, warned):
    """It is warned of; a text with that entry is refused, and no other."""
    other = tmp_path / "other.txt"
    save_tiny_tokenizer(source, size=62)
    other.write_text(f"w61 {text.read_text()}")
    convert(source, tmp_path / "out", calibrate_on=text, force=True)
    assert "has 62 entries, and the model's vocabulary 61: texts with 'w61' cannot be read. Put the" in warned()[0]
    match = "the tokenizer gives token 61, but the model's vocabulary has 61 entries"
    refused(match, source, tmp_path, calibrate_on=other)
    model, tokenizer = load_model(str(tmp_path / "out"))
    assert generate_text(model, tokenizer, words(5), max_new_tokens=3, ignore_eos=True).new_tokens == 3
    with pytest.raises(InputError, match=match):
        generate_text(model, tokenizer, "w5 w61", max_new_tokens=3)


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "{}", "out"],
        ["generate", "{}", "--prompt", "w5"],
        ["finetune", "--model", "{}", "--task", "clm", "--train", "text.txt"],
    ],
)
def test_an_adapter_is_to_be_merged_first(command, tmp_path, monkeypatch, refused_command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(words(99))
    save_tiny_tokenizer(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    before = leftovers(tmp_path)
    said = refused_command(*(word.format("adapter") for word in command))
    assert "adapter has no config.json" in said
    assert "It holds an adapter of PEFT: merge it into its base model first" in said
    assert leftovers(tmp_path) == before
    saved("gpt2", tmp_path / "adapter")  # merged into the folder where its adapter is
    assert "holds a model and an adapter of PEFT" in refused_command(*(word.format("adapter") for word in command))


def test_what_sentence_transformers_does_with_outputs_stays_beside_the_model(tmp_path):
    folder = saved("llama", tmp_path / "parent")
    parts = [{"idx": index, "name": str(index), "path": path} for index, path in enumerate(("", "1_Pooling", "2_Gone"))]
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "config_sentence_transformers.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    convert(folder, tmp_path / "out")
    for name in ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"):
        assert (tmp_path / "out" / name).read_text() == (folder / name).read_text()
    assert not (tmp_path / "out" / "2_Gone").exists()


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_hub_model_and_its_parts_bring_no_pickle_unasked(allow_pickle, tmp_path, monkeypatch):
    asked = []

    def download(name, revision, allow_patterns, ignore_patterns=()):
        asked.append(allow_patterns)
        return str(tmp_path)

    (tmp_path / "modules.json").write_text("[]")
    monkeypatch.setattr("hf_rfa.convert.checkpoint.source.snapshot_download", download)
    locate("some/model", revision=None, allow_pickle=allow_pickle)
    for patterns, folder in zip(asked, ("", "2_Dense/"), strict=True):
        for file, is_asked in (("config.json", True), ("pytorch_model.bin", allow_pickle)):
            assert any(fnmatch(folder + file, pattern) for pattern in patterns) == is_asked
