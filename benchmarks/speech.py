"""Speech to train and to measure on: espeak-ng reads sentences in several voices, speeds and pitches.

    python -m benchmarks.speech speech --train train.en.gz --held-out test_2016_flickr.en.gz --long-files 10

Needs Debian's espeak-ng. Writes folders of .flac files, each with a .jsonl file of paths and texts beside it: training
sentences in the training voices, and held-out sentences in voices that no training sentence is read in. Long files are
held-out utterances one after the other. The speech is synthetic: Whisper tiny.en misses half of the words of single
utterances, and word error rates on it say little of other speech.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile
from rich.progress import track

from hf_rfa.errors import InputError
from hf_rfa.io.atomic_io import new_folder
from hf_rfa.io.audio_io import load_samples, read_utterances
from hf_rfa.io.text_io import read_lines

#: Languages and variants of espeak-ng's voices, by set of utterances; a voice is one of each.
VOICES = {
    "train": (("en-us", "en-gb", "en-us-nyc"), ("m1", "m2", "m3", "m4", "f1", "f2", "f3", "steph")),
    "held-out": (("en-gb-x-rp", "en-gb-x-gbclan"), ("m5", "m7", "f5", "klatt2")),
}
#: Words a minute, and pitches from 0 to 99: the least and the most.
SPEEDS = (130, 190)
PITCHES = (30, 70)
#: Utterances of a long file, the seconds of silence after each, and the rate of its samples.
LONG_UTTERANCES, PAUSE, LONG_RATE = 20, 0.375, 16_000


def read_aloud(text: str, *, voice: str, speed: int, pitch: int) -> bytes:
    """Return a text read by espeak-ng, as a wav file."""
    command = ["espeak-ng", "--stdin", "--stdout", "-v", voice, "-s", str(speed), "-p", str(pitch)]
    return subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout


def write_speech(
    folder: Path, sentences: list[str], languages: Iterable[str], variants: Iterable[str], *, seed: int
) -> None:
    """Write a .flac file for every sentence into a new folder, and beside it a .jsonl file of their paths and texts."""
    generator = random.Random(seed)
    voices = [f"{language}+{variant}" for language in languages for variant in variants]
    folder.mkdir()
    with folder.with_suffix(".jsonl").open("w", encoding="utf-8") as rows:
        for number, text in enumerate(track(sentences, folder.name)):
            style = {"speed": generator.randint(*SPEEDS), "pitch": generator.randint(*PITCHES)}
            voice = generator.choice(voices)
            samples, rate = soundfile.read(io.BytesIO(read_aloud(text, voice=voice, **style)))
            path = folder / f"{number:05}.flac"
            soundfile.write(path, samples, rate)
            row = {"path": f"{folder.name}/{path.name}", "text": text, "voice": voice, **style}
            rows.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_long_files(folder: Path, utterances: Path, count: int) -> None:
    """Write .flac files of `LONG_UTTERANCES` utterances one after the other, and a .jsonl file of their paths and texts."""
    rows, pause = read_utterances(utterances), np.zeros(int(PAUSE * LONG_RATE), np.float32)
    folder.mkdir()
    with folder.with_suffix(".jsonl").open("w", encoding="utf-8") as lines:
        for number in range(count):
            part = rows[number * LONG_UTTERANCES : (number + 1) * LONG_UTTERANCES]
            samples = [piece for row in part for piece in (load_samples(row.path, LONG_RATE), pause)]
            path = folder / f"{number:03}.flac"
            soundfile.write(path, np.concatenate(samples), LONG_RATE)
            line = {"path": f"{folder.name}/{path.name}", "text": " ".join(str(row.text) for row in part)}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")


def main() -> None:
    """Write the training utterances, the held-out ones, and long files."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--train", type=Path, required=True, help="sentences to train on, one a line")
    parser.add_argument("--held-out", type=Path, required=True, help="sentences to measure on, one a line")
    parser.add_argument("--train-rows", type=int, default=4000, help="how many of the former are read")
    parser.add_argument("--held-out-rows", type=int, default=1000, help="how many of the latter are read")
    parser.add_argument(
        "--long-files", type=int, default=0, help=f"files of {LONG_UTTERANCES} held-out utterances each"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if shutil.which("espeak-ng") is None:
        raise InputError("there is no espeak-ng here. Install it, with apt-get install espeak-ng for example.")
    needed = options.long_files * LONG_UTTERANCES
    if needed > options.held_out_rows:
        raise InputError(
            f"--long-files {options.long_files} needs {needed} held-out utterances, and there are {options.held_out_rows}. "
            "Ask for fewer, or for more with --held-out-rows."
        )
    texts = {"train": (options.train, options.train_rows), "held-out": (options.held_out, options.held_out_rows)}
    with new_folder(options.destination) as folder:
        for seed, (name, (path, rows)) in enumerate(texts.items(), start=options.seed):
            write_speech(folder / name, read_lines(path)[:rows], *VOICES[name], seed=seed)
        if options.long_files:
            write_long_files(folder / "long", folder / "held-out.jsonl", options.long_files)


if __name__ == "__main__":
    main()
