"""Train the model in tests/data/rotary: a Llama of 256 positions and 0.3 million weights that reads bytes.

    python tests/rotary_model.py FOLDER pride_and_prejudice.txt.gz war_and_peace.txt.gz

The texts are Project Gutenberg's no. 1342 and no. 2600. A quarter of an hour on one core.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

POSITIONS, ROWS, STEPS = 256, 12, 2600


def main(folder: str, *texts: str) -> None:
    """Train on blocks of 256 bytes from anywhere in the texts, and save."""
    torch.manual_seed(0)
    data = torch.frombuffer(
        bytearray(b"".join(gzip.decompress(Path(text).read_bytes()) for text in texts)), dtype=torch.uint8
    ).long()
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 24, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **special, tie_word_embeddings=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.05)
    for _ in range(STEPS):
        starts = torch.randint(len(data) - POSITIONS, (ROWS,)).tolist()
        ids = torch.stack([data[start : start + POSITIONS] for start in starts])
        model(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
