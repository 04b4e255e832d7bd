"""Peers' tools on RFA models: peft, TRL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, PreTrainedModel

from tests.conftest import save_tiny_tokenizer
from tests.families import make

# peft 0.21 and TRL 1.16 still read transformers' old name of it.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def new_model(name: str, *, gate: bool = False) -> PreTrainedModel:
    """Return an RFA model, the same every time; gates are not at their initial values."""
    model = make(name, {"feature_map": "exponential", "num_features": 8, "gate": gate})
    for key, parameter in model.named_parameters():
        if ".gate.weight" in key:
            torch.nn.init.normal_(parameter, 0.0, 0.5, generator=torch.Generator().manual_seed(1))
    return model


def batch_for(model) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, 60, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def train(model, data, steps: int = 6, rate: float = 0.02) -> list[float]:
    """Train the parameters that have a gradient, and return the losses."""
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], rate)
    losses = []
    for _ in range(steps):
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def assert_reloads(adapted, fresh, folder: Path, data):
    """Check that an adapter, saved and loaded into a fresh model, gives the same outputs; merge it likewise."""
    expected = adapted.eval()(**data).logits
    adapted.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(fresh, folder).eval()
    torch.testing.assert_close(loaded(**data).logits, expected, atol=1e-5, rtol=1e-4)
    loaded = loaded.merge_and_unload()
    torch.testing.assert_close(loaded(**data).logits, expected, atol=1e-4, rtol=1e-3)
    return loaded


@pytest.mark.parametrize("how", [{"use_dora": True}, {"modules_to_save": ["gate"]}, {"target_modules": None}])
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_adapters_of_all_linear_layers_of_a_gated_model(name, how, tmp_path):
    """Gates stay as they are, or are trained whole; adapters are saved, loaded and merged to the same outputs."""
    model = new_model(name, gate=True)
    before = {key: value.clone() for key, value in model.state_dict().items() if ".gate." in key}
    assert before
    options = {"r": 2, "fan_in_fan_out": name == "gpt2", "target_modules": "all-linear"} | how
    adapted = get_peft_model(model, LoraConfig(**options))
    data = batch_for(model)
    losses = train(adapted, data)
    assert losses[-1] < losses[0] - 0.05
    after = assert_reloads(adapted, new_model(name, gate=True), tmp_path / "adapter", data).state_dict()
    same = [torch.equal(after[key], value) for key, value in before.items()]
    assert not any(same) if "modules_to_save" in how else all(same)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_trl_trains_an_rfa_model(targets, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    save_tiny_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    model = new_model("gpt2", gate=True)
    rows = [{"prompt": "w5 w6 ", "completion": f"w{7 + n % 3} w9"} for n in range(16)]
    options = {"max_steps": 8, "learning_rate": 0.05, "per_device_train_batch_size": 4, "max_length": 32}
    options |= {"use_cpu": True, "bf16": False, "logging_steps": 1, "disable_tqdm": True, "report_to": "none"}
    arguments = trl.SFTConfig(output_dir=str(tmp_path / "t"), **options)
    lora = LoraConfig(r=2, fan_in_fan_out=True, target_modules=targets)
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    trainer = trl.SFTTrainer(model=model, args=arguments, peft_config=lora, **data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    expected = {"c_attn"} if targets is None else {"c_attn", "c_proj", "c_fc"}
    assert {name.rsplit(".", 1)[-1] for name in config["target_modules"]} == expected
