"""Training as it is run in earnest: killed, in pieces, in half precision, in several processes."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Seq2SeqTrainingArguments

import hf_rfa.finetune
from hf_rfa.convert import InputError
from hf_rfa.finetune.run_folder import last_checkpoint
from hf_rfa_cli import train as cli_train
from tests import training
from tests.conftest import ROOT, leftovers
from tests.training import assert_same, logged, run, weights

LAUNCH = Path(hf_rfa.finetune.__file__).parent / "launch"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(material: Path, **options) -> list[str]:
    """Return the words of a fine-tuning for ``hf-rfa``."""
    options = {"model": material / "gpt2-rfa", "task": "clm", "train": material / "rows.jsonl", **options}
    options |= {"block-length": 16, "learning-rate": 0.01}
    return ["finetune", *(str(word) for name in options for word in (f"--{name}", options[name]))]


PIECES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("task", "model", "smoothing"),
    [
        ("clm", "gpt2", 0.0),
        ("clm", "bart-rfa", 0.1),
        ("classify", "gpt2-rfa", 0.0),
        ("seq2seq", "bart", 0.0),
    ],
)
def test_the_loss_of_a_step_in_pieces_is_that_of_the_whole(task, model, smoothing, material, tmp_path):
    """Also where transformers' own head ignores how many labels the whole step has, and where pieces have unlike numbers."""
    options = {"task": task, "model": model, "steps": 2, "label_smoothing_factor": smoothing, "max_grad_norm": 0.0}
    options |= {"optim": "sgd", "learning_rate": 0.05}  # which takes a gradient of another size as a larger step
    options |= {"unpacked": True} if task == "clm" else {}
    run(material, tmp_path / "one", per_device_train_batch_size=8, **options)
    run(material, tmp_path / "other", **PIECES, **options)
    assert logged(tmp_path / "other" / "out") == pytest.approx(logged(tmp_path / "one" / "out"), rel=1e-4)
    assert_same(weights(tmp_path / "other" / "out"), weights(tmp_path / "one" / "out"), atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("model", ["gpt2", "bart-rfa"])
def test_language_models_learn_the_next_token(model, material, tmp_path):
    """Also a decoder that comes with an encoder, whose head in transformers learns the token that it reads."""
    metrics = run(material, tmp_path, model, steps=1, evaluate="rows.jsonl", unpacked=True, learning_rate=0.01)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    total, counted = 0.0, 0
    for line in (material / "rows.jsonl").read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"])["input_ids"]
        ids = torch.tensor([(ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id])[:16]])
        with torch.no_grad():
            logits = trained(ids, use_cache=False).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        counted += ids.shape[1] - 1
    assert metrics["eval_loss"] == pytest.approx(total / counted, rel=2e-3)


@pytest.mark.parametrize("task", ["clm", "generate", "classify"])
def test_the_loss_of_an_evaluation_is_the_mean_over_its_labels(task, material, tmp_path):
    """Whatever batches it was computed in, and whatever else the training minimises."""
    options = {"task": task, "model": "gpt2-rfa", "evaluate": "rows.jsonl", "steps": 1, "learning_rate": 1e-9}
    options |= {"unpacked": True} if task == "clm" else {}
    if task == "generate":
        options |= {"task": "seq2seq", "model": "bart-rfa", "predict_with_generate": True, "generation_max_length": 8}
    expected = run(material, tmp_path / "7", per_device_eval_batch_size=7, **options)
    found = run(material, tmp_path / "60", per_device_eval_batch_size=60, label_smoothing_factor=0.2, **options)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    if task == "clm":
        assert found["eval_perplexity"] == pytest.approx(math.exp(expected["eval_loss"]))
    if task == "generate":
        assert found["eval_bleu"] == pytest.approx(expected["eval_bleu"])


@pytest.mark.parametrize(("model", "task"), [("bart-rfa", "seq2seq"), ("gpt2-rfa", "classify")])
def test_a_tokenizer_that_pads_on_the_left_trains_as_another(model, task, material, tmp_path):
    shutil.copytree(material / model, tmp_path / "left")
    file = tmp_path / "left" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    options = {"task": task, "evaluate": "rows.jsonl", "steps": 2}
    expected = run(material, tmp_path / "right", model, **options)
    found = run(material, tmp_path, tmp_path / "left", **options)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "right" / "out"), atol=1e-6, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").padding_side == "left"


def test_bfloat16_follows_float32(material, tmp_path):
    full = run(material, tmp_path / "32", steps=8, evaluate="rows.jsonl")
    half = run(material, tmp_path / "16", steps=8, evaluate="rows.jsonl", bf16=True)
    assert half["eval_loss"] == pytest.approx(full["eval_loss"], rel=0.01)
    assert half["eval_loss"] < logged(tmp_path / "32" / "out")[0] - 0.05
    assert {tensor.dtype for tensor in weights(tmp_path / "16" / "out").values()} == {torch.float32}


