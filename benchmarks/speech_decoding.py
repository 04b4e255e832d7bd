"""Decoding speed and bytes of a converted Whisper beside its base model's, at one length of audio, by turns.

    python -m benchmarks.speech_decoding whisper whisper-rfa --batch 1 16

Every model reads the same encoder outputs, of noise, which takes as long as speech, and writes tokens one by one. Rounds of
the models alternate; a figure is the median over rounds of the mean time of a step.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSpeechSeq2Seq
from transformers.modeling_outputs import BaseModelOutput

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.inference import cache_num_bytes
from hf_rfa.models.cache_names import cache_argument, returned_cache


@torch.no_grad()
def decode(model: Any, encoded: BaseModelOutput, tokens: int) -> tuple[float, int]:
    """Return the mean seconds of a step after the first one, and the bytes of the cache for one sequence at the end."""
    batch = len(encoded.last_hidden_state)  # type: ignore[arg-type]
    ids = torch.full((batch, 1), model.generation_config.decoder_start_token_id)
    cache, start = None, 0.0
    for step in range(tokens):
        if step == 1:  # the first one makes keys, values or sums of the source
            start = time.perf_counter()
        output = model(decoder_input_ids=ids, encoder_outputs=encoded, **cache_argument(cache), use_cache=True)
        cache = returned_cache(output)
        ids = output.logits[:, -1:].argmax(-1)
    return (time.perf_counter() - start) / (tokens - 1), cache_num_bytes(cache) // batch


def main() -> None:
    """Measure, and print a table."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", help="checkpoints, the base model first")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 400], help="tokens to write")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    models = {name: AutoModelForSpeechSeq2Seq.from_pretrained(name).eval() for name in options.models}
    config = models[options.models[0]].config
    table = Table("batch", "tokens", "model", "ms a step", "tokens/s", "cache a sequence, bytes")
    for batch in options.batch:
        noise = torch.randn(batch, config.max_source_positions, config.d_model)
        for tokens in options.tokens:
            seconds: dict[str, list[float]] = {name: [] for name in models}
            sizes = {}
            for _ in range(options.rounds):
                for name, model in models.items():
                    step, sizes[name] = decode(model, BaseModelOutput(noise), tokens)
                    seconds[name].append(step)
            for name, steps in seconds.items():
                step = median(steps)
                figures = (f"{1000 * step:.2f}", f"{batch / step:.1f}", f"{sizes[name]:,}")
                table.add_row(str(batch), str(tokens), name, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
