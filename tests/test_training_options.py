"""Training as it is run in earnest: killed, in pieces, in half precision, watched."""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

import hf_rfa.finetune
from hf_rfa import RFABartConfig, RFAGPT2Config, RFAMarianConfig
from hf_rfa.convert import InputError, convert
from hf_rfa.finetune.arguments import FinetuneArguments
from hf_rfa.finetune.finetune import finetune
from hf_rfa.finetune.run_folder import last_checkpoint
from hf_rfa_cli import train as cli_train

from .conftest import save_tiny_tokenizer, tiny_parent_config
from .test_convert import leftovers
from .test_finetune import run, words

LAUNCH = Path(hf_rfa.finetune.__file__).parent / "launch"


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    torch.manual_seed(1)
    GPT2LMHeadModel(tiny_parent_config(eos_token_id=2)).save_pretrained(folder / "gpt2")
    save_tiny_tokenizer(folder / "gpt2")
    convert(folder / "gpt2", folder / "gpt2-rfa", feature_map="exponential", num_features=8, gate=True)
    lines = [json.dumps({"text": words(5 + n % 9, n)}) for n in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model.safetensors")


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name, **tolerance)


def test_steps_in_pieces_give_the_weights_of_whole_ones(material, tmp_path):
    run(material, tmp_path / "whole", steps=4, per_device_train_batch_size=8)
    run(material, tmp_path / "pieces", steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_same(weights(tmp_path / "pieces"), weights(tmp_path / "whole"), atol=2e-5, rtol=1e-3)


def test_checkpointed_activations_give_the_same_weights(material, tmp_path):
    names = inspect.signature(Seq2SeqTrainingArguments).parameters
    option = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    run(material, tmp_path / "kept", steps=4)
    run(material, tmp_path / "again", steps=4, **{option: True})
    assert_same(weights(tmp_path / "again"), weights(tmp_path / "kept"), atol=1e-6, rtol=1e-5)


def test_bfloat16_follows_float32(material, tmp_path):
    full = run(material, tmp_path / "32", steps=12, evaluate="rows.jsonl")
    half = run(material, tmp_path / "16", steps=12, evaluate="rows.jsonl", bf16=True)
    assert half["eval_loss"] == pytest.approx(full["eval_loss"], rel=0.01)
    start = json.loads((tmp_path / "32" / "out" / "finetuning.json").read_text())["log"][0]["loss"]
    assert half["eval_loss"] < start - 0.05
    assert {tensor.dtype for tensor in weights(tmp_path / "16").values()} == {torch.float32}


def test_curves_go_to_tensorboard(material, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no TensorBoard")
    run(material, tmp_path, steps=5, report_to="tensorboard")
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    written = events.EventAccumulator(str(folder)).Reload()
    log = json.loads((tmp_path / "out" / "finetuning.json").read_text())["log"]
    expected = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]
    found = [(event.step, event.value) for event in written.Scalars("train/loss")]
    assert len(found) == 5
    assert found == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected]


