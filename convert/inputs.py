"""Inputs for calibration, as a model's forward pass takes them: tokens of a text, or features of speech, or random ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import IGNORED_LABEL
from hf_rfa.families import position_count, reads_audio
from hf_rfa.inference.transcription import prompt_length, write_tokens
from hf_rfa.io.text_io import BLOCK_LENGTH, tokenize

#: Tokens that calibration reads from a text.
TEXT_TOKENS = 4096
#: The same where there are slots: regression on as many inputs as a model is wide takes more tokens.
SLOT_TEXT_TOKENS = 8192
#: The same where a summary is fitted to it (`hf_rfa.convert.calibrate.summary_fit`).
FEATURE_TEXT_TOKENS = 32_768
#: Tokens that slots and features are fitted to first, for the choice of retrieval heads.
HEAD_TEXT_TOKENS = 6144
#: The most of a text that perplexities are measured on.
MEASURED_TOKENS = 2048
#: Random tokens that calibration reads where there is no text.
RANDOM_TOKENS = 1024
#: Most tokens that the base model generates for a source, or for an utterance.
OUTPUT_TOKENS = 128
#: Utterances that it transcribes at a time.
UTTERANCES_AT_ONCE = 8
#: Tokens whose logits are held at once, to measure a perplexity.
SCORED_TOKENS = 1024

#: The input whose columns are no tokens: mel features of audio, [N, bins, frames].
AUDIO = "input_features"

Inputs = dict[str, Tensor]


def random_inputs(config: Any, *, seed: int, tokens: int = RANDOM_TOKENS) -> Inputs:
    """Return uniformly random token ids to calibrate on where there is no text, none of them padding, and noise for audio."""
    length = min(BLOCK_LENGTH, position_count(config))
    generator = torch.Generator().manual_seed(seed)
    shape = (math.ceil(tokens / length), length)
    ids = torch.randint(config.vocab_size, shape, generator=generator)
    if reads_audio(config):
        frames = 2 * config.max_source_positions  # two of them make a position
        noise = torch.randn(shape[0], config.num_mel_bins, frames, generator=generator)
        return {AUDIO: noise, "decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        # One end-of-text token per row, as the last: sequence classifiers read the hidden state there.
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        ids[ids == end] = (end + 1) % config.vocab_size
        ids[:, -1] = end
        answers = torch.randint(answer_vocabulary(config), shape, generator=generator)
        inputs["decoder_input_ids"] = shift_right(answers, config)
    return inputs


def answer_vocabulary(config: Any) -> int:
    """Return the number of tokens that a model writes: Marian's decoder may have a vocabulary of its own."""
    return getattr(config, "decoder_vocab_size", None) or config.vocab_size


def shift_right(ids: Tensor, config: Any) -> Tensor:
    """Return decoder inputs for the tokens that they are to predict."""
    start = config.decoder_start_token_id
    return F.pad(ids[:, :-1], (1, 0), value=config.bos_token_id if start is None else start)


def shifted_positions(config: Any, rows: int, length: int, *, seed: int) -> Tensor:
    """Return positions of rows that start anywhere among those of the model, [rows, length].

    Softmax attention with rotary positions sees distances alone, and features see rotated queries and keys: what is fitted at
    the first positions is wrong for others.
    """
    generator = torch.Generator().manual_seed(seed)
    most = max(0, config.max_position_embeddings - length)
    return torch.randint(most + 1, (rows, 1), generator=generator) + torch.arange(length)


