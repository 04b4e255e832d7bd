"""SmolLM2, exported, in other people's runtimes: onnxruntime-genai, transformers.js, and a browser."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hf_rfa.export import export
from tests.conftest import ROOT, shared

pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'hf-rfa[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'hf-rfa[export]'")

pytestmark = pytest.mark.slow
PROMPT, NEW = "Gravity is the force that", 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """SmolLM2 with 64 tokens of memory, retrieval heads and a summary."""
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([shared("models/get-smollm2"), folder / "base", sys.executable], check=True)
    text = ROOT / "demo/calibration.txt.gz"
    options = ["--memory", "64", "--calibrate", text, "--config", "calibration_tokens=4096"]
    command = [sys.executable, "-m", "hf_rfa_cli", "convert", folder / "base", folder / "converted", *options]
    subprocess.run(command, check=True)
    return folder / "converted"


@pytest.fixture(scope="module")
def in_javascript(checkpoint) -> Path:
    """The folder of a graph for transformers.js, of 8 bits, beside npm's packages."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = checkpoint.parent / "js"
    export(str(checkpoint), folder / "model", runtime="transformers.js", int8=True)
    packages = ["onnxruntime-web@1.30", "@huggingface/transformers@4"]
    if subprocess.run(["npm", "install", "--ignore-scripts", "--prefix", folder, *packages]).returncode:
        pytest.skip(f"npm does not install {', '.join(packages)} here")
    return folder


def ids_of(checkpoint: Path) -> list[int]:
    """Return the prompt's tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)(PROMPT).input_ids


def written(path: Path, ids: list[int]) -> list[int]:
    """Return a text and what a graph writes after it in onnxruntime."""
    from hf_rfa.export.running import RunningGraph

    running, text = RunningGraph(path), list(ids)
    logits = running.read(torch.tensor([ids]))
    for _ in range(NEW):
        text.append(int(logits.argmax()))
        logits = running.read(torch.tensor([text[-1:]]))
    return text


def test_a_graph_of_a_pretrained_model_gives_torchs_logits(checkpoint):
    report = export(str(checkpoint), checkpoint.parent / "onnx")
    assert report.difference < 1e-4
    assert report.split_difference is not None
    assert report.split_difference < 1e-4
    assert report.same_top == 1


def test_onnxruntime_genai_writes_what_onnxruntime_does(checkpoint):
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    for name, runtime in (("plain", None), ("genai", "genai")):
        export(str(checkpoint), checkpoint.parent / name, runtime=runtime, int8=True)
    ids = ids_of(checkpoint)
    model = genai.Model(str(checkpoint.parent / "genai"))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(ids) + NEW, min_length=len(ids) + NEW)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(ids)
    for _ in range(NEW):
        generator.generate_next_token()
    assert generator.get_sequence(0).tolist() == written(checkpoint.parent / "plain/model.onnx", ids)


def test_transformers_js_writes_what_onnxruntime_does(checkpoint, in_javascript):
    ids = ids_of(checkpoint)
    (in_javascript / "write.mjs").write_text(f"""
        import {{ AutoModelForCausalLM, env, Tensor }} from "@huggingface/transformers";
        Object.assign(env, {{ allowRemoteModels: false, localModelPath: "{in_javascript}" }});
        const whole = (numbers) => new Tensor("int64", BigInt64Array.from(numbers, BigInt), [1, numbers.length]);
        const ids = {ids}, model = await AutoModelForCausalLM.from_pretrained("model", {{ dtype: "q8" }});
        const given = {{ inputs: whole(ids), attention_mask: whole(ids.map(() => 1)) }};
        const found = await model.generate({{ ...given, max_new_tokens: {NEW}, min_new_tokens: {NEW}, do_sample: false }});
        console.log(JSON.stringify(found.tolist()[0].map(Number)));
    """)
    done = subprocess.run(["node", in_javascript / "write.mjs"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == written(in_javascript / "model/onnx/model_quantized.onnx", ids)


def test_the_page_writes_in_a_browser_with_states_of_one_size(in_javascript, tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    shutil.copy(ROOT / "examples/browser/index.html", in_javascript)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=in_javascript)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    runtime = "node_modules/onnxruntime-web/dist/ort.webgpu.min.mjs"
    address = f"http://127.0.0.1:{server.server_port}/?ort={runtime}&tokens=520"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    process = subprocess.Popen(
        [browser, *options, f"--user-data-dir={tmp_path}", address], stderr=subprocess.PIPE, text=True
    )
    stop = threading.Timer(300, process.kill)
    stop.start()
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if "CONSOLE" in line and ('"done"' in line or "Uncaught" in line):
            break
    process.kill()
    stop.cancel()
    server.shutdown()
    figures = [json.loads(found[1]) for line in lines if (found := re.search(r'"(\{"token".*\})"', line))]
    assert [row["token"] for row in figures] == [16, 256, 512], "".join(lines)
    report = json.loads((in_javascript / "model/export.json").read_text())
    assert {row["states"] for row in figures} == {report["state_bytes"] / 1e6}
