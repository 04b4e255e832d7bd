"""Convert a decoder, measure it beside its parent, and let both continue a prompt.

python examples/convert_and_generate.py                            # the small model in demo/model, offline
python examples/convert_and_generate.py gpt2 --calibrate some.txt --evaluate other.txt --output gpt2-rfa
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_rfa.convert import convert
from hf_rfa.evaluation import perplexity
from hf_rfa.inference import cache_num_bytes  # importing hf_rfa registers the RFA models with transformers
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.cache_names import returned_cache

DEMO = Path(__file__).resolve().parent.parent / "demo"


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=str(DEMO / "model"), help="folder or hub name of a decoder, a GPT-2 say"
    )
    parser.add_argument("--calibrate", type=Path, default=DEMO / "calibration.txt.gz", help="text to calibrate on")
    parser.add_argument("--evaluate", type=Path, default=DEMO / "heldout.txt.gz", help="another text, to measure on")
    parser.add_argument("--output", type=Path, default=Path("converted"), help="folder to write")
    parser.add_argument("--prompt", default="The captain came on deck, and")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to measure on")
    parser.add_argument("--new-tokens", type=int, default=40, help="tokens to generate")
    args = parser.parse_args()
    if AutoConfig.from_pretrained(args.model).is_encoder_decoder:
        parser.error(f"{args.model} has an encoder. Pass a decoder, a GPT-2 or a Llama say.")

    report = convert(args.model, args.output, calibrate_on=args.calibrate, overwrite=True)
    for what, value in report.rows():
        print(f"{what}: {value}")

    tokenizer = AutoTokenizer.from_pretrained(args.output)
    ids = tokenize(tokenizer, read_documents(args.evaluate), most=args.tokens)
    prompt = tokenizer(args.prompt, return_tensors="pt")
    for name, source in (("softmax", args.model), ("RFA", args.output)):
        model = AutoModelForCausalLM.from_pretrained(source, dtype="float32").eval()
        found = perplexity(model, ids)
        answer = model.generate(
            **prompt,
            max_new_tokens=args.new_tokens,
            do_sample=False,
            use_cache=True,
            repetition_penalty=1.3,
            pad_token_id=tokenizer.eos_token_id,
            return_dict_in_generate=True,
        )
        print(f"\n{name}: perplexity {found.perplexity:.2f} ({found.protocol})")
        print(f"cache {cache_num_bytes(returned_cache(answer)):,} bytes after {answer.sequences.shape[1]} tokens")
        print(tokenizer.decode(answer.sequences[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
