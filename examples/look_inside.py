"""Convert a decoder, draw which tokens of a text it keeps, let it go on, and compare it with its base model.

python examples/look_inside.py                                     # the small model in demo/model, offline, in a minute
python examples/look_inside.py gpt2 --calibrate some.txt --text other.txt --output gpt2-inside

The picture has a row for every key-value head and a column for every token of the text: what the memory holds after the
last token, as a sink, in a slot or in the window. Everything else was evicted. Slots differ from head to head. It needs
matplotlib.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_rfa.convert import convert
from hf_rfa.evaluation import perplexity
from hf_rfa.inference import cache_num_bytes  # importing hf_rfa registers the RFA models with transformers
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.cache_names import returned_cache
from hf_rfa.models.cache_rfa import RFALayer

DEMO = Path(__file__).resolve().parent.parent / "demo"
EVICTED, SINK, SLOT, WINDOW = range(4)
COLORS = {"evicted": "white", "sink": "#6a9a4c", "slot": "#d9752b", "window": "#e9cf6a"}


def kept_tokens(layer: RFALayer, length: int, window: int) -> Tensor:
    """Return how every head keeps every token of one text, [heads, length]."""
    kept = []
    for places in (memory.places for memory in layer.memories if memory.places is not None):
        for head_score, head_arrival in zip(places.score[0], places.arrival[0], strict=True):
            row = torch.full((length,), EVICTED)
            filled = head_arrival >= 0
            row[head_arrival[filled].long()] = SLOT
            row[head_arrival[filled & head_score.isposinf()].long()] = SINK
            row[-window:] = WINDOW
            kept.append(row)
    return torch.stack(kept)


def draw(kept: Tensor, path: Path) -> None:
    """Draw what every head keeps."""
    figure = Figure(figsize=(10, 4))
    axes = figure.subplots()
    colors = ListedColormap(list(COLORS.values()))
    axes.imshow(kept.numpy(), aspect="auto", interpolation="nearest", cmap=colors, vmin=EVICTED, vmax=WINDOW)
    axes.set(xlabel="token of the text", ylabel="key-value head, layer by layer")
    patches = [Patch(facecolor=color, edgecolor="black", label=name) for name, color in COLORS.items()]
    axes.legend(handles=patches, ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(path, dpi=150)


@torch.no_grad()
def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=str(DEMO / "model"), help="folder or hub name of a decoder, a GPT-2 say"
    )
    parser.add_argument("--calibrate", type=Path, default=DEMO / "calibration.txt.gz", help="text to calibrate on")
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt.gz", help="another text, to look at")
    parser.add_argument("--output", type=Path, default=Path("look-inside"), help="folder to write")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of the text to look at")
    parser.add_argument("--new-tokens", type=int, default=30, help="tokens to generate")
    args = parser.parse_args()
    if AutoConfig.from_pretrained(args.model).is_encoder_decoder:
        parser.error(f"{args.model} has an encoder. Pass a decoder, a GPT-2 or a Llama say.")

    # 1. Convert: 4 sinks, 31 recent and 28 important tokens a head.
    args.output.mkdir(parents=True, exist_ok=True)
    folder = args.output / "model"
    report = convert(args.model, folder, preset="exact", calibrate_on=args.calibrate, overwrite=True)
    print(f"every layer keeps, per head: {report.keeps}")

    # 2. Look at what is kept.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    ids = tokenize(tokenizer, read_documents(args.text), most=args.tokens)
    cache = returned_cache(model(ids[None], use_cache=True))
    layers = [layer for layer in cache.layers if isinstance(layer, RFALayer)]
    kept = torch.cat([kept_tokens(layer, len(ids), model.config.window_size) for layer in layers])
    draw(kept, args.output / "kept.png")
    print(f"{args.output / 'kept.png'} shows what {len(kept)} heads keep of {len(ids)} tokens")
    in_slots = Counter({index: int(count) for index, count in enumerate((kept == SLOT).sum(0)) if count})
    words = (f"{tokenizer.decode(ids[index])!r} ({count} heads)" for index, count in in_slots.most_common(8))
    print(f"in most slots: {', '.join(words)}")

    # 3. Generate and compare.
    for name, source in (("softmax", args.model), ("converted", folder)):
        model = AutoModelForCausalLM.from_pretrained(source, dtype="float32").eval()
        answer = model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids[None]),
            max_new_tokens=args.new_tokens,
            do_sample=False,
            use_cache=True,
            repetition_penalty=1.3,
            pad_token_id=tokenizer.eos_token_id,
            return_dict_in_generate=True,
        )
        print(f"\n{name}: perplexity {perplexity(model, ids).perplexity:.2f}", end=", ")
        print(f"cache {cache_num_bytes(returned_cache(answer)):,} bytes after {answer.sequences.shape[1]} tokens")
        print(f"…{tokenizer.decode(answer.sequences[0, len(ids) :], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
