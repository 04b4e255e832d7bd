"""Read a book as one text with a cache that never grows, and draw how well the model predicts it, by position.

hf-rfa convert HuggingFaceTB/SmolLM2-135M-Instruct small --memory 256 --calibrate demo/calibration.txt.gz
python examples/stream_a_book.py small book.txt --base HuggingFaceTB/SmolLM2-135M-Instruct

The book is any text file; without one the example reads a text of this repository. The base model reads every block from
scratch. If the line stays level beside it, the position costs nothing. It needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_rfa.inference import cache_num_bytes  # importing hf_rfa registers the RFA models with transformers
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.cache_names import cache_argument

TEXT = Path(__file__).resolve().parent.parent / "demo" / "heldout.txt.gz"


@torch.no_grad()
def block_losses(model: PreTrainedModel, ids: Tensor, block: int, cache: DynamicCache | None) -> list[float]:
    """Return the mean loss of every block of ids [T], in nats per token; without a cache every block is a text of its own."""
    losses = []
    for start in range(0, len(ids) - 1, block):
        piece = ids[None, start : start + block + 1]
        past = {} if cache is None else cache_argument(cache)
        began = time.perf_counter()
        logits = model(piece[:, :-1], use_cache=cache is not None, **past).logits
        losses.append(float(torch.nn.functional.cross_entropy(logits[0].float(), piece[0, 1:])))
        held = "" if cache is None else f", cache {cache_num_bytes(cache):,} bytes"
        speed = 1000 * (time.perf_counter() - began) / (piece.shape[1] - 1)
        print(f"token {start:,}: perplexity {math.exp(losses[-1]):.2f}, {speed:.1f} ms a token{held}", flush=True)
    return losses


def draw(losses: dict[str, list[float]], block: int, path: Path) -> None:
    """Draw perplexity by position."""
    figure = Figure(figsize=(8, 3))
    axes = figure.subplots()
    for name, values in losses.items():
        positions = [(number + 0.5) * block for number in range(len(values))]
        axes.plot(positions, [math.exp(value) for value in values], marker=".", label=name)
    axes.set(xlabel="tokens so far", ylabel="perplexity of the block")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Read, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a converted decoder whose positions do not end")
    parser.add_argument("book", type=Path, nargs="?", default=TEXT, help="a text file, plain or .gz")
    parser.add_argument("--base", help="its base model, to compare with")
    parser.add_argument("--tokens", type=int, default=9216, help="tokens to read, at most")
    parser.add_argument("--block", type=int, default=1024, help="tokens of a point of the line")
    parser.add_argument("--output", type=Path, default=Path("book.png"))
    arguments = parser.parse_args()
    if AutoConfig.from_pretrained(arguments.checkpoint).is_encoder_decoder:
        parser.error(f"{arguments.checkpoint} has an encoder. Pass a decoder, a Llama say.")

    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    ids = tokenize(tokenizer, read_documents(arguments.book), most=arguments.tokens + 1)
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint).eval()
    losses = {"one stream": block_losses(model, ids, arguments.block, DynamicCache(config=model.config))}
    if arguments.base:
        base = AutoModelForCausalLM.from_pretrained(arguments.base).eval()
        losses["base model, every block from scratch"] = block_losses(base, ids, arguments.block, None)
    draw(losses, arguments.block, arguments.output)
    print(f"{arguments.output} has perplexity by position.")


if __name__ == "__main__":
    main()
