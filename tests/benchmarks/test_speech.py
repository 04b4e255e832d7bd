"""Synthetic speech: who reads what, and long files of it."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import soundfile

from benchmarks import speech
from hf_rfa.io.audio_io import load_samples, read_utterances


@pytest.fixture
def spoken(monkeypatch) -> list[dict]:
    """What espeak-ng is told to read; it answers with as many samples as the text has letters."""
    told = []

    def read_aloud(text, **style):
        told.append({"text": text, **style})
        file = io.BytesIO()
        soundfile.write(file, np.full(len(text), 0.1), 22_050, format="WAV")
        return file.getvalue()

    monkeypatch.setattr(speech, "read_aloud", read_aloud)
    monkeypatch.setattr("shutil.which", lambda name: name)
    return told


def test_sentences_are_read_in_voices_of_their_set(spoken, tmp_path, monkeypatch):
    texts = [f"sentence number {n}" for n in range(30)]
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n")
    options = ["--train", str(tmp_path / "a.txt"), "--held-out", str(tmp_path / "a.txt"), "--held-out-rows", "12"]
    for name in ("one", "two"):
        monkeypatch.setattr("sys.argv", ["speech", str(tmp_path / name), *options])
        speech.main()
    assert spoken[:42] == spoken[42:], "the seed says how they are read"
    voices = {}
    for name, count in (("train", 30), ("held-out", 12)):
        utterances = read_utterances(tmp_path / "one" / f"{name}.jsonl")
        assert [utterance.text for utterance in utterances] == texts[:count]
        rows = [json.loads(line) for line in (tmp_path / "one" / f"{name}.jsonl").read_text().splitlines()]
        voices[name] = {part for row in rows for part in row["voice"].split("+")}
        assert len({row["speed"] for row in rows}) > 1
    assert voices["train"].isdisjoint(voices["held-out"])


def test_long_files_are_held_out_utterances_one_after_the_other(spoken, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(f"{'x' * 882} {n}\n" for n in range(45)))
    words = ["--train", str(tmp_path / "a.txt"), "--held-out", str(tmp_path / "a.txt"), "--long-files"]
    monkeypatch.setattr("sys.argv", ["speech", str(tmp_path / "out"), *words, "2"])
    speech.main()
    parts, long = (read_utterances(tmp_path / "out" / f"{name}.jsonl") for name in ("held-out", "long"))
    assert [row.text for row in long] == [" ".join(row.text for row in parts[n : n + 20]) for n in (0, 20)]
    samples = load_samples(long[1].path, speech.LONG_RATE)
    spoken_samples = [len(load_samples(row.path, speech.LONG_RATE)) for row in parts[20:40]]
    assert len(samples) == sum(spoken_samples) + 20 * 6000
    assert not samples[spoken_samples[0] + 10 : spoken_samples[0] + 5990].any()
    monkeypatch.setattr("sys.argv", ["speech", str(tmp_path / "more"), *words, "3", "--held-out-rows", "45"])
    with pytest.raises(ValueError, match="--long-files 3 needs 60 held-out utterances, and there are 45"):
        speech.main()


def test_missing_espeak_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["speech", str(tmp_path / "out"), "--train", "a", "--held-out", "b"])
    with pytest.raises(ValueError, match=r"no espeak-ng here\. Install it"):
        speech.main()
