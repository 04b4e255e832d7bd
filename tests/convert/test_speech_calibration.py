"""Speech as the data of a conversion."""

from __future__ import annotations

import json

import pytest
import soundfile

from hf_rfa.convert import convert, inputs
from hf_rfa.inference.transcription import load_features
from hf_rfa.io.audio_io import read_utterances
from tests.conftest import refused
from tests.speech import RATE, tone


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text.txt", r"text\.txt is not speech\. Pass a folder of"),
        ("empty", "empty has no speech in it"),
        ("broken", "cannot read .*b.wav as audio"),
        ("long", r"long\.wav lasts 1\.5 s, and the model hears 1 s at once\. Cut it"),
    ],
)
def test_what_is_no_speech_is_refused_before_work_starts(name, message, whisper, tmp_path):
    (tmp_path / "text.txt").write_text("w4 w5\n")
    for folder in ("empty", "broken", "long"):
        (tmp_path / folder).mkdir()
    soundfile.write(tmp_path / "broken" / "a.wav", tone(0.1), RATE)
    (tmp_path / "broken" / "b.wav").write_bytes(b"these are words")
    soundfile.write(tmp_path / "long" / "long.wav", tone(1.5), RATE)
    refused(message, whisper, tmp_path, calibrate_on=tmp_path / name)


def test_the_base_models_transcripts_are_what_it_writes_of_a_file_by_itself(speech_parts, speech):
    model, _, extractor = speech_parts
    features = load_features(extractor, [each.path for each in read_utterances(speech)])
    written = inputs.transcript_inputs(model, features)
    prompt = [3, 50]  # start, no time stamps
    for row in range(12):
        options = {"max_length": inputs.OUTPUT_TOKENS, "return_timestamps": False, "force_unique_generate_call": True}
        alone = model.generate(features[row : row + 1], **options)[0].tolist()
        alone = alone[: alone.index(2) + 1] if 2 in alone else alone
        mask = written["decoder_attention_mask"][row].bool()
        assert written["decoder_input_ids"][row][mask].tolist() == alone[:-1]
        assert alone[:2] == prompt
        labels = written["labels"][row]
        assert labels[labels != -100].tolist() == alone[2:]
        assert labels[0] == -100


def test_speech_calibrates(whisper, speech, converted_whisper, tmp_path):
    report = json.loads((converted_whisper / "conversion.json").read_text())
    assert report["perplexities"]["own_outputs"]
    assert {gain["kind"] for gain in report["gains"]} == {"causal", "cross"}
    assert all(sum(gain["after"]) < sum(gain["before"]) for gain in report["gains"])
    assert not any("random" in note for note in report["notes"])
    report = convert(whisper, tmp_path / "noise")
    assert any("random tokens and noise" in note for note in report.notes)
    rows = dict(report.rows())
    assert report.layers["cross"] == (0, 3)
    assert rows["cache of softmax cross attention"] == "28.1 KiB for the audio, at any length of output"
    assert report.source_bytes == 3 * 2 * 50 * 24 * 4  # layers, keys and values, positions, width, bytes
    assert "at any length of the output" in " ".join((tmp_path / "noise" / "README.md").read_text().split())
