"""Published shapes, and memory and accuracy over long texts."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import textwrap
from itertools import product

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_rfa.inference import cache_num_bytes
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import shared
from tests.families import make_gpt2 as make

PUBLISHED = ["distilgpt2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "bart-base", "bart-large", "bart-large-cnn"]
#: The shape of fifteen layers of gpt2-xl, and sizes of shards: of 2 GB no more than a shard of 0.5 GB is held.
FIFTEEN_LAYERS = {"n_embd": 1600, "n_layer": 15, "n_head": 25}


def save_random_parent(cls, config, folder, max_shard_size):
    """Save a model of random weights without holding any twice."""
    with torch.device("meta"):
        model = cls(config)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02, generator=generator)
    for buffer in model.buffers():
        buffer.zero_()
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    del model
    gc.collect()
    return [path.stat().st_size for path in folder.glob("*.safetensors")]


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
@pytest.mark.parametrize(("name", "shard"), [*((name, "2GB") for name in PUBLISHED), ("fifteen layers", "500MB")])
def test_shapes_convert_within_memory(name, shard, tmp_path):
    """Random weights of every published shape: no more than a shard, beside Python, torch and what calibration takes."""
    bart = name.startswith("bart")
    cls = BartForConditionalGeneration if bart else GPT2LMHeadModel
    if name in PUBLISHED:
        config = cls.config_class.from_pretrained(shared(f"data/configs/{name}"))
    else:
        config = GPT2Config(**FIFTEEN_LAYERS)
    sizes = save_random_parent(cls, config, tmp_path / "parent", shard)
    assert len(sizes) >= sum(sizes) / {"2GB": 2e9, "500MB": 5e8}[shard]
    before, peak = conversion_memory(tmp_path / "parent", tmp_path / "out")
    print(f"{name}: checkpoint {sum(sizes) / 1e9:.2f} GB, before {before / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB")  # noqa: T201
    assert peak <= 1.3 * max(sizes) + 1e9
    converted = (AutoModelForSeq2SeqLM if bart else AutoModelForCausalLM).from_pretrained(tmp_path / "out")
    ids = torch.full((1, 3), 5)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 1}
    for beams in (1, 4):
        output = converted.generate(ids, num_beams=beams, **options)
        assert output.shape[1] == 3 + (1 if bart else 3)


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


def test_cache_bytes_and_peak_memory_are_the_same_at_32_and_10_000_tokens():
    model, ids = make("positive-gate", n_positions=LONG + 100, n_layer=1), torch.randint(1, 61, (1, LONG))
    decode(model, ids[:, :300])  # warm-up of allocator and libraries
    _, cache = decode(model, ids[:, :32])
    early, early_peak = cache_num_bytes(cache), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, cache = decode(model, ids)
    assert cache.get_seq_length() == LONG
    assert cache_num_bytes(cache) == early
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early_peak
    assert grown <= 2048, f"peak memory grew by {grown} KiB over {LONG} tokens"


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
