"""Reading speech: utterances of a folder or of a JSON lines file, and their samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .text_io import is_json_lines, open_text, read_json_lines

#: Endings of the files that a folder's utterances are.
ENDINGS = (".flac", ".wav")

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Utterance:
    """A file of speech, and what is said in it, or None where nobody has written that down."""

    path: Path
    text: str | None = None


def read_utterances(source: str | Path, *, limit: int | None = None) -> list[Utterance]:
    """Return utterances, each of which was read once and found to be sound.

    Args:
        source: a folder, whose .wav and .flac files are the utterances, in the order of their paths; such a file; or a
            ``.jsonl`` file, plain or gzipped, of objects with a ``path``, relative to its folder, and maybe a ``text``.
        limit: read only so many.

    Raises:
        InputError: if there are none, or naming the first one that cannot be used.
    """
    source = Path(source).expanduser()
    utterances = list(islice(_listed(source), limit))
    if not utterances:
        raise InputError(
            f"{source} has no speech in it. Pass a folder of .wav or .flac files, or a .jsonl file of their paths."
        )
    for utterance in utterances:
        _read(utterance.path)
    return utterances


def _listed(source: Path) -> Iterator[Utterance]:
    """Yield the utterances that a folder or file names, unread."""
    if source.is_dir():
        yield from (Utterance(path) for path in sorted(source.rglob("*")) if path.suffix.lower() in ENDINGS)
        return
    if source.suffix.lower() in ENDINGS:
        yield Utterance(source)
        return
    if not is_json_lines(source):
        raise InputError(
            f"{source} is not speech. Pass a folder of .wav or .flac files, or a .jsonl file of their paths."
        )
    with open_text(source) as file:
        for number, record in enumerate(read_json_lines(file, source, "path"), start=1):
            text = record.get("text")
            if text is not None and not (isinstance(text, str) and text.strip()):
                raise InputError(
                    f"{source}, utterance {number}: its text is {text!r}. Write what is said, or leave the field out: the "
                    "base model's transcript then serves."
                )
            yield Utterance(source.parent / record["path"], text)


def load_samples(path: Path, rate: int) -> Samples:
    """Return the samples of a file as one channel, the mean of all, at so many samples a second, [T]."""
    from scipy.signal import resample_poly

    samples, own_rate = _read(path)
    if own_rate == rate:
        return samples
    common = math.gcd(rate, own_rate)
    return resample_poly(samples, rate // common, own_rate // common).astype(np.float32)


def _read(path: Path) -> tuple[Samples, int]:
    """Return the samples of a file and their rate; raise an `InputError` if it holds no sound."""
    try:
        import scipy  # noqa: F401  # which resamples
        import soundfile
    except ImportError as error:
        raise InputError("reading audio needs soundfile and scipy: pip install 'hf-rfa[audio]'.") from error
    if not path.is_file():
        raise InputError(f"there is no audio file {path}.")
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise InputError(f"cannot read {path} as audio: {error}") from error
    if not len(samples):
        raise InputError(f"{path} is empty: it has no samples.")
    if not np.isfinite(samples).all():
        raise InputError(f"{path} has samples that are no finite numbers.")
    return samples.mean(1), rate
