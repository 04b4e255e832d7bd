"""lm-eval and transformers' server on converted checkpoints, against what the model itself says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rfa.convert import convert
from tests.conftest import DEMO_MODEL, ROOT
from tests.training import write_rows

pytestmark = pytest.mark.slow
CHOICES = [("The captain of the", [" ship", " moon"]), ("He went to", [" sea for a year", " sea"])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "gpt2-rfa"
    convert(DEMO_MODEL, folder, preset="rfa", feature_map="exponential")
    return folder


def score(model, tokens: list[int], start: int) -> tuple[float, bool]:
    """Return log p of the tokens from ``start`` on, and whether each is the model's first choice."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, start - 1 :]
    log_probs = logits.double().log_softmax(-1)
    answer = torch.tensor(tokens[start:])
    return float(log_probs.gather(-1, answer[:, None]).sum()), bool((log_probs.argmax(-1) == answer).all())


def test_lm_eval_scores_a_language_model(checkpoint, tmp_path):
    """By its command line, as a user without `import hf_rfa` does: the checkpoint brings its code."""
    pytest.importorskip("lm_eval")
    file = write_rows(tmp_path / "c.jsonl", [{"q": q, "choices": c, "label": 0} for q, c in CHOICES])
    task = {"task": "choice", "dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
    task |= {"dataset_kwargs": {"data_files": {"test": str(file)}}, "output_type": "multiple_choice"}
    task |= {"doc_to_text": "{{q}}", "doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}"}
    task |= {"target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "choice.yaml").write_text(yaml.safe_dump(task))
    words = ["--model", "hf", "--model_args", f"pretrained={checkpoint},dtype=float32", "--tasks", "choice"]
    words += ["--include_path", tmp_path, "--output_path", tmp_path / "out", "--batch_size", "2", "--device", "cpu"]
    ran = subprocess.run(
        [sys.executable, "-m", "lm_eval", *map(str, words), "--log_samples", "--trust_remote_code"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_choice_*.jsonl")
    ordered = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    right = []
    for sample, (question, answers) in zip(ordered, CHOICES, strict=True):
        prompt = tokenizer(question)["input_ids"]
        expected = [score(model, [*prompt, *tokenizer(answer)["input_ids"]], len(prompt)) for answer in answers]
        for response, (log_prob, greedy) in zip(sample["filtered_resps"], expected, strict=True):
            assert float(response[0]) == pytest.approx(log_prob, abs=2e-4)
            assert str(response[1]) == str(greedy)
        right.append(expected[0][0] > expected[1][0])
    found = json.loads(results.read_text())["results"]["choice"]["acc,none"]
    assert found == pytest.approx(sum(right) / len(right))


@contextmanager
def server(checkpoint: Path, log: Path) -> Iterator[Any]:
    """Run `examples/serve.py` on a checkpoint; yield a client of it, which asks again until it answers."""
    openai = pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [checkpoint, "--device", "cpu", "--dtype", "float32", "--port", port]
    command = [sys.executable, str(ROOT / "examples" / "serve.py"), *map(str, words)]
    with log.open("w") as file:
        process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=file, stderr=file)
    try:
        yield openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=120, max_retries=25)
    finally:
        process.terminate()
        process.wait()


def test_transformers_serves_a_converted_model(checkpoint, tmp_path):
    for name in ("fastapi", "pydantic", "uvicorn"):
        pytest.importorskip(name)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    model.save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")

    def greedy(prompt: str) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    options = {"model": str(tmp_path / "chat"), "max_tokens": 12, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "The captain"}], **options}
    with server(tmp_path / "chat", tmp_path / "server.log") as client:
        assert client.completions.create(prompt="Call me", **options).choices[0].text == greedy("Call me")
        texts = [client.chat.completions.create(**chat).choices[0].message.content]
        parts = client.chat.completions.create(**chat, stream=True)
        texts.append("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
    assert [text.strip() for text in texts] == [greedy("The captain\n").strip()] * 2
