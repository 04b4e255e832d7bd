"""Transcripts of speech, scored by references and by the base model's, with their speed and the bytes of the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.models.whisper.english_normalizer import BasicTextNormalizer

from ..errors import InputError
from ..inference.transcription import Transcripts, transcribe_files
from ..io.audio_io import Utterance
from .memory import cache_memory


def word_error_rate(references: Sequence[str], transcripts: Sequence[str]) -> float:
    """Return the word error rate of transcripts in percent: errors of all texts, by the words of all references.

    Texts are compared in lower case and without punctuation, as transformers' `BasicTextNormalizer` writes them.

    Raises:
        InputError: if jiwer is not installed, or there is no word in the references.
    """
    try:
        import jiwer
    except ImportError as error:
        raise InputError("the word error rate needs jiwer: pip install 'hf-rfa[audio]'.") from error
    normalize = BasicTextNormalizer()
    expected, written = ([normalize(text).strip() for text in texts] for texts in (references, transcripts))
    if not any(expected):
        raise InputError("the references have no words, so there is no word error rate.")
    return 100 * jiwer.wer(expected, written)


@dataclass(frozen=True)
class TranscriptionScores:
    """A model's transcripts of speech, and their scores."""

    transcripts: Transcripts  # the transcripts, with their speed
    cache_bytes: int  # bytes of the cache after the longest, of one file
    # word error rates in percent, "WER" by the references and "WER to base model" by the base model's transcripts
    scores: dict[str, float]
    protocol: str  # how they were made, in words

    @property
    def tokens_per_second(self) -> float:
        """Tokens written in a second, of all files of a batch together."""
        return self.transcripts.tokens / self.transcripts.seconds


def evaluate_transcription(
    model: PreTrainedModel,
    tokenizer: Any,
    extractor: Any,
    utterances: Sequence[Utterance],
    *,
    base_texts: Sequence[str] | None = None,
    num_beams: int = 1,
    batch_size: int = 8,
    on_batch: Callable[[int, int], None] | None = None,
) -> TranscriptionScores:
    """Transcribe utterances with a model that reads audio, and score the transcripts.

    Args:
        model: the model, RFA or softmax.
        tokenizer: its tokenizer.
        extractor: what makes mel features.
        utterances: the files; those with a text have a reference.
        base_texts: the base model's transcripts, one for each; None for no comparison.
        num_beams: 1 for greedy search.
        batch_size: files at a time.
        on_batch: called with (files done, files in all) after each batch.
    """
    transcripts, paths = Transcripts(), [utterance.path for utterance in utterances]
    for part in transcribe_files(model, tokenizer, extractor, paths, batch_size=batch_size, num_beams=num_beams):
        transcripts += part
        if on_batch is not None:
            on_batch(len(transcripts.texts), len(utterances))
    written = list(zip(utterances, transcripts.texts, strict=True))
    referenced = [(utterance.text, text) for utterance, text in written if utterance.text is not None]
    scores = {}
    if referenced:
        scores["WER"] = word_error_rate(*zip(*referenced, strict=True))
    if base_texts is not None:
        scores["WER to base model"] = word_error_rate(base_texts, transcripts.texts)
    search = "greedy search" if num_beams == 1 else f"{num_beams} beams"
    protocol = (
        f"{len(utterances):,} files, {len(referenced):,} references, {search}, batches of {batch_size}; words in lower case "
        "without punctuation"
    )
    return TranscriptionScores(transcripts, cache_memory(model).after(transcripts.longest), scores, protocol)
