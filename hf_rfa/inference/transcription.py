"""Transcribing speech: mel features of audio, and what a model writes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..errors import InputError
from ..families import position_count
from ..io.audio_io import Samples, load_samples
from .generation import written


def load_feature_extractor(source: str | Path, name: str | None = None) -> Any:
    """Return what makes mel features of audio, of a folder or hub name, which errors call ``name``."""
    try:
        return AutoFeatureExtractor.from_pretrained(source)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{name or source} has no feature extractor that can be used ({error}). Put the base model's "
            "preprocessor_config.json into its folder."
        ) from error


def audio_features(extractor: Any, samples: Sequence[Samples]) -> Tensor:
    """Return the mel features [N, bins, frames] of speech, padded to what a model hears at once."""
    return extractor(list(samples), sampling_rate=extractor.sampling_rate, return_tensors="pt")["input_features"]


def load_features(extractor: Any, paths: Sequence[Path]) -> Tensor:
    """Return the mel features of files, each of which a model has to hear at once.

    Raises:
        InputError: for a longer one.
    """
    speech = [load_samples(path, extractor.sampling_rate) for path in paths]
    for path, samples in zip(paths, speech, strict=True):
        if len(samples) > extractor.n_samples:
            raise InputError(
                f"{path} lasts {len(samples) / extractor.sampling_rate:.1f} s, and the model hears "
                f"{extractor.chunk_length:g} s at once. Cut it into shorter files."
            )
    return audio_features(extractor, speech)


def prompt_length(model: Any, features: Tensor) -> int:
    """Return how many tokens a transcript begins with that are not written but given: its start, and a language say."""
    first = write_tokens(model, features[:1], max_new_tokens=1)
    return first.shape[1] - 1


@torch.no_grad()
def write_tokens(model: Any, features: Tensor, *, max_new_tokens: int, **options: Any) -> Tensor:
    """Return the tokens [N, T] that a model writes of mel features [N, bins, frames], of speech that it hears at once.

    They are its prompt, a transcript and its end, then padding. ``max_new_tokens`` are the most after the prompt, where the
    model has positions for them; options are further arguments of ``model.generate``.
    """
    # Whisper's max_length is that of what follows the prompt; ``max_new_tokens`` beside a checkpoint's draws a warning.
    options |= {"max_length": max_new_tokens, "return_timestamps": False, "return_dict_in_generate": True}
    options["force_unique_generate_call"] = True  # a time stamp among the tokens would begin another one
    return model.generate(features.to(model.device, model.dtype), **options).sequences


@dataclass(frozen=True)
class Transcripts:
    """What a model writes of speech, and how fast."""

    texts: tuple[str, ...] = ()  # one per file
    tokens: int = 0  # tokens written, prompts left out
    seconds: float = 0.0  # time for them, without the encoder's for what is heard at once
    longest: int = 0  # tokens of the longest of them, its prompt included, that one cache held

    def __add__(self, other: Transcripts) -> Transcripts:
        tokens, seconds = self.tokens + other.tokens, self.seconds + other.seconds
        return Transcripts(self.texts + other.texts, tokens, seconds, max(self.longest, other.longest))


def transcribe_files(
    model: PreTrainedModel,
    tokenizer: Any,
    extractor: Any,
    paths: Sequence[Path],
    *,
    batch_size: int = 8,
    **options: Any,
) -> Iterator[Transcripts]:
    """Yield the transcripts of files of speech, ``batch_size`` at a time; the rest is as in `transcribe`."""
    for start in range(0, len(paths), batch_size):
        speech = [load_samples(path, extractor.sampling_rate) for path in paths[start : start + batch_size]]
        yield transcribe(model, tokenizer, extractor, speech, **options)


@torch.no_grad()
def transcribe(
    model: PreTrainedModel, tokenizer: Any, extractor: Any, speech: Sequence[Samples], **options: Any
) -> Transcripts:
    """Transcribe speech, as one batch; what is longer than the model hears at once goes piece by piece, by itself.

    The pieces are transformers' own: each ends at the last time stamp that the model writes in it.

    The samples are of one channel each, at the extractor's rate; options are arguments of ``model.generate``.
    """
    if any(len(samples) > extractor.n_samples for samples in speech):
        parts = (_transcribe_long(model, tokenizer, extractor, samples, options) for samples in speech)
        return sum(parts, Transcripts())
    features = audio_features(extractor, speech).to(model.device, model.dtype)
    prompt = prompt_length(model, features)
    encoded = BaseModelOutput(model.get_encoder()(features).last_hidden_state)
    most: int = model.generation_config.max_length or position_count(model.config)
    start = time.perf_counter()
    tokens = write_tokens(model, features, max_new_tokens=most, encoder_outputs=encoded, **options)[:, prompt:]
    seconds = time.perf_counter() - start
    counts = written(tokens, model)
    texts = tuple(text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True))
    return Transcripts(texts, int(counts.sum()), seconds, prompt + int(counts.max()))


def _transcribe_long(
    model: Any, tokenizer: Any, extractor: Any, samples: Samples, options: dict[str, Any]
) -> Transcripts:
    """Transcribe speech of any length."""
    arguments = {"padding": "longest", "truncation": False, "return_attention_mask": True}
    if len(samples) <= extractor.n_samples:
        arguments = {"return_attention_mask": True}
    inputs = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt", **arguments)
    features = inputs["input_features"].to(model.device, model.dtype)
    mask = inputs["attention_mask"].to(model.device)
    start = time.perf_counter()
    options = {"attention_mask": mask, "return_timestamps": True, "return_segments": True} | options
    (segments,) = model.generate(features, **options)["segments"]
    seconds = time.perf_counter() - start
    pieces = [segment["tokens"] for segment in segments]
    tokens = torch.cat([torch.empty(0, dtype=torch.long), *(piece.cpu() for piece in pieces)])
    stamps = model.generation_config.no_timestamps_token_id  # every later token is a time stamp
    text = tokenizer.decode(tokens[tokens <= stamps], skip_special_tokens=True).strip()
    return Transcripts((text,), len(tokens), seconds, max(map(len, pieces), default=0))
