"""The main job: convert a trained GPT-2, compare it with its softmax parent, and let both write.

    python -m demo.run                 # the small model in this folder
    python -m demo.run --model gpt2    # a model of the hub, or a folder

It runs commands of hf-rfa, and prints each before its output.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from hf_rfa_cli.console import console
from hf_rfa_cli.main import app

HERE = Path(__file__).resolve().parent
PROMPT = "The captain came on deck, and"
SAMPLING = "--sample --top-k 40 --seed 0 --ignore-eos --max-new-tokens 60"


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "model"), help="folder or hub name of a GPT-2")
    parser.add_argument("--output", type=Path, default=HERE / "out")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to measure the perplexity on")
    args = parser.parse_args()
    rfa = str(args.output / "rfa")
    args.output.mkdir(parents=True, exist_ok=True)
    text, models = str(HERE / "heldout.txt.gz"), (args.model, rfa)
    for words in (
        ["convert", args.model, rfa, "--calibrate", str(HERE / "calibration.txt.gz"), "--overwrite"],
        *(["evaluate", model, text, "--max-tokens", str(args.tokens)] for model in models),
        *(["generate", model, "--prompt", PROMPT, *SAMPLING.split()] for model in models),
        ["bench", "--model", rfa, "--lengths", "128,1024,4096,8192", "--output", str(args.output / "speed")],
    ):
        console.rule()
        console.print(f"hf-rfa {shlex.join(words)}", style="bold", markup=False, highlight=False, soft_wrap=True)
        app(words, standalone_mode=False)


if __name__ == "__main__":
    main()
