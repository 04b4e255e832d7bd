"""Time and memory of one decoding step against the lengths of source and output, RFA against its softmax parent.

    python -m benchmarks.seq2seq_decoding                    # BART base's shape, random weights
    python -m benchmarks.seq2seq_decoding --model FOLDER     # a BART checkpoint's shape

Steps after the encoder has run, timed as in `benchmarks.decoding`: interleaved in one process, medians. The last line is
the ratio of the slowest to the fastest RFA step over all lengths.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from benchmarks.decoding import interleaved
from hf_rfa import RFABartConfig, RFABartForConditionalGeneration, cache_num_bytes

#: The shape of facebook/bart-base.
BASE: dict[str, Any] = {
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
}


def pair(config: BartConfig, positions: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a softmax model of random weights with ``positions`` positions, and an RFA model with the same weights."""
    stretched = BartConfig(**{**config.to_dict(), "max_position_embeddings": positions})
    softmax = BartForConditionalGeneration(stretched).eval()
    rfa = RFABartForConditionalGeneration(RFABartConfig.from_parent(stretched)).eval()
    rfa.load_state_dict(softmax.state_dict(), strict=False)
    return softmax, rfa


def at_position(model: Any, source: torch.Tensor, position: int) -> EncoderDecoderCache:
    """Return a cache that holds a source [B, S, width] and ``position`` output tokens, as `benchmarks.decoding` does."""
    config, batch = model.config, source.shape[0]
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    first = torch.zeros(batch, 1, dtype=torch.long)
    model(encoder_outputs=BaseModelOutput(source), decoder_input_ids=first, past_key_values=cache)
    if isinstance(config, RFABartConfig):
        for layer in cache.self_attention_cache.layers:
            layer.cumulative_length = position  # type: ignore[union-attr]
        return cache
    heads = config.decoder_attention_heads
    shape = (batch, heads, position - 1, config.d_model // heads)
    for index in range(config.decoder_layers):
        cache.self_attention_cache.update(torch.randn(shape), torch.randn(shape), index)
    return cache


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="BART checkpoint whose shape is taken; default BART base's")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sources", type=int, nargs="+", default=[32, 512, 4000])
    parser.add_argument("--positions", type=int, nargs="+", default=[10, 512, 4000])
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    config: Any = BartConfig(**BASE) if args.model is None else BartConfig.from_pretrained(args.model)
    softmax, rfa = pair(config, max(args.sources + args.positions) + args.steps + 8)

    shown = Table(title=f"one decoding step, batch {args.batch}, {torch.get_num_threads()} CPU threads")
    for column in ("source", "position", "softmax ms", "RFA ms", "speed-up", "softmax cache MiB", "RFA state MiB"):
        shown.add_column(column, justify="right")
    token = torch.zeros(args.batch, 1, dtype=torch.long)
    rfa_times = []
    for source_length, position in track(list(itertools.product(args.sources, args.positions)), description="decoding"):
        source = torch.randn(args.batch, source_length, config.d_model)
        caches = {name: at_position(each, source, position) for name, each in (("softmax", softmax), ("rfa", rfa))}
        sizes = {name: cache_num_bytes(cache) / 2**20 for name, cache in caches.items()}
        inputs: dict[str, Any] = {"encoder_outputs": BaseModelOutput(source), "decoder_input_ids": token}
        runs: dict[str, Callable[[], object]] = {
            name: partial(each, past_key_values=caches[name], **inputs)
            for name, each in (("softmax", softmax), ("rfa", rfa))
        }
        times = interleaved(runs, args.steps)
        rfa_times.append(times["rfa"])
        shown.add_row(
            f"{source_length:,}",
            f"{position:,}",
            f"{times['softmax']:.1f}",
            f"{times['rfa']:.1f}",
            f"{times['softmax'] / times['rfa']:.2f} ×",
            f"{sizes['softmax']:.1f}",
            f"{sizes['rfa']:.1f}",
        )
    console = Console()
    console.print(shown)
    console.print(f"slowest RFA step over fastest: {max(rfa_times) / min(rfa_times):.3f}")


if __name__ == "__main__":
    main()