def test_what_was_being_written_when_a_run_was_killed_is_passed_over(material, tmp_path):
    options = {"steps": 6, "save_steps": 2}
    (tmp_path / "whole").mkdir()
    run(material, tmp_path / "whole", **options)
    work = tmp_path / ".out.training"
    work.mkdir()  # killed at once
    run(material, tmp_path, resume=True, **options)
    assert_same(weights(tmp_path), weights(tmp_path / "whole"), atol=0, rtol=0)
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
    draws = random.Random(seed)
    command = [sys.executable, "-m", "hf_rfa.cli", "finetune", "--model", str(material / "gpt2-rfa"), "--task", "clm"]
    command += ["--train", str(material / "rows.jsonl"), "--block_length", "16", "--max_steps", "60", "--use_cpu"]
    command += ["--save_steps", "5", "--learning_rate", "0.01", "--disable_tqdm", "true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def finish(folder: Path, *more: str) -> None:
        done = subprocess.run([*command, "--output", str(folder / "out"), *more], capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]

    (tmp_path / "whole").mkdir()
    finish(tmp_path / "whole")
    work, kills = tmp_path / ".out.training", 0
    for _ in range(3):
        more = ["--resume"] if work.exists() else []
        process = subprocess.Popen(
            [*command, "--output", str(tmp_path / "out"), *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        before = len(list(work.glob("checkpoint-*")))
        while process.poll() is None and len(list(work.glob("checkpoint-*"))) == before:
            time.sleep(0.005)
        time.sleep(draws.uniform(0, 0.6))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        assert not (tmp_path / "out").exists() or (tmp_path / "out" / "finetuning.json").is_file()
    assert kills
    if not (tmp_path / "out").exists():
        finish(tmp_path, "--resume")
    assert_same(weights(tmp_path), weights(tmp_path / "whole"), atol=0, rtol=0)
    assert [name for name in leftovers(tmp_path) if not name.endswith(".partial")] == ["out", "whole"]


def test_the_launch_files_are_what_their_readers_take(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert sorted(path.name for path in LAUNCH.iterdir()) == ["ddp.yaml", "deepspeed.json", "fsdp.json"]
    assert load_config_from_file(str(LAUNCH / "ddp.yaml")).num_processes == 2
    options = {"output_dir": str(tmp_path), "use_cpu": True}
    sharded = Seq2SeqTrainingArguments(fsdp="full_shard", fsdp_config=str(LAUNCH / "fsdp.json"), **options)
    assert sharded.fsdp_plugin_args["fsdp_version"] == 2
    json.loads((LAUNCH / "deepspeed.json").read_text())


def test_label_smoothing_learns_the_next_token(material):
    """The Trainer shifts labels for the classes that transformers' table of causal models names, and for no others."""
    model = AutoModelForCausalLM.from_pretrained(material / "gpt2-rfa").eval()
    ids = torch.randint(3, 50, (2, 12))
    labels = ids.masked_fill(torch.rand(2, 12) < 0.2, -100)
    arguments = TrainingArguments(str(material / "unused"), label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    trainer = Trainer(model, arguments)
    with torch.no_grad():
        found = trainer.compute_loss(model, {"input_ids": ids, "labels": labels.clone()})
        log_probs = model(ids).logits[:, :-1].double().log_softmax(-1)
    counted = labels[:, 1:] != -100
    picked = log_probs.gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    expected = -(0.9 * picked + 0.1 * log_probs.mean(-1))[counted].mean()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config_class", [RFAGPT2Config, RFABartConfig, RFAMarianConfig])
def test_language_models_stand_in_the_tables_of_names(config_class):
    heads = config_class.AUTO_MAP
    for table, auto_class in (
        (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM"),
        (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM"),
    ):
        expected = heads[auto_class].rpartition(".")[2] if auto_class in heads else None
        assert table.get(config_class.model_type) == expected


def test_processes_that_would_train_apart_are_refused(material, tmp_path, monkeypatch):
    """Several were launched, but the training arguments were made without knowing of the others."""
    options = FinetuneArguments(task="clm", train=str(material / "rows.jsonl"), model=str(material / "gpt2-rfa"))
    arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, max_steps=1)
    assert arguments.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"2 processes were started.*--use_cpu"):
        finetune(options, arguments)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("there", [True, False])
def test_the_command_trains_on_the_cpu_where_there_is_nothing_else(there, tmp_path, monkeypatch):
    """Told so, the Trainer joins processes there, and takes --bf16; it does neither unasked."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    words = ["--task", "clm", "--train", "a", "--output_dir", str(tmp_path)]
    values = vars(cli_train.finetune_parser().parse_args(words))
    assert values["use_cpu"] is not there
    assert vars(cli_train.finetune_parser().parse_args([*words, "--use_cpu"]))["use_cpu"] is True


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_on_a_cpu_train_one_model(launcher, material, tmp_path):
    """As the docs start them: the weights are those of one process with batches twice as large."""
    together = {
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"],
        "accelerate": ["accelerate.commands.launch", "--config_file", str(LAUNCH / "ddp.yaml")],
    }[launcher]
    shared = ["hf_rfa.cli", "finetune", "--model", str(material / "gpt2-rfa"), "--task", "clm", "--max_steps", "6"]
    shared += [
        "--train",
        str(material / "rows.jsonl"),
        "--block_length",
        "16",
        "--learning_rate",
        "0.01",
        "--overwrite",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, launch, batch in (("one", [], "4"), ("two", [*together, "-m"], "2"), ("two", [*together, "-m"], "2")):
        output = tmp_path / name / "out"
        command = [
            sys.executable,
            "-m",
            *launch,
            *shared,
            "--per_device_train_batch_size",
            batch,
            "--output",
            str(output),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("written to") == 1
        assert (output / "config.json").is_file()
    assert_same(weights(tmp_path / "two"), weights(tmp_path / "one"), atol=2e-4, rtol=1e-3)
