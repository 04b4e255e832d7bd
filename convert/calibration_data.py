"""What a model is calibrated and checked on: tokens of a text, or random ones, as its forward pass takes them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError

#: Tokens that calibration reads from a text.
TEXT_TOKENS = 4096
#: Random tokens that it reads where there is no text.
RANDOM_TOKENS = 1024
BLOCK_LENGTH = 1024
#: Most tokens that the softmax model generates for a source of the calibration text.
OUTPUT_TOKENS = 128

#: Tokens whose logits are held at once, to measure a perplexity or a layer's sensitivity.
SCORED_TOKENS = 1024

Inputs = dict[str, Tensor]


def random_inputs(config: Any, *, seed: int, tokens: int = RANDOM_TOKENS) -> Inputs:
    """Return uniformly random token ids to calibrate on where there is no text, none of them padding."""
    length = min(BLOCK_LENGTH, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    shape = (math.ceil(tokens / length), length)
    ids = torch.randint(config.vocab_size, shape, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        # One end-of-text token per row, as the last: classifiers read their answer there.
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        ids[ids == end] = (end + 1) % config.vocab_size
        ids[:, -1] = end
        inputs["decoder_input_ids"] = shift_right(torch.randint(config.vocab_size, shape, generator=generator), config)
    return inputs


def shift_right(ids: Tensor, config: Any) -> Tensor:
    """Return decoder inputs for the tokens that they are to predict."""
    start = config.decoder_start_token_id
    start = config.bos_token_id if start is None else start
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)


def tokenize(tokenizer: Any, documents: Iterable[str], *, most: int | None = None) -> Tensor:
    """Return the token ids of some documents, joined, each followed by the end-of-text token, [N].

    Args:
        tokenizer: the model's tokenizer.
        documents: texts.
        most: stop after so many tokens.
    """
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if most is not None and len(ids) >= most:
            break
    return torch.tensor(ids[:most], dtype=torch.long)


def text_blocks(tokenizer: Any, documents: Iterable[str], max_length: int, *, tokens: int = TEXT_TOKENS) -> Inputs:
    """Return the first ``tokens`` tokens of some documents as blocks, for a decoder that stands alone.

    Raises:
        InputError: if there is not a single full block.
    """
    length = min(BLOCK_LENGTH, max_length)
    ids = tokenize(tokenizer, documents, most=tokens)
    blocks = len(ids) // length
    if blocks == 0:
        raise InputError(f"the text to calibrate on has {len(ids)} tokens; at least {length} are needed.")
    ids = ids[: blocks * length].view(blocks, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text_sources(tokenizer: Any, documents: Iterable[str], max_length: int, *, tokens: int = TEXT_TOKENS) -> Inputs:
    """Return sources for a model with an encoder, padded: each line of a document is one, cut to `BLOCK_LENGTH` tokens."""
    length = min(BLOCK_LENGTH, max_length)
    sources: list[str] = []
    count = 0
    for line in (line for document in documents for line in document.splitlines() if line.strip()):
        sources.append(line.strip())
        count += min(length, len(tokenizer(sources[-1], verbose=False)["input_ids"]))
        if count >= tokens:
            break
    batch = tokenizer(sources, padding=True, truncation=True, max_length=length, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


@torch.no_grad()
def add_outputs(softmax_model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Add decoder inputs to sources: what the softmax model itself answers, or the sources shifted if it has no such head.

    Returns:
        The inputs with ``decoder_input_ids`` and ``decoder_attention_mask``, and for answers their ``labels``.
    """
    config: Any = softmax_model.config
    if not softmax_model.can_generate():
        mask = inputs["attention_mask"]
        start = torch.ones_like(mask[:, :1])
        return inputs | {
            "decoder_input_ids": shift_right(inputs["input_ids"], config),
            "decoder_attention_mask": torch.cat([start, mask[:, :-1]], dim=1),
        }
    limit = min(OUTPUT_TOKENS, config.max_position_embeddings - 1)
    sources = {name: tensor.to(softmax_model.device) for name, tensor in inputs.items()}
    generate: Any = softmax_model.generate
    ids = generate(**sources, max_new_tokens=limit, num_beams=1, do_sample=False).to("cpu")
    # After the first end-of-text token all is padding; the token that decoding starts with may be an end-of-text token too.
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ended = torch.isin(ids[:, 1:], torch.tensor(ends)).cumsum(1)
    first = torch.zeros_like(ended[:, :1])
    ended_before = torch.cat([first, ended[:, :-1]], dim=1) > 0
    return inputs | {
        "decoder_input_ids": ids[:, :-1],
        "decoder_attention_mask": (~ended_before).long(),
        "labels": ids[:, 1:].masked_fill(ended_before, -100),
    }


def batches(inputs: Inputs) -> list[Inputs]:
    """Return inputs in batches of about `SCORED_TOKENS` tokens, rows of like length together, with little padding."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])))
    rows = max(1, SCORED_TOKENS // mask.shape[1])
    order = mask.ne(0).sum(1).argsort(stable=True)
    return [trim({name: tensor[chosen] for name, tensor in inputs.items()}) for chosen in order.split(rows)]


def trim(inputs: Inputs) -> Inputs:
    """Cut off the columns that are padding in every row."""
    kept = {"source": inputs.get("attention_mask"), "output": inputs.get("decoder_attention_mask")}
    lengths = {
        side: None if mask is None else int(mask.ne(0).any(0).nonzero().max()) + 1 for side, mask in kept.items()
    }
    sides = {"input_ids": "source", "attention_mask": "source"}
    return {name: tensor[:, : lengths[sides.get(name, "output")]].contiguous() for name, tensor in inputs.items()}
