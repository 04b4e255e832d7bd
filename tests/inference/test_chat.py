"""Prompts as messages, by the tokenizer's chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from hf_rfa.convert import InputError, convert
from hf_rfa.inference import generate_text, load_model
from hf_rfa.inference.generation import chat_text
from tests.conftest import save_tiny_tokenizer
from tests.families import make, make_gpt2, save_softmax_model

#: A turn is a word for the role, the words of the message, and the end token.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}w4{% elif message.role == 'user' %}w5{% else %}w6"
    "{% endif %} {{ message.content }} </s> {% endfor %}{% if add_generation_prompt %}w6 {% endif %}"
)
OPTIONS: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False}


def tiny_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Any:
    save_tiny_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def tiny_model(variant: str = "positive-gate") -> Any:
    model = make_gpt2(variant, eos_token_id=2, pad_token_id=1, n_positions=96)
    model.generation_config.update(eos_token_id=2, pad_token_id=1)
    return model


def test_a_message_is_written_as_the_template_does(tmp_path):
    tokenizer, model = tiny_tokenizer(tmp_path), tiny_model()
    found = generate_text(model, tokenizer, "w7 w8", chat=True, system="w9", **OPTIONS)
    ids = torch.tensor([[4, 9, 2, 5, 7, 8, 2, 6]])
    assert found.prompt_tokens == 8
    new = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)[0, 8:]
    assert found.text == tokenizer.decode(new, skip_special_tokens=True)
    batch = generate_text(model, tokenizer, ["w7 w8", "w10"], chat=True, system="w9", **OPTIONS)
    assert batch.texts[0] == found.text
    with pytest.raises(InputError, match="prompt 2 of 2 is empty"):
        generate_text(model, tokenizer, ["w7", " "], chat=True, **OPTIONS)


def test_what_has_no_chat_is_refused(tmp_path):
    tokenizer, model, bart = tiny_tokenizer(tmp_path, None), tiny_model(), make("bart")
    for each, match in ((model, r"no chat template.*Leave --chat out"), (bart, r"has an encoder.*Leave --chat out")):
        with pytest.raises(InputError, match=match):
            generate_text(each, tokenizer, "w7", chat=True, **OPTIONS)
    tokenizer.chat_template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}w5"
    with pytest.raises(InputError, match=r"refuses these messages \(system, user\): no system here"):
        generate_text(model, tokenizer, "w7", chat=True, system="w8", **OPTIONS)


@pytest.fixture
def chatty(tmp_path) -> Path:
    """A checkpoint with a chat template."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_line_shows_answers_alone(chatty, run_cli, capsys):
    model, tokenizer = load_model(str(chatty))
    common = ("generate", chatty, "--chat", "--max-new-tokens", 5)
    expected = [generate_text(model, tokenizer, each, chat=True, max_new_tokens=5).text for each in ("w7 w8", "w9")]
    capsys.readouterr()
    assert run_cli(*common, "--prompt", "w7 w8") == 0
    assert capsys.readouterr().out.split() == expected[0].split()
    assert run_cli(*common, "--prompt", "w7 w8", "--prompt", "w9") == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_the_command_line_refuses_what_cannot_be(chatty, refused_command):
    assert "pass --chat with it" in refused_command("generate", chatty, "--prompt", "w7", "--system", "w8")
    (chatty / "chat_template.jinja").unlink()
    assert "has no chat template" in refused_command("generate", chatty, "--prompt", "w7", "--chat")
    assert "pass --prompt or --prompt-file" in refused_command("generate", chatty, "--chat")


def test_a_conversion_keeps_template_and_generation_settings(tmp_path):
    save_softmax_model("gpt2", tmp_path / "parent")
    tiny_tokenizer(tmp_path / "parent")
    settings = {"eos_token_id": [2, 9], "pad_token_id": 1, "bos_token_id": 0, "do_sample": True, "temperature": 0.6}
    settings |= {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    GenerationConfig(**settings).save_pretrained(tmp_path / "parent")
    convert(tmp_path / "parent", tmp_path / "out", num_features=8)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: found[name] for name in settings} == settings
    model, tokenizer = load_model(str(tmp_path / "out"))
    assert model.generation_config.eos_token_id == [2, 9]
    assert chat_text(tokenizer, "w7") == "w5 w7 </s> w6 "
