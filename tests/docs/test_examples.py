"""The examples, run as a user runs them, on a tiny model and text."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_rfa
from demo import run as demo
from tests.conftest import ROOT, leftovers, save_tiny_tokenizer
from tests.docs.test_docs import parse
from tests.families import make, save_softmax_model

FIGURE = r"perplexity ([\d.]+)"


def run(name: str, folder: Path, *arguments: object) -> str:
    """Return what an example prints when it is run in ``folder``."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder with a softmax model that has a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("examples")
    save_softmax_model("gpt2", folder / "parent", eos_token_id=2)
    words = torch.randint(4, 61, (900,), generator=torch.Generator().manual_seed(0))
    (folder / "text.txt").write_text(" ".join(f"w{number}" for number in words))
    return folder


@pytest.fixture(scope="module")
def converted(tiny) -> str:
    """What the first example prints; its checkpoint is in ``converted``."""
    texts = ("--calibrate", "text.txt", "--evaluate", "text.txt")
    options = ("--tokens", 90, "--new-tokens", 5, "--prompt", "w5 w6 w7")
    return run("convert_and_generate", tiny, "parent", *texts, *options)


def test_convert_and_generate(tiny, converted):
    softmax, rfa = (float(each) for each in re.findall(rf"(?m)^\w+: {FIGURE}", converted))
    tokenizer = AutoTokenizer.from_pretrained(tiny / "parent")
    ids = tokenizer((tiny / "text.txt").read_text(), return_tensors="pt")["input_ids"][:, :90]
    for figure, name in ((softmax, "parent"), (rfa, "converted")):
        loss = AutoModelForCausalLM.from_pretrained(tiny / name)(ids, labels=ids).loss
        assert figure == pytest.approx(float(loss.detach().exp()), abs=0.006)
    # 2 layers of 3 heads: 64 features of 8 values and the normaliser, 32 tokens of 16 numbers, a score and a place, 4 bytes
    # each; and what every layer counts
    assert f"cache {2 * (3 * (64 * 9 + 32 * (16 + 2)) + 1) * 4:,} bytes" in converted
    assert converted.count("w5 w6 w7") == 2


def test_long_prompt(tiny, converted):
    options = ("--text", "text.txt", "--tokens", 60, "--new-tokens", 6, "--output", "prompt", "--ask", "w9", "w10 w11")
    printed = run("long_prompt", tiny, "converted", *options)
    assert (tiny / "prompt" / "prompt.safetensors").stat().st_size > 2 * 3 * 128 * 9 * 4
    model = AutoModelForCausalLM.from_pretrained(tiny / "converted").eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny / "converted")
    words = (tiny / "text.txt").read_text().split()[:60]
    for beginning in ("w9", "w10 w11"):
        ids = tokenizer(" ".join(words), return_tensors="pt")["input_ids"][:, :60]
        ids = torch.cat([ids, tokenizer(beginning, return_tensors="pt")["input_ids"]], dim=1)
        whole = model.generate(
            ids, use_cache=False, do_sample=False, max_new_tokens=6, repetition_penalty=1.3, pad_token_id=1
        )
        assert f"…{tokenizer.decode(whole[0, 60:], skip_special_tokens=True)}\n" in printed


