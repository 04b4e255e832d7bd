"""The examples, run on tiny models and a text."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import run as demo
from hf_rfa.models.cache_names import returned_cache
from tests.conftest import ROOT, leftovers, save_tiny_tokenizer
from tests.docs.test_docs import parse
from tests.families import make, save_softmax_model

pytestmark = [
    pytest.mark.filterwarnings("error:fan_in_fan_out"),  # which PEFT mends with a warning
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # PEFT reads transformers' old name
]
NAMES = ["look_inside", "stream_a_book", "convert_and_generate", "long_prompt", "distil_and_finetune"]
FIGURE = r"(?m)^(\w+): perplexity ([\d.]+)"
every_family = pytest.mark.parametrize("family", ["gpt2", "llama"])


def run(name: str, folder: Path, *arguments: object) -> str:
    """Return what an example prints when it is run in a folder."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder with softmax models that have tokenizers, and a text."""
    folder = tmp_path_factory.mktemp("examples")
    for family in ("gpt2", "llama"):
        save_softmax_model(family, folder / family, eos_token_id=2)
    numbers = torch.randint(4, 61, (900,), generator=torch.Generator().manual_seed(0))
    (folder / "text.txt").write_text(" ".join(f"w{number}" for number in numbers))
    return folder


@pytest.fixture(scope="module")
def converted(tiny) -> dict[str, str]:
    """What the first example prints, by family; the checkpoint is in FAMILY-rfa."""
    texts = ("--calibrate", "text.txt", "--evaluate", "text.txt", "--prompt", "w5 w6 w7")
    options = ("--tokens", 90, "--new-tokens", 5, "--output")
    return {
        family: run("convert_and_generate", tiny, family, *texts, *options, f"{family}-rfa")
        for family in ("gpt2", "llama")
    }


@every_family
def test_convert_and_generate(family, tiny, converted):
    figures = dict(re.findall(FIGURE, converted[family]))
    tokenizer = AutoTokenizer.from_pretrained(tiny / family)
    ids = tokenizer((tiny / "text.txt").read_text(), return_tensors="pt")["input_ids"][:, :90]
    for name, folder in (("softmax", family), ("RFA", f"{family}-rfa")):
        loss = AutoModelForCausalLM.from_pretrained(tiny / folder)(ids, labels=ids).loss
        assert float(figures[name]) == pytest.approx(float(loss.detach().exp()), abs=0.006)
    assert converted[family].count("w5 w6 w7") == 2


