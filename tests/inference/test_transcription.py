"""Speech: its files and their errors, transcripts and their scores, and the pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperTokenizer, pipeline

from hf_rfa.convert import InputError, convert
from hf_rfa.evaluation.transcription import evaluate_transcription, word_error_rate
from hf_rfa.inference import cache_num_bytes, load_model
from hf_rfa.inference.transcription import load_feature_extractor, load_features, transcribe
from hf_rfa.io.audio_io import load_samples, read_utterances
from tests.conftest import copy_of
from tests.speech import RATE, tone


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050])
def test_samples_are_resampled_and_channels_are_mixed(rate, tmp_path):
    both = np.stack([tone(0.5, rate=rate), tone(0.5, rate=rate, pitch=880)], axis=1)
    soundfile.write(tmp_path / "a.wav", both, rate, subtype="FLOAT")
    samples = load_samples(tmp_path / "a.wav", RATE)
    expected = (tone(0.5) + tone(0.5, pitch=880)) / 2
    assert (samples.dtype, samples.shape) == (np.float32, expected.shape)
    assert np.abs(samples - expected)[400:-400].max() < 2e-3  # the filter's edges left out


def test_a_folder_and_a_list_name_the_same_files(speech):
    listed, found = read_utterances(speech), read_utterances(speech.parent)
    assert [each.path for each in listed] == [each.path for each in found]
    assert [each.text for each in listed[:4]] == [None, "w5 w9", None, "w7 w9"]
    assert all(each.text is None for each in found)
    assert read_utterances(speech, limit=3) == listed[:3]
    assert read_utterances(found[0].path) == found[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no speech in it"),
        ('{"audio": "a.wav"}', r"line 1: no string field 'path' \(found: audio\)"),
        (
            '{"path": "a.wav", "text": " "}',
            r"utterance 1: its text is ' '\. Write what is said, or leave the field out",
        ),
        ('{"path": "missing.wav"}', "there is no audio file .*missing.wav"),
        ('{"path": "a.jsonl"}', "cannot read .*a.jsonl as audio"),
        ('{"path": "empty.wav"}', r"empty\.wav is empty: it has no samples"),
        ('{"path": "nan.wav"}', "samples that are no finite numbers"),
    ],
)
def test_files_that_cannot_be_used_are_refused(line, message, tmp_path):
    for name, samples in {"a": tone(0.1), "empty": np.zeros(0), "nan": np.full(9, np.nan)}.items():
        soundfile.write(tmp_path / f"{name}.wav", samples, RATE, subtype="FLOAT")
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    with pytest.raises(InputError, match=message):
        read_utterances(tmp_path / "a.jsonl")


@pytest.mark.parametrize("beams", [1, 3])
def test_transcripts_are_those_of_generate(beams, speech_parts, speech):
    model, tokenizer, extractor = speech_parts
    utterances = read_utterances(speech, limit=5)
    done = []
    options = {"num_beams": beams, "batch_size": 2, "on_batch": lambda *counts: done.append(counts)}
    found = evaluate_transcription(model, tokenizer, extractor, utterances, base_texts=["w4"] * 5, **options)
    assert done == [(2, 5), (4, 5), (5, 5)]
    for utterance, text in zip(utterances, found.transcripts.texts, strict=True):
        options = {"num_beams": beams, "force_unique_generate_call": True}
        ids = model.generate(load_features(extractor, [utterance.path]), **options)[0, 2:]
        assert text == tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert set(found.scores) == {"WER", "WER to base model"}
    references = [each.text for each in utterances if each.text]
    texts = [text for each, text in zip(utterances, found.transcripts.texts, strict=True) if each.text]
    assert found.scores["WER"] == word_error_rate(references, texts)
    assert "5 files, 2 references" in found.protocol
    longest = torch.full((1, found.transcripts.longest), 5)
    cache = model(torch.zeros(1, 8, 100), decoder_input_ids=longest, use_cache=True).past_key_values
    assert found.cache_bytes == cache_num_bytes(cache)


@pytest.fixture(scope="module")
def with_stamps(whisper, tmp_path_factory) -> tuple[Path, Path]:
    """The tiny Whisper with a tokenizer of Whisper's own, and it converted with a window that holds all tokens."""
    folder = tmp_path_factory.mktemp("stamps")
    copy_of(whisper, folder / "whisper")
    names = ["!", '"', "<|endoftext|>", "<|startoftranscript|>", *map(chr, range(35, 81)), "<|notimestamps|>"]
    names += [f"<|{number / 50:.2f}|>" for number in range(10)]
    vocabulary = {name: number for number, name in enumerate(names)}
    WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="!").save_pretrained(folder / "whisper")
    convert(folder / "whisper", folder / "rfa", preset="exact", window_size=96)
    return folder / "whisper", folder / "rfa"


def test_the_pipeline_is_the_base_models(with_stamps):
    sounds = [tone(seconds, pitch=300 * seconds).astype(np.float32) for seconds in (0.3, 0.6, 0.9)]
    long = np.concatenate([sounds[2], sounds[0]])  # more than is heard at once
    found = []
    for folder in with_stamps:
        recognize = pipeline("automatic-speech-recognition", model=str(folder))
        assert recognize.type == "seq2seq_whisper"
        few = {"max_new_tokens": 12}
        batch = recognize([each.copy() for each in sounds], batch_size=2, generate_kwargs={"num_beams": 3, **few})
        stamped = recognize(long.copy(), return_timestamps=True, generate_kwargs=few)
        chunked = recognize(long.copy(), chunk_length_s=0.8, ignore_warning=True, generate_kwargs=few)
        found.append([batch, stamped, chunked])
    assert found[0] == found[1]
    assert len(stamped["chunks"]) > 1
    recognize = pipeline("automatic-speech-recognition", model=str(folder), return_timestamps=True)
    assert recognize(sounds[2], generate_kwargs=few)["chunks"]


# Transcripts scored


def test_a_word_error_rate_is_that_of_all_words_in_lower_case():
    assert word_error_rate(["A man, walking.", "two dogs"], ["a man walking", "two cats run"]) == pytest.approx(40)
    assert word_error_rate(["a", "b"], ["", "b"]) == pytest.approx(50)
    with pytest.raises(InputError, match="the references have no words"):
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
