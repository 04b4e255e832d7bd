"""Prompts as messages, by the tokenizer's chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_rfa.convert import InputError, convert
from hf_rfa.inference import generate_text, load_model
from hf_rfa.inference.generation import messages_text
from tests.conftest import save_tiny_tokenizer
from tests.families import make, make_gpt2, save_softmax_model

#: A turn is a word for the role, the words of the message, and the end token.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}w4{% elif message.role == 'user' %}w5{% else %}w6"
    "{% endif %} {{ message.content }} </s> {% endfor %}{% if add_generation_prompt %}w6 {% endif %}"
)
OPTIONS: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint with a chat template."""
    model = make_gpt2("positive-gate", eos_token_id=2, pad_token_id=1, n_positions=96)
    model.generation_config.update(eos_token_id=2, pad_token_id=1)
    model.save_pretrained(tmp_path / "model")
    save_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def test_a_message_is_written_as_the_template_does(folder):
    model, tokenizer = load_model(str(folder))
    found = generate_text(model, tokenizer, "w7 w8", chat=True, system="w9", **OPTIONS)
    ids = torch.tensor([[4, 9, 2, 5, 7, 8, 2, 6]])
    assert found.prompt_tokens == 8
    new = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)[0, 8:]
    assert found.text == tokenizer.decode(new, skip_special_tokens=True)
    batch = generate_text(model, tokenizer, ["w7 w8", "w10"], chat=True, system="w9", **OPTIONS)
    assert batch.texts[0] == found.text


def test_what_cannot_be_said_is_refused(folder):
    model, tokenizer = load_model(str(folder))
    with pytest.raises(InputError, match="prompt 2 of 2 is empty"):
        generate_text(model, tokenizer, ["w7", " "], chat=True, **OPTIONS)
    with pytest.raises(InputError, match=r"has an encoder.*Leave --chat out"):
        generate_text(make("bart"), tokenizer, "w7", chat=True, **OPTIONS)
    tokenizer.chat_template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}w5"
    with pytest.raises(InputError, match=r"refuses these messages \(system, user\): no system here"):
        generate_text(model, tokenizer, "w7", chat=True, system="w8", **OPTIONS)


def test_a_conversion_keeps_template_and_generation_settings(tmp_path):
    save_softmax_model("gpt2", tmp_path / "parent")
    (tmp_path / "parent" / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"eos_token_id": [2, 9], "pad_token_id": 1, "bos_token_id": 0, "do_sample": True, "temperature": 0.6}
    settings |= {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    GenerationConfig(**settings).save_pretrained(tmp_path / "parent")
    convert(tmp_path / "parent", tmp_path / "out", num_features=8)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: found[name] for name in settings} == settings
    model, tokenizer = load_model(str(tmp_path / "out"))
    assert model.generation_config.eos_token_id == [2, 9]
    assert messages_text(tokenizer, [{"role": "user", "content": "w7"}]) == "w5 w7 </s> w6 "