@pytest.mark.parametrize("lora_rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_distil_and_finetune(lora_rank, tiny):
    texts = ("--train", "text.txt", "--evaluate", "text.txt", "--output", f"trained-{lora_rank}")
    options = ("--steps", 6, "--block-length", 48, "--tokens", 90, "--lora-rank", lora_rank)
    printed = run("distil_and_finetune", tiny, "parent", *texts, *options)
    figures = dict(re.findall(rf"(?m)^(\w+): {FIGURE}", printed))
    assert list(figures) == ["parent", "converted", "distilled", "tuned"]
    assert float(figures["tuned"]) < float(figures["distilled"])
    folder = tiny / f"trained-{lora_rank}"
    assert json.loads((folder / "distilled" / "distillation.json").read_text())["recipe"]["transfer"]["steps"] == 6
    before, after = (load_file(folder / name / "model.safetensors") for name in ("distilled", "tuned"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.endswith("c_attn.weight") for name in changed)
    if lora_rank:
        assert all(name.endswith("c_attn.weight") for name in changed)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    assert type(loaded) is hf_rfa.RFAGPT2LMHeadModel
    assert loaded.config.use_cache


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convert_and_generate", "long_prompt", "distil_and_finetune"])
def test_without_arguments_on_the_demo(name, tmp_path):
    assert run(name, tmp_path)
    assert list(tmp_path.rglob("config.json"))


# Other kinds of classes, in this process


@pytest.fixture
def run_here(monkeypatch, capsys) -> Callable[..., str]:
    """Runs an example in this process: it takes a name, a folder and words, and returns what is printed."""

    def here(name: str, folder: Path, *words: object) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return here


@pytest.fixture(scope="module")
def llama(tiny) -> Path:
    """The folder of ``tiny``, which has a softmax Llama too."""
    save_softmax_model("llama", tiny / "llama", eos_token_id=2)
    return tiny


def test_a_llama_is_converted_and_reads_a_long_prompt(llama, run_here):
    texts = ("--calibrate", "text.txt", "--evaluate", "text.txt", "--prompt", "w5 w6 w7", "--output", "llama-rfa")
    assert "RFA: perplexity" in run_here(
        "convert_and_generate", llama, "llama", *texts, "--tokens", 90, "--new-tokens", 5
    )
    options = ("--text", "text.txt", "--tokens", 60, "--new-tokens", 6, "--output", "llama-prompt", "--ask", "w9")
    printed = run_here("long_prompt", llama, "llama-rfa", *options)
    model, tokenizer = (each.from_pretrained(llama / "llama-rfa") for each in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer((llama / "text.txt").read_text(), return_tensors="pt")["input_ids"][:, :60]
    ids = torch.cat([ids, tokenizer("w9", return_tensors="pt")["input_ids"]], dim=1)
    whole = model.generate(ids, use_cache=False, do_sample=False, max_new_tokens=6, repetition_penalty=1.3)
    assert f"…{tokenizer.decode(whole[0, 60:], skip_special_tokens=True)}\n" in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("error:fan_in_fan_out", "ignore:.*gradient_checkpointing:FutureWarning")
def test_a_llama_is_distilled_and_finetuned(llama, run_here):
    options = ("--train", "text.txt", "--evaluate", "text.txt", "--output", "llama-trained", "--lora-rank", 2)
    options += ("--steps", 6, "--block-length", 48, "--tokens", 90)
    printed = run_here("distil_and_finetune", llama, "llama", *options)
    figures = dict(re.findall(rf"(?m)^(\w+): {FIGURE}", printed))
    assert float(figures["tuned"]) < float(figures["distilled"])
    assert (
        type(AutoModelForCausalLM.from_pretrained(llama / "llama-trained" / "tuned")).__name__ == "RFALlamaForCausalLM"
    )


@pytest.mark.parametrize("family", ["gpt2", "llama", "bart"])
def test_the_server_finds_the_class_of_every_kind_of_checkpoint(family, tmp_path, run_here, monkeypatch):
    model_manager = pytest.importorskip("transformers.cli.serving.model_manager")
    model = make(family, {"window_size": 4})
    model.save_pretrained(tmp_path / "model")
    save_tiny_tokenizer(tmp_path / "model")
    manager, loaded = model_manager.ModelManager(device="cpu"), []

    def serve() -> None:
        name = manager.process_model_name(str(tmp_path / "model"))
        loaded.append(manager.load_model_and_processor(name)[0])
        manager.shutdown()

    monkeypatch.setattr("transformers.cli.transformers.main", serve)
    monkeypatch.setattr(model_manager, "transformers", transformers)  # as it is afterwards
    run_here("serve", tmp_path, "model")
    assert type(loaded[0]) is type(model)


@pytest.mark.parametrize("name", ["convert_and_generate", "long_prompt", "distil_and_finetune"])
def test_an_encoder_is_refused_before_work_starts(name, tmp_path, run_here, capsys):
    make("bart").config.save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit):
        run_here(name, tmp_path, "model")
    assert "model has an encoder. Pass a " in capsys.readouterr().err
    assert leftovers(tmp_path) == ["model"]


def test_the_commands_of_the_demo_parse(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(demo, "app", lambda words, **_: commands.append(words))
    monkeypatch.setattr(sys, "argv", ["demo", "--output", str(tmp_path)])
    demo.main()
    assert [words[0] for words in commands] == ["convert", *["evaluate"] * 2, *["generate"] * 2, "bench"]
    for name, *words in commands:
        parse(name, words)
