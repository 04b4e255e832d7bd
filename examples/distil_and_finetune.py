"""Convert a decoder, let it learn its parent's attention, and fine-tune it with transformers' Trainer.

The demo's text is too short to gain much from: it shows how. Distillation wants blocks as long as the texts it is for.

python examples/distil_and_finetune.py                        # the small model in demo/model, offline
python examples/distil_and_finetune.py --lora-rank 8          # LoRA matrices instead of all weights, by peft
python examples/distil_and_finetune.py gpt2 --train some.txt --evaluate other.txt --block-length 1024 --steps 500
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_rfa.convert import convert
from hf_rfa.evaluation import perplexity
from hf_rfa.finetune.data import text_blocks
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.io.text_io import read_documents, tokenize

DEMO = Path(__file__).resolve().parent.parent / "demo"


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=str(DEMO / "model"), help="folder or hub name of a decoder, a GPT-2 say"
    )
    parser.add_argument("--train", type=Path, default=DEMO / "calibration.txt.gz", help="text to train on")
    parser.add_argument("--evaluate", type=Path, default=DEMO / "heldout.txt.gz", help="another text, to measure on")
    parser.add_argument("--output", type=Path, default=Path("trained"), help="folder for the three checkpoints")
    parser.add_argument("--steps", type=int, default=30, help="steps of attention transfer, and of fine-tuning")
    parser.add_argument("--block-length", type=int, default=512, help="tokens of a training example")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to measure on")
    parser.add_argument("--lora-rank", type=int, default=0, help="fine-tune LoRA matrices of this rank; 0: all weights")
    args = parser.parse_args()
    if AutoConfig.from_pretrained(args.model).is_encoder_decoder:
        parser.error(f"{args.model} has an encoder. Pass a decoder, a GPT-2 or a Llama say.")
    converted, distilled, tuned = (args.output / name for name in ("converted", "distilled", "tuned"))

    convert(args.model, converted, preset="rfa", feature_map="exponential", calibrate_on=args.train, overwrite=True)
    recipe = Recipe(transfer=Stage(steps=args.steps, block_length=args.block_length), end_to_end=Stage(steps=0))
    distill(converted, distilled, teacher=args.model, data=args.train, recipe=recipe, overwrite=True)

    model: Any = AutoModelForCausalLM.from_pretrained(distilled, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(distilled)
    if args.lora_rank:
        from peft import LoraConfig, get_peft_model

        transposed = model.config.model_type == "rfa_gpt2"  # as GPT-2's matrices are
        model = get_peft_model(model, LoraConfig(r=args.lora_rank, fan_in_fan_out=transposed))
    arguments = TrainingArguments(
        output_dir=str(args.output / "runs"),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3 if args.lora_rank else 1e-4,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    blocks: Any = text_blocks(tokenize(tokenizer, read_documents(args.train)), args.block_length)
    Trainer(model=model, args=arguments, train_dataset=blocks).train()
    model = model.merge_and_unload() if args.lora_rank else model
    model.config.use_cache = True  # the Trainer turned it off
    model.save_pretrained(tuned)
    tokenizer.save_pretrained(tuned)

    ids = tokenize(tokenizer, read_documents(args.evaluate), most=args.tokens)
    for name, folder in {"parent": args.model, **{path.name: path for path in (converted, distilled, tuned)}}.items():
        found = perplexity(AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(), ids)
        print(f"{name}: perplexity {found.perplexity:.2f}")


if __name__ == "__main__":
    main()
