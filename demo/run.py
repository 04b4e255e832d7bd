"""The main job: convert a trained GPT-2, compare it with its parent, and let both write.

python -m demo.run                 # the small model in this folder
python -m demo.run --model gpt2    # a model of the hub, or a folder
"""

from __future__ import annotations

import argparse
import shutil
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from transformers.utils import logging

from hf_rfa import bench
from hf_rfa.console import progress_bar
from hf_rfa.convert import convert
from hf_rfa.convert.base_model import FAMILIES, extend_positions
from hf_rfa.convert.text_io import read_documents
from hf_rfa.finetune import perplexity, tokenize
from hf_rfa.inference import generate_text, load_model

HERE = Path(__file__).resolve().parent
LENGTHS = (128, 1024, 4096, 8192)
PROMPT = "The captain came on deck, and"
NEW_TOKENS = 60


def _show(progress: Progress, task: TaskID, done: int, total: int) -> None:
    progress.update(task, completed=done, total=total)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "model"), help="folder or hub name of a GPT-2")
    parser.add_argument("--output", type=Path, default=HERE / "out")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to measure the perplexity on")
    args = parser.parse_args()
    console = Console()
    logging.disable_progress_bar()
    converted = args.output / "rfa"

    console.rule("1. convert")
    shutil.rmtree(converted, ignore_errors=True)
    report = convert(args.model, converted, calibrate_on=HERE / "calibration.txt.gz")
    console.print(report.table())

    console.rule("2. evaluate")
    softmax, tokenizer = load_model(args.model, dtype="float32")
    rfa, _ = load_model(str(converted), dtype="float32")
    ids = tokenize(tokenizer, read_documents(HERE / "heldout.txt.gz"))[: args.tokens]
    figures = Table("model", "perplexity", title="held-out chapters of Moby-Dick")
    with progress_bar() as progress:
        for name, model in (("softmax", softmax), ("RFA, not trained", rfa)):
            task = progress.add_task(name, total=None)
            result = perplexity(model, ids, on_batch=partial(_show, progress, task))
            figures.add_row(name, f"{result.perplexity:.2f}")
    console.print(figures)
    console.print(f"protocol: {result.protocol}")

    console.rule("3. generate")
    for name, model in (("softmax", softmax), ("RFA, not trained", rfa)):
        text = generate_text(
            model, tokenizer, PROMPT, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=40, seed=0, ignore_eos=True
        )
        console.print(f"[bold]{name}[/bold]: {PROMPT}{text.text}", highlight=False)
        console.print(f"{text.new_tokens / text.seconds:.1f} tokens/s, cache {text.cache_bytes:,} bytes\n")

    console.rule("4. speed and memory")
    for model in (softmax, rfa):  # for timing only: past the learned positions the softmax model's text means nothing
        extend_positions(FAMILIES["gpt2"], model, max(LENGTHS) + 64)
    results = bench.decoding(softmax, rfa, lengths=LENGTHS, batches=[8])
    console.print(bench.table(results))
    picture = args.output / "decoding.png"
    bench.plot(results, picture, f"One decoding step, {args.model}, batch 8")
    console.print(f"checkpoint: {converted}\npicture: {picture}")


if __name__ == "__main__":
    main()
