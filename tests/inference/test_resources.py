"""Memory of a conversion, and memory and accuracy over long texts."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import textwrap
from itertools import product

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_rfa.inference import cache_num_bytes
from hf_rfa.models.cache_names import cache_argument
from tests.families import make_gpt2 as make


def conversion_memory(source, destination):
    """Convert in a process of its own; return the bytes of memory that it had before, and at most.

    They are the kernel's figures for the process: `getrusage` counts what its parent had, too.
    """
    code = f"""
        import re, pathlib
        import hf_rfa.convert

        def peak():
            return int(re.search(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

        before = peak()
        hf_rfa.convert.convert({str(source)!r}, {str(destination)!r})
        print(before, peak())
    """
    words = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)]).split()
    return int(words[-2]), int(words[-1])


@pytest.mark.slow
def test_a_large_model_is_converted_within_memory(tmp_path):
    """Fifteen layers of the shape of gpt2-xl: of 2 GB no more than a shard of 0.5 GB is held, beside Python and torch."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=15, n_head=25))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    for buffer in model.buffers():
        buffer.zero_()
    model.tie_weights()
    model.save_pretrained(tmp_path / "parent", max_shard_size="500MB")
    del model
    gc.collect()
    sizes = [path.stat().st_size for path in (tmp_path / "parent").glob("*.safetensors")]
    assert len(sizes) > 3
    _, peak = conversion_memory(tmp_path / "parent", tmp_path / "out")
    assert peak <= 1.3 * max(sizes) + 1e9


LONG = 10_000


@torch.no_grad()
def decode(model, ids):
    """Feed tokens one by one; return the logits of the last 50 and the cache."""
    cache, last = None, []
    for t in range(ids.shape[1]):
        output = model(ids[:, t : t + 1], **cache_argument(cache), use_cache=True)
        cache = output.past_key_values
        if t >= ids.shape[1] - 50:
            last.append(output.logits[:, 0].double())
    return torch.stack(last, dim=1), cache


def test_cache_bytes_and_peak_memory_are_the_same_at_32_and_2_000_tokens():
    model, ids = make("positive-gate", n_positions=2100, n_layer=1), torch.randint(1, 61, (1, 2000))
    decode(model, ids[:, :300])  # warm-up of allocator and libraries
    _, cache = decode(model, ids[:, :32])
    early, early_peak = cache_num_bytes(cache), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, cache = decode(model, ids)
    assert cache.get_seq_length() == 2000
    assert cache_num_bytes(cache) == early
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early_peak
    assert grown <= 2048, f"peak memory grew by {grown} KiB"


#: Largest error of decoded logits, by how much 16 bits round; docs/method.md states that of 100,000 tokens in float32.
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.004}
DRIFT = [
    *product((torch.bfloat16, torch.float16), ("positive", "positive-gate", "gaussian-paper"), [LONG]),
    *product((torch.float32, torch.bfloat16), ("positive", "gaussian-paper"), [10 * LONG]),
]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("dtype", "variant", "length"), DRIFT)
def test_long_texts_do_not_drift(dtype, variant, length):
    """Decoded logits against those of float64 in one pass, ‖error‖ / ‖logits‖ of the last 50.

    Without a gate nothing is forgotten: each token adds a hundred-thousandth to the sums, rounded to float32. In 16 bits the
    error is what it is over a short text: nothing is lost on the way.
    """
    options = {"n_positions": length + 100, "initializer_range": 0.1}
    model, exact = make(variant, dtype=dtype, **options), make(variant, dtype=torch.float64, **options)
    exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    ids = torch.randint(1, 61, (1, length))
    errors = []
    for count in (100, length):
        found, _ = decode(model, ids[:, :count])
        expected = exact(ids[:, :count], use_cache=False, logits_to_keep=50).logits
        assert torch.isfinite(found).all()
        errors.append(float((found - expected).norm() / expected.norm()))
    print(f"{variant}, {dtype}: {errors}")  # noqa: T201
    assert errors[1] < LARGEST_ERROR[dtype], errors
    assert dtype == torch.float32 or errors[1] < 3 * errors[0], errors
