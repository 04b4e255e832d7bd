"""Transcripts scored, by the library and by the commands."""

from __future__ import annotations

import json

import pytest

from hf_rfa.convert import InputError
from hf_rfa.evaluation.transcription import word_error_rate
from hf_rfa.inference import load_model
from hf_rfa.inference.transcription import load_feature_extractor, transcribe
from hf_rfa.io.audio_io import load_samples
from tests.speech import RATE


def test_a_word_error_rate_is_that_of_all_words_in_lower_case():
    assert word_error_rate(["A man, walking.", "two dogs"], ["a man walking", "two cats run"]) == pytest.approx(40)
    assert word_error_rate(["a", "b"], ["", "b"]) == pytest.approx(50)
    with pytest.raises(InputError, match="there is no word in the references"):
        word_error_rate(["..."], ["a"])


def test_the_commands_transcribe(whisper, converted_whisper, speech, run_cli, capsys):
    options = ("--task", "transcription", "--teacher", whisper, "--record")
    assert run_cli("evaluate", converted_whisper, speech, *options) == 0
    shown = capsys.readouterr().out
    for word in ("WER", "WER to base", "tokens/s", "bytes", "12 files, 6 references"):
        assert word in " ".join(shown.split())
    (result,) = json.loads((converted_whisper / "evaluation.json").read_text())
    assert (result["task"], set(result["scores"])) == ("transcription", {"WER", "WER to base model"})
    files = [speech.parent / "part" / name for name in ("00.wav", "01.flac")]
    assert run_cli("generate", converted_whisper, "--audio", files[0], "--audio", files[1]) == 0
    shown = capsys.readouterr()
    model, tokenizer = load_model(str(converted_whisper), kind="speech")
    extractor = load_feature_extractor(converted_whisper)
    expected = transcribe(model, tokenizer, extractor, [load_samples(path, RATE) for path in files])
    assert [line.strip() for line in shown.out.splitlines()] == list(expected.texts)
    assert f"{expected.tokens} tokens in" in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "--audio", "x.wav"), "there is no audio file x.wav"),
        (("generate", "--audio", "x.wav", "--prompt", "w4"), "--prompt has no effect with --audio"),
        (("generate", "--audio", "x.wav", "--max-new-tokens", "4"), "--max-new-tokens has no effect with --audio"),
        (("generate", "--prompt", "w4"), "reads audio, and this needs a model that reads text"),
        (("evaluate", "--task", "transcription", "part"), "has no texts to score by"),
        (("evaluate", "--task", "transcription", "speech.jsonl", "--stride", "4"), "--stride has no effect with"),
        (("evaluate", "speech.jsonl", "--teacher", "x"), "--teacher has no effect with --task perplexity"),
    ],
)
def test_commands_that_cannot_be_are_refused(words, message, whisper, speech, monkeypatch, run_cli, capsys):
    monkeypatch.chdir(speech.parent)
    command, *options = words
    assert run_cli(command, whisper, *options) != 0
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_model_of_text_transcribes_nothing(speech, refused_command, tiny_parent):
    said = refused_command("evaluate", tiny_parent, speech, "--task", "transcription")
    assert "is a gpt2 model, a decoder that stands alone, but this needs an encoder of audio and a decoder" in said