def text_blocks(tokenizer: Any, documents: Iterable[str], length: int, *, tokens: int = TEXT_TOKENS) -> Inputs:
    """Return the first ``tokens`` tokens as blocks of ``length``, for a decoder alone; an `InputError` if none is full."""
    ids = tokenize(tokenizer, documents, most=tokens)
    count = len(ids) // length
    if count == 0:
        raise InputError(f"the text to calibrate on has {len(ids)} tokens; at least {length} are needed.")
    ids = ids[: count * length].view(count, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text_sources(tokenizer: Any, documents: Iterable[str], max_length: int, *, tokens: int = TEXT_TOKENS) -> Inputs:
    """Return sources for an encoder, padded: each line of a document is one, cut to ``max_length`` tokens."""
    sources: list[str] = []
    count = 0
    for line in filter(str.strip, (line for document in documents for line in document.split("\n"))):
        sources.append(line.strip())
        count += min(max_length, len(tokenizer(sources[-1], verbose=False)["input_ids"]))
        if count >= tokens:
            break
    batch = tokenizer(
        sources, return_tensors="pt", padding=True, padding_side="right", truncation=True, max_length=max_length
    )
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def transcript_inputs(base_model: PreTrainedModel, features: Tensor) -> Inputs:
    """Return decoder inputs and labels: what the base model writes of mel features, `UTTERANCES_AT_ONCE`."""
    prompt = prompt_length(base_model, features)
    rows: list[Tensor] = []
    for piece in features.split(UTTERANCES_AT_ONCE):
        rows += write_tokens(base_model, piece, max_new_tokens=OUTPUT_TOKENS).cpu()
    end: Any = base_model.generation_config.eos_token_id
    ids = pad_sequence(rows, batch_first=True, padding_value=end[0] if isinstance(end, list) else end)
    return answer_inputs(ids, end, prompt=prompt)


def answer_inputs(ids: Tensor, end: int | list[int], *, prompt: int = 1) -> Inputs:
    """Return decoder inputs and labels of answers [N, prompt + T], padded after their first end-of-text token.

    The tokens of a prompt, with which decoding starts, are no labels, and may be end-of-text tokens too.
    """
    ended = torch.isin(ids[:, prompt:], torch.tensor(end)).cumsum(1) > 0
    ended_before = F.pad(ended[:, :-1], (prompt, 0), value=False)
    labels = ids[:, 1:].masked_fill(ended_before, IGNORED_LABEL)
    labels[:, : prompt - 1] = IGNORED_LABEL
    return trim({"decoder_input_ids": ids[:, :-1], "decoder_attention_mask": (~ended_before).long(), "labels": labels})


@torch.no_grad()
def add_outputs(base_model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Add decoder inputs to sources: the base model's greedy answers, or the sources shifted if it cannot generate.

    Returns:
        The inputs with ``decoder_input_ids`` and ``decoder_attention_mask``, and for answers their ``labels``.
    """
    config: Any = base_model.config
    if AUDIO in inputs:
        if not base_model.can_generate():
            raise InputError(
                f"a {type(base_model).__name__} writes no transcripts, on which speech calibrates. Leave the speech out."
            )
        return inputs | transcript_inputs(base_model, inputs[AUDIO])
    mask = inputs["attention_mask"]
    if not base_model.can_generate():
        return inputs | {
            "decoder_input_ids": shift_right(inputs["input_ids"] % answer_vocabulary(config), config),
            "decoder_attention_mask": F.pad(mask[:, :-1], (1, 0), value=1),
        }
    limit = min(OUTPUT_TOKENS, config.max_position_embeddings - 1)
    sources = {name: tensor.to(base_model.device) for name, tensor in inputs.items()}
    generate: Any = base_model.generate
    ids = generate(**sources, max_new_tokens=limit, num_beams=1, do_sample=False).to("cpu")  # [N, 1 + T]
    return inputs | answer_inputs(ids, config.eos_token_id)


def batches(inputs: Inputs) -> list[Inputs]:
    """Return inputs in batches of about `SCORED_TOKENS` tokens, rows of similar length together, without common padding."""
    mask = inputs["decoder_attention_mask" if "decoder_attention_mask" in inputs else "attention_mask"]
    rows = max(1, SCORED_TOKENS // mask.shape[1])
    order = mask.ne(0).sum(1).argsort(stable=True)
    return [
        trim({name: tensor[chosen.to(tensor.device)] for name, tensor in inputs.items()})
        for chosen in order.split(rows)
    ]


def first_rows(inputs: Inputs, tokens: int) -> Inputs:
    """Return the first rows of inputs, with about so many tokens in all."""
    rows, length = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].shape
    count = min(rows, max(1, tokens // length))
    return {name: tensor[:count] for name, tensor in inputs.items()}


def trim(inputs: Inputs) -> Inputs:
    """Cut off the columns that are padding in every row, of encoder inputs and of decoder inputs and labels."""

    def used(mask: Tensor | None) -> slice:
        return slice(None if mask is None else int(mask.ne(0).any(0).nonzero().max()) + 1)

    source = used(inputs.get("attention_mask"))
    output = used(inputs.get("decoder_attention_mask")) if "decoder_input_ids" in inputs else source
    sources = cut({name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}, source)
    return {name: tensor.contiguous() for name, tensor in (cut(inputs, output) | sources).items()}


def cut(inputs: Inputs, columns: slice) -> Inputs:
    """Return some columns of all inputs that have one per token."""
    return {name: tensor if name == AUDIO else tensor[:, columns] for name, tensor in inputs.items()}
