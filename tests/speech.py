"""Speech to try models on: tones, in files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile
from transformers import GenerationConfig, WhisperFeatureExtractor

from .families import save_softmax_model

RATE = 16_000


def tone(seconds: float, *, rate: int = RATE, pitch: float = 440.0) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)


def save_whisper(folder: Path) -> None:
    """Save a tiny Whisper that hears a second at once, and whose transcripts begin with a prompt of two tokens."""
    save_softmax_model("whisper", folder, max_source_positions=50)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    GenerationConfig(no_timestamps_token_id=50, is_multilingual=False, max_length=16, **ids).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)


def save_speech(folder: Path) -> Path:
    """Save 12 files, every other one with a text; return the .jsonl file that names them."""
    (folder / "part").mkdir()
    rows = []
    for number in range(12):
        path = folder / "part" / f"{number:02}.{('wav', 'flac')[number % 2]}"
        soundfile.write(path, tone(0.4 + number / 20, rate=8000, pitch=200 + 40 * number), 8000)
        rows.append({"path": f"part/{path.name}"} | ({"text": f"w{number + 4} w9"} if number % 2 else {}))
    (folder / "speech.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "speech.jsonl"
