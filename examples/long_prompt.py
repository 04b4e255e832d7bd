"""Read a long prompt once, keep its state in a file, and start many continuations from it.

python examples/long_prompt.py                                          # converts demo/model first, offline
python examples/long_prompt.py gpt2-rfa --text long.txt --tokens 900    # an RFA checkpoint
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_rfa.convert import convert
from hf_rfa.inference import load_cache, save_cache
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.cache_names import cache_argument, returned_cache

DEMO = Path(__file__).resolve().parent.parent / "demo"


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", help="folder or hub name of an RFA checkpoint; default: demo/model, converted"
    )
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt.gz", help="the long prompt")
    parser.add_argument("--tokens", type=int, default=900, help="tokens of it to read")
    parser.add_argument("--output", type=Path, default=Path("long-prompt"), help="folder for what is written")
    parser.add_argument("--new-tokens", type=int, default=30, help="tokens of each continuation")
    parser.add_argument("--ask", nargs="+", default=[" The captain", " At sea", " No"], help="how each one starts")
    args = parser.parse_args()
    if args.model is not None and AutoConfig.from_pretrained(args.model).is_encoder_decoder:
        parser.error(f"{args.model} has an encoder. Pass a converted decoder, a GPT-2 or a Llama say.")

    args.output.mkdir(parents=True, exist_ok=True)
    if args.model is None:
        args.model = args.output / "model"
        text = DEMO / "calibration.txt.gz"
        convert(DEMO / "model", args.model, preset="rfa", window_size=64, calibrate_on=text, overwrite=True)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompt = tokenize(tokenizer, read_documents(args.text), most=args.tokens)[None]

    start = time.perf_counter()
    with torch.no_grad():
        cache = returned_cache(model(prompt, use_cache=True, logits_to_keep=1))
    seconds = time.perf_counter() - start
    file = args.output / "prompt.safetensors"
    save_cache(cache, file)
    print(
        f"{prompt.shape[1]} tokens read in {seconds:.2f} s; their state takes {file.stat().st_size:,} bytes in {file}"
    )

    # From here on another process can go on: it needs the file, the model, and how many tokens the prompt has.
    start = time.perf_counter()
    cache = load_cache(file, model)
    print(f"loaded in {time.perf_counter() - start:.2f} s")
    for beginning in args.ask:
        words = tokenizer(beginning, return_tensors="pt")["input_ids"]
        answer = model.generate(
            torch.cat([prompt, words], dim=1),
            **cache_argument(copy.deepcopy(cache)),  # generate changes the cache it is given
            max_new_tokens=args.new_tokens,
            do_sample=False,
            repetition_penalty=1.3,
            pad_token_id=tokenizer.eos_token_id,
        )
        print(f"…{tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
