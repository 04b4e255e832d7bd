"""Configurations and tokenizers that transformers runs, and that say something which conversion cannot take as it stands."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

from hf_rfa.convert import InputError, convert
from hf_rfa.inference import generate_text, load_model, loading
from tests.conftest import leftovers, refused, save_tiny_tokenizer, tiny_parent_config, words
from tests.decoders import saved
from tests.families import base_config

#: A window over the whole text, so that the result computes what its source does.
EXACT: dict[str, Any] = {"preset": "exact", "window_size": 96, "num_sinks": 0, "num_slots": 0}


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder with a softmax Llama and a tokenizer."""
    folder = tmp_path / "source"
    torch.manual_seed(1)
    LlamaForCausalLM(base_config("llama")).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def warned(caplog) -> Any:
    """What was warned of; each warning counts as not given before."""
    loading.warn_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="hf_rfa")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("hf_rfa")]


def with_fields(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def assert_same_logits(source: Path, result: Path) -> None:
    ids = torch.randint(4, 61, (2, 20))
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, result)]
    with torch.no_grad():
        found, expected = (model(ids, return_dict=True).logits for model in reversed(models))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("output_attentions", True), ("return_dict", False), ("output_hidden_states", True), ("use_cache", False)],
)
def test_what_calls_return_is_no_obstacle(field, value, source, tmp_path, warned, run_cli):
    """Conversion, generation, and saving again: the first two fields are read as the programs need them, and that is said."""
    with_fields(source, **{field: value})
    convert(source, tmp_path / "out", **EXACT)
    said = [message for message in warned() if field in message]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if field in ("output_attentions", "return_dict"):
        assert len(said) == 1
        assert f"has {field}={value}, and is read with {field}={not value}" in said[0]
        assert config.get(field, not value) != value
    else:
        assert not said
        assert config[field] == value
    assert_same_logits(with_fields(source, **{field: config.get(field, not value)}), tmp_path / "out")
    with_fields(source, **{field: value})
    for folder in (source, tmp_path / "out"):
        model, tokenizer = load_model(str(folder))
        assert generate_text(model, tokenizer, words(5), max_new_tokens=3, ignore_eos=True).new_tokens == 3
        model.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation"])
def test_attention_that_this_machine_lacks_is_chosen_anew(name, source, tmp_path, warned):
    with_fields(source, **{name: "flash_attention_2"})
    convert(source, tmp_path / "out", device="cpu", **EXACT)
    model, _ = load_model(str(source), device="cpu")
    assert model.config._attn_implementation == "sdpa"
    said = [message for message in warned() if "flash_attention_2" in message]
    assert len(said) == 1
    assert "which cannot be computed here" in said[0]
    assert_same_logits(with_fields(source, **{name: "sdpa"}), tmp_path / "out")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_that_this_machine_has_stays(attention, source, warned):
    with_fields(source, attn_implementation=attention)
    assert load_model(str(source))[0].config._attn_implementation == attention
    assert warned() == []


@pytest.mark.parametrize(("name", "fields"), [("opt", {"num_key_value_heads": 2}), ("opt", {"num_key_value_heads": 3})])
def test_a_field_of_another_family_counts_as_little_as_in_transformers(name, fields, tmp_path):
    source = with_fields(saved(name, tmp_path / "source"), **fields)
    convert(source, tmp_path / "out", **EXACT)
    assert_same_logits(source, tmp_path / "out")


def test_a_width_that_attention_does_not_go_by_is_refused_in_a_line(tmp_path):
    source = with_fields(saved("opt", tmp_path / "source"), head_dim=5)
    said = refused("cannot be converted: RFAOPTAttention has keys", source, tmp_path)
    assert "\n" not in said


@pytest.mark.parametrize(
    "fields",
    [{"num_sinks": 3}, {"feature_map": "x"}, {"num_features": -3}, {"window_size": 5}, {"gate": True}],
)
def test_a_source_has_no_fields_of_features(fields, source, tmp_path):
    convert(source, tmp_path / "a", command="the command")
    convert(with_fields(source, **fields), tmp_path / "b", command="the command")
    a, b = ((tmp_path / name / "config.json").read_text() for name in "ab")
    assert a == b


@pytest.mark.parametrize(
    ("stated", "taken"),
    [
        ("LLaMAForCausalLM", "RFALlamaForCausalLM"),
        ("LLaMALMHeadModel", "RFALlamaForCausalLM"),
        ("OldModel", "RFALlamaModel"),
    ],
)
def test_an_earlier_name_of_a_class_is_taken_by_its_family(stated, taken, source, tmp_path, warned):
    convert(with_fields(source, architectures=[stated]), tmp_path / "out", **EXACT)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [taken]
    assert (
        f"is a {stated}, which transformers does not have: it is taken for a {taken.removeprefix('RFA')}" in warned()[0]
    )


@pytest.mark.parametrize("stated", ["LlamaStrange", "BertModel", "LlamaForMaskedLM"])
def test_other_classes_are_refused(stated, source, tmp_path):
    refused(f"is a {stated}, which cannot be converted", with_fields(source, architectures=[stated]), tmp_path)


def test_a_tokenizer_with_one_entry_more(tmp_path, warned):
    """It is warned of; a text with that entry is refused, and no other."""
    source = tmp_path / "source"
    GPT2LMHeadModel(tiny_parent_config(eos_token_id=2)).save_pretrained(source)
    save_tiny_tokenizer(source, size=62)
    text, other = (tmp_path / name for name in ("text.txt", "other.txt"))
    text.write_text("\n".join(words(9, start) for start in range(20)))
    other.write_text(f"w61 {text.read_text()}")
    convert(source, tmp_path / "out", calibrate_on=text)
    assert "has 62 entries, and the model's vocabulary 61: texts with 'w61' cannot be read. Put the" in warned()[0]
    refused(
        "the tokenizer gives token 61, but the model's vocabulary has 61 entries", source, tmp_path, calibrate_on=other
    )
    model, tokenizer = load_model(str(tmp_path / "out"))
    assert generate_text(model, tokenizer, words(5), max_new_tokens=3, ignore_eos=True).new_tokens == 3
    with pytest.raises(InputError, match="gives token 61"):
        generate_text(model, tokenizer, "w5 w61", max_new_tokens=3)
    assert "out" in leftovers(tmp_path)


def test_padding_without_an_embedding(source, warned):
    """The entry that was added most often is one for padding, which no model reads."""
    model, tokenizer = load_model(str(source))
    prompts = [words(5), words(3)]
    expected = generate_text(model, tokenizer, prompts, max_new_tokens=4, ignore_eos=True).texts
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 61
    assert generate_text(model, tokenizer, prompts, max_new_tokens=4, ignore_eos=True).texts == expected


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "{}", "out"],
        ["evaluate", "{}", "text.txt"],
        ["recall", "{}"],
        ["generate", "{}", "--prompt", "w5"],
        ["bench", "--model", "{}"],
        ["distill", "{}", "--teacher", "{}", "--data", "text.txt"],
        ["finetune", "--model", "{}", "--task", "clm", "--train", "text.txt"],
    ],
)
def test_an_adapter_is_to_be_merged_first(command, tmp_path, monkeypatch, refused_command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(words(99))
    save_tiny_tokenizer(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "gpt2", "peft_type": "LORA"}'
    )
    before = leftovers(tmp_path)
    said = refused_command(*(word.format("adapter") for word in command))
    assert "adapter has no config.json" in said
    assert "It holds an adapter of PEFT: merge it into its base model first" in said
    assert leftovers(tmp_path) == before