def test_what_was_being_written_when_a_run_was_killed_is_passed_over(material, tmp_path):
    (tmp_path / ".out.training").mkdir()  # killed at once
    run(material, tmp_path, resume=True, steps=1)
    assert last_checkpoint(tmp_path / "nothing") is None
    for step, state in ((2, '{"global_step": 2}'), (10, '{"global_step": 10}'), (12, '{"global_'), (14, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_random_goes_on_to_the_same_weights(seed, material, tmp_path):
    """SIGKILL, several times in one run, at any point from the first step to the last file written."""
    draws, kills = random.Random(seed), 0

    def start(folder: Path) -> subprocess.Popen:
        options = {"max-steps": 60, "save-steps": 5, "disable-tqdm": "true", "use-cpu": "true"}
        resume = ["--resume"] if (folder / ".out.training").exists() else []
        words = [sys.executable, "-m", "hf_rfa_cli", *command(material, output=folder / "out", **options), *resume]
        return subprocess.Popen(words, env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    (tmp_path / "whole").mkdir()
    assert start(tmp_path / "whole").wait() == 0
    work = tmp_path / ".out.training"
    for _ in range(3):
        before = len(list(work.glob("checkpoint-*")))
        process = start(tmp_path)
        while process.poll() is None and len(list(work.glob("checkpoint-*"))) == before:
            time.sleep(0.005)
        time.sleep(draws.uniform(0, 0.6))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        assert not (tmp_path / "out").exists() or (tmp_path / "out" / "finetuning.json").is_file()
    assert kills
    if not (tmp_path / "out").exists():
        assert start(tmp_path).wait() == 0
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "whole" / "out"), atol=0, rtol=0)
    assert [name for name in leftovers(tmp_path) if not name.endswith(".partial")] == ["out", "whole"]


def test_the_launch_files_are_what_their_readers_take(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert sorted(path.name for path in LAUNCH.iterdir()) == ["ddp.yaml", "deepspeed.json", "fsdp.json"]
    assert load_config_from_file(str(LAUNCH / "ddp.yaml")).num_processes == 2
    options = {"output_dir": str(tmp_path), "use_cpu": True}
    sharded = Seq2SeqTrainingArguments(fsdp="full_shard", fsdp_config=str(LAUNCH / "fsdp.json"), **options)
    assert sharded.fsdp_plugin_args["fsdp_version"] == 2
    json.loads((LAUNCH / "deepspeed.json").read_text())


def test_processes_that_would_train_apart_are_refused(material, tmp_path, monkeypatch):
    """Several were launched, but the training arguments were made without knowing of the others."""
    arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, max_steps=1)
    assert arguments.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(training, "Seq2SeqTrainingArguments", lambda **options: arguments)
    with pytest.raises(InputError, match=r"2 processes were started.*--use-cpu"):
        run(material, tmp_path)
    with pytest.raises(InputError, match="--max-minutes is for one process"):
        run(material, tmp_path, max_minutes=1.0)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("there", [True, False])
def test_the_command_trains_on_the_cpu_where_there_is_nothing_else(there, tmp_path, monkeypatch):
    """Told so, the Trainer joins processes there, and takes --bf16; it does neither unasked."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    words = ["--task", "clm", "--train", "a", "--output_dir", str(tmp_path)]
    values = vars(cli_train.finetune_parser().parse_args(words))
    assert values["use_cpu"] is not there
    assert vars(cli_train.finetune_parser().parse_args([*words, "--use_cpu"]))["use_cpu"] is True


TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / "ddp.yaml")]
SHARDED = {"fsdp": "full_shard", "fsdp-config": LAUNCH / "fsdp.json", "ddp-backend": "gloo"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "module", "task", "options"),
    [
        (TORCHRUN, "hf_rfa_cli", "clm", {}),
        (TORCHRUN, "hf_rfa_cli", "classify", {}),
        (ACCELERATE, "hf_rfa_cli", "clm", {}),
        (ACCELERATE, "hf_rfa_cli", "classify", {}),
        (TORCHRUN, "tests.fsdp_on_cpu", "clm", SHARDED),  # which accelerate does not do on CPUs
    ],
    ids=["torchrun-clm", "torchrun-classify", "accelerate-clm", "accelerate-classify", "sharded"],
)
def test_two_processes_on_a_cpu_train_one_model(launcher, module, task, options, material, tmp_path):
    """As the docs start them: losses and weights are those of one process with batches twice as large."""
    environment = {**ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""}
    shared = {"task": task, "max-steps": 6, "logging-steps": 1, "overwrite": "true", "use-cpu": "true"}
    two = [*launcher, "-m", module], 2, options
    for name, (start, batch, others) in (("one", (["-m", "hf_rfa_cli"], 4, {})), ("two", two), ("two", two)):
        output = tmp_path / name / "out"
        words = command(material, output=output, **shared, **{"per-device-train-batch-size": batch}, **others)
        line = [sys.executable, *start, *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("written to") == 1
        assert (output / "config.json").is_file()
    losses = [logged(tmp_path / name / "out") for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert_same(weights(tmp_path / "two" / "out"), weights(tmp_path / "one" / "out"), atol=2e-4, rtol=1e-3)