@every_family
def test_look_inside(family, tiny):
    """The picture's tokens are those of the memory, and as many as it has places."""
    options = ("--calibrate", "text.txt", "--text", "text.txt", "--tokens", 80, "--new-tokens", 5)
    printed = run("look_inside", tiny, family, *options, "--output", f"{family}-inside")
    folder = tiny / f"{family}-inside"
    assert (folder / "kept.png").read_bytes().startswith(b"\x89PNG")
    assert "4 sinks, 31 recent and 28 important tokens" in printed
    assert list(dict(re.findall(FIGURE, printed))) == ["softmax", "converted"]

    kept_tokens = runpy.run_path(str(ROOT / "examples" / "look_inside.py"))["kept_tokens"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    ids = AutoTokenizer.from_pretrained(folder / "model")((tiny / "text.txt").read_text(), return_tensors="pt")
    with torch.no_grad():
        cache = returned_cache(model(ids["input_ids"][:, :80], use_cache=True))
    kept = torch.cat([kept_tokens(layer, 80, model.config.window_size) for layer in cache.layers])
    assert [(kept == value).sum(1).unique().tolist() for value in range(4)] == [[80 - 63], [4], [28], [31]]
    assert (kept[:, :4] == 1).all()
    assert (kept[:, -31:] == 3).all()
    assert f"shows what {len(kept)} heads keep of 80 tokens" in printed


@torch.no_grad()
def test_stream_a_book(tiny, converted):
    """Blocks of one stream have the loss that they have in the whole text; the base model reads each alone."""
    options = ("--base", "llama", "--tokens", 90, "--block", 40, "--output", "book.png")
    printed = run("stream_a_book", tiny, "llama-rfa", "text.txt", *options)
    assert (tiny / "book.png").read_bytes().startswith(b"\x89PNG")
    ids = AutoTokenizer.from_pretrained(tiny / "llama")((tiny / "text.txt").read_text(), return_tensors="pt")
    ids, blocks = ids["input_ids"][:, :91], ((0, 40), (40, 80), (80, 90))
    rfa, base = (AutoModelForCausalLM.from_pretrained(tiny / name).eval() for name in ("llama-rfa", "llama"))
    logits = [rfa(ids[:, :-1]).logits[0, start:end] for start, end in blocks]
    logits += [base(ids[:, start:end]).logits[0] for start, end in blocks]
    found = [float(perplexity) for perplexity in re.findall(r"perplexity ([\d.]+)", printed)]
    for (start, end), block, perplexity in zip(2 * blocks, logits, found, strict=True):
        loss = torch.nn.functional.cross_entropy(block, ids[0, start + 1 : end + 1])
        assert perplexity == pytest.approx(float(loss.exp()), abs=0.006)


@every_family
def test_long_prompt(family, tiny, converted):
    options = ("--text", "text.txt", "--tokens", 60, "--new-tokens", 6, "--output", f"{family}-prompt")
    printed = run("long_prompt", tiny, f"{family}-rfa", *options, "--ask", "w9", "w10 w11")
    assert (tiny / f"{family}-prompt" / "prompt.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(tiny / f"{family}-rfa").eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny / f"{family}-rfa")
    text = tokenizer((tiny / "text.txt").read_text(), return_tensors="pt")["input_ids"][:, :60]
    for beginning in ("w9", "w10 w11"):
        ids = torch.cat([text, tokenizer(beginning, return_tensors="pt")["input_ids"]], dim=1)
        settings = {"use_cache": False, "do_sample": False, "repetition_penalty": 1.3, "pad_token_id": 1}
        answer = model.generate(ids, max_new_tokens=6, **settings)
        assert f"…{tokenizer.decode(answer[0, 60:], skip_special_tokens=True)}\n" in printed


@pytest.mark.parametrize(
    ("family", "lora_rank"),
    [("gpt2", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", 0), ("llama", 2)))],
)
def test_distil_and_finetune(family, lora_rank, tiny):
    folder = tiny / f"{family}-trained-{lora_rank}"
    options = ("--train", "text.txt", "--evaluate", "text.txt", "--output", folder, "--lora-rank", lora_rank)
    sizes = ("--steps", 6, "--block-length", 48, "--tokens", 90)
    figures = dict(re.findall(FIGURE, run("distil_and_finetune", tiny, family, *options, *sizes)))
    assert list(figures)[1:] == ["converted", "distilled", "tuned"]
    assert float(figures["tuned"]) < float(figures["distilled"])
    assert json.loads((folder / "distilled" / "distillation.json").read_text())["recipe"]["transfer"]["steps"] == 6
    before, after = (load_file(folder / name / "model.safetensors") for name in ("distilled", "tuned"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    if lora_rank:
        assert all(name.endswith(("c_attn.weight", "q_proj.weight", "v_proj.weight")) for name in changed)
    model = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    assert model.config.model_type == f"rfa_{family}"
    assert model.config.use_cache


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_arguments_on_the_demo(name, tmp_path):
    assert run(name, tmp_path)
    assert list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bart"])
def test_the_server_finds_the_class_of_every_kind_of_checkpoint(family, tmp_path, monkeypatch):
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
    run("serve", tmp_path, "model")
    assert type(loaded[0]) is type(model)


@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_is_refused_before_work_starts(name, tmp_path, capsys):
    make("bart").config.save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit):
        run(name, tmp_path, "model")
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
