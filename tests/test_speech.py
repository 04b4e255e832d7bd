"""Speech as data: files and their errors, calibration, distillation, transcripts and their scores, and the pipeline."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch.testing import assert_close
from transformers import GenerationConfig, WhisperFeatureExtractor, WhisperTokenizer, pipeline

from benchmarks.speech import read_aloud
from hf_rfa.convert import InputError, convert
from hf_rfa.convert.inputs import transcript_inputs
from hf_rfa.evaluation.transcription import evaluate_transcription, word_error_rate
from hf_rfa.finetune.data import SpeechCollator, speech_rows
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.inference import cache_num_bytes, load_model
from hf_rfa.inference.transcription import load_feature_extractor, load_features, transcribe
from hf_rfa.io.audio_io import load_samples, read_utterances
from hf_rfa.io.text_io import read_lines
from tests.conftest import copy_of, leftovers, refused, shared
from tests.families import save_softmax_model

RATE = 16_000
RECIPE = Recipe(
    transfer=Stage(steps=3, batch_size=2, learning_rate=0.02),
    end_to_end=Stage(steps=3, batch_size=2, learning_rate=0.002, rfa_learning_rate=0.004),
)


def tone(seconds: float, *, rate: int = RATE, pitch: float = 440.0) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Folder of a tiny Whisper that hears a second at once, and whose transcripts begin with a prompt of two tokens."""
    folder = tmp_path_factory.mktemp("speech") / "whisper"
    save_softmax_model("whisper", folder, max_source_positions=50)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    GenerationConfig(no_timestamps_token_id=50, is_multilingual=False, max_length=16, **ids).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    """A .jsonl file of 12 files, every other one with a text, and these in a folder beside it."""
    folder = tmp_path_factory.mktemp("utterances")
    (folder / "part").mkdir()
    rows = []
    for number in range(12):
        path = folder / "part" / f"{number:02}.{('wav', 'flac')[number % 2]}"
        soundfile.write(path, tone(0.4 + number / 20, rate=8000, pitch=200 + 40 * number), 8000)
        rows.append({"path": f"part/{path.name}"} | ({"text": f"w{number + 4} w9"} if number % 2 else {}))
    (folder / "speech.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "speech.jsonl"


@pytest.fixture(scope="module")
def converted(base, speech, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "rfa"
    options = {"preset": "rfa", "feature_map": "exponential", "num_features": 8, "cross_layers": "all"}
    convert(base, folder, calibrate_on=speech, force=True, **options)
    return folder


@pytest.fixture(scope="module")
def parts(base):
    """The tiny Whisper with its tokenizer and what makes its features."""
    return (*load_model(str(base), kind="speech"), load_feature_extractor(base))


# Files


def test_a_folder_and_a_list_name_the_same_files(speech):
    listed, found = read_utterances(speech), read_utterances(speech.parent)
    assert [each.path for each in listed] == [each.path for each in found]
    assert [each.text for each in listed[:4]] == [None, "w5 w9", None, "w7 w9"]
    assert all(each.text is None for each in found)
    assert read_utterances(speech, limit=3) == listed[:3]
    assert read_utterances(found[0].path) == found[:1]


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 48_000])
def test_samples_are_resampled_and_channels_are_mixed(rate, tmp_path):
    both = np.stack([tone(0.5, rate=rate), tone(0.5, rate=rate, pitch=880)], axis=1)
    soundfile.write(tmp_path / "a.wav", both, rate, subtype="FLOAT")
    samples = load_samples(tmp_path / "a.wav", RATE)
    expected = (tone(0.5) + tone(0.5, pitch=880)) / 2
    assert (samples.dtype, samples.shape) == (np.float32, expected.shape)
    assert np.abs(samples - expected)[400:-400].max() < 2e-3  # the filter's edges left out


BAD_FILES = {
    "text.wav": (b"these are words", "cannot read .*text.wav as audio"),
    "missing.wav": (None, "there is no audio file .*missing.wav"),
    "cut.flac": (b"fLaC", "cannot read .*cut.flac as audio"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_audio_are_refused_before_work_starts(name, base, speech, tmp_path):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    good = {"path": str(speech.parent / "part" / "00.wav")}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (good, {"path": name})))
    with pytest.raises(InputError, match=message):
        read_utterances(tmp_path / "a.jsonl")
    refused(message, base, tmp_path, calibrate_on=tmp_path / "a.jsonl")


def test_sound_that_is_none_is_refused(tmp_path):
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    with pytest.raises(InputError, match=r"empty\.wav is empty: there is no sound in it"):
        read_utterances(tmp_path)
    soundfile.write(tmp_path / "empty.wav", np.full(9, np.nan), RATE, subtype="FLOAT")
    with pytest.raises(InputError, match="samples that are no finite numbers"):
        read_utterances(tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "has no speech in it"),
        ('{"audio": "a.wav"}\n', r"line 1: no string field 'path' \(found: audio\)"),
        ('{"path": 3}\n', "field 'path' is of type int, not text"),
        (
            '{"path": "a.wav", "text": " "}\n',
            r"utterance 1: its text is ' '\. Write what is said, or leave the field out",
        ),
        ("a.wav\n", "line 1: not a JSON object"),
    ],
)
def test_lists_that_cannot_be_read_are_refused(lines, message, tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(0.1), RATE)
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(InputError, match=message):
        read_utterances(tmp_path / "a.jsonl")


def test_what_is_no_speech_is_refused(base, speech, tmp_path):
    (tmp_path / "text.txt").write_text("w4 w5\n")
    refused(r"text\.txt is no speech\. Pass a folder of", base, tmp_path, calibrate_on=tmp_path / "text.txt")
    (tmp_path / "texts").mkdir()
    refused(r"texts has no speech in it", base, tmp_path, calibrate_on=tmp_path / "texts")
    with pytest.raises(InputError, match=r"no text file .*utterances.*\. Pass a \.txt"):
        convert(Path(__file__).parent.parent / "demo" / "model", tmp_path / "out", calibrate_on=speech.parent)


def test_files_longer_than_the_model_hears_are_no_data(base, parts, tmp_path):
    soundfile.write(tmp_path / "long.wav", tone(1.5), RATE)
    message = r"long\.wav lasts 1\.5 s, and the model hears 1 s at once\. Cut it"
    refused(message, base, tmp_path, calibrate_on=tmp_path)


@pytest.mark.parametrize("library", ["soundfile", "jiwer"])
def test_missing_libraries_are_named(library, speech, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"needs {library}.*pip install 'hf-rfa\[audio\]'"):
        read_utterances(speech) if library == "soundfile" else word_error_rate(["a"], ["a"])


# Calibration


def test_the_base_models_transcripts_are_what_it_writes_of_a_file_by_itself(parts, speech):
    model, _, extractor = parts
    features = load_features(extractor, [each.path for each in read_utterances(speech)])
    inputs = transcript_inputs(model, features)
    prompt = [3, 50]  # start, no time stamps
    for row in range(12):
        options = {"max_length": 128, "return_timestamps": False, "force_unique_generate_call": True}
        alone = model.generate(features[row : row + 1], **options)[0].tolist()
        alone = alone[: alone.index(2) + 1] if 2 in alone else alone
        mask = inputs["decoder_attention_mask"][row].bool()
        assert inputs["decoder_input_ids"][row][mask].tolist() == alone[:-1]
        assert alone[:2] == prompt
        labels = inputs["labels"][row]
        assert labels[labels != -100].tolist() == alone[2:]
        assert labels[0] == -100


def test_speech_calibrates(base, speech, converted, tmp_path):
    report = json.loads((converted / "conversion.json").read_text())
    assert report["perplexities"]["own_outputs"]
    assert set(report["divergences"]) == {"causal", "cross"}
    assert all(after < before for before, after in report["divergences"].values())
    assert not any("random" in note for note in report["notes"])
    report = convert(base, tmp_path / "noise")
    assert any("random tokens and noise" in note for note in report.notes)
    rows = dict(report.rows())
    assert report.layers["cross"] == (0, 3)
    assert rows["cache of softmax cross attention"] == "28.1 KiB for the audio, at any length of output"
    assert report.source_bytes == 3 * 2 * 50 * 24 * 4  # layers, keys and values, positions, width, bytes
    assert "at any length of the output" in " ".join((tmp_path / "noise" / "README.md").read_text().split())


# Distillation


def test_rows_to_learn_have_the_texts_or_the_teachers_transcripts(parts, speech):
    model, tokenizer, extractor = parts
    utterances = read_utterances(speech)
    rows = speech_rows(model, tokenizer, extractor, utterances, length=96)
    assert [row["path"] for row in rows] == [str(each.path) for each in utterances]
    assert rows[1]["decoder_input_ids"] == [3, 50, 5, 9]
    assert rows[1]["labels"] == [-100, 5, 9, 2]
    written = transcript_inputs(model, load_features(extractor, [utterances[0].path]))
    assert rows[0]["labels"] == written["labels"][0].tolist()
    batch = SpeechCollator(extractor, 1)([rows[0], rows[1]])
    assert_close(batch["input_features"], load_features(extractor, [each.path for each in utterances[:2]]))
    assert batch["decoder_attention_mask"][1].tolist() == [1] * 4 + [0] * (len(rows[0]["labels"]) - 4)
    assert batch["labels"][1].tolist() == [-100, 5, 9, 2] + [-100] * (len(rows[0]["labels"]) - 4)
    assert batch["decoder_input_ids"][1].tolist() == [3, 50, 5, 9] + [1] * (len(rows[0]["labels"]) - 4)
    cut = speech_rows(model, tokenizer, extractor, utterances[:2], length=3)
    assert cut[1]["labels"] == [-100, 5, 9]


def test_a_converted_whisper_is_distilled_by_both_stages(base, converted, speech, tmp_path):
    report = distill(converted, tmp_path / "out", teacher=base, data=speech, recipe=RECIPE)
    assert [stage.steps for stage in report.stages] == [3, 3]
    assert set(report.after) == set(report.before)
    assert {"encoder_attn" in name for name in report.after} == {True, False}
    model, _ = load_model(str(tmp_path / "out"), kind="speech")
    features = load_features(load_feature_extractor(tmp_path / "out"), [read_utterances(speech)[0].path])
    assert len(transcript_inputs(model, features)["labels"])
    assert leftovers(tmp_path) == ["out"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "automatic-speech-recognition" in card
    with pytest.raises(InputError, match=r"what is said belongs into the \.jsonl file"):
        distill(converted, tmp_path / "b", teacher=base, data=speech, references=speech, recipe=RECIPE)


def test_conversion_and_training_in_one_command(base, speech, tmp_path, run_cli):
    words = ("convert", base, tmp_path / "out", "--data", speech, "--transfer-steps", 2)
    assert run_cli(*words) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["softmax_cross_layers"] == []
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


# Transcripts


def test_a_word_error_rate_is_that_of_all_words_in_lower_case():
    assert word_error_rate(["A man, walking.", "two dogs"], ["a man walking", "two cats run"]) == pytest.approx(40)
    assert word_error_rate(["a", "b"], ["", "b"]) == pytest.approx(50)
    with pytest.raises(InputError, match="there is no word in the references"):
        word_error_rate(["..."], ["a"])


@pytest.mark.parametrize("beams", [1, 3])
def test_transcripts_are_those_of_generate(beams, parts, speech):
    model, tokenizer, extractor = parts
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


@torch.no_grad()
def test_the_bytes_are_those_of_the_cache_after_the_longest(parts, speech):
    model, tokenizer, extractor = parts
    found = evaluate_transcription(model, tokenizer, extractor, read_utterances(speech, limit=3))
    ids = torch.full((1, found.transcripts.longest), 5)
    cache = model(torch.zeros(1, 8, 100), decoder_input_ids=ids, use_cache=True).past_key_values
    assert found.cache_bytes == cache_num_bytes(cache)


def test_long_speech_is_transcribed_as_transformers_does(parts):
    model, tokenizer, extractor = parts
    long = tone(1.6, pitch=300).astype(np.float32)
    (text,) = transcribe(model, tokenizer, extractor, [long]).texts
    inputs = extractor(long, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest")
    ids = model.generate(inputs["input_features"], return_timestamps=True)[0]
    expected = tokenizer.decode(ids[ids <= 50], skip_special_tokens=True).strip()
    assert text.split() == expected.split()
    both = transcribe(model, tokenizer, extractor, [long, long[:9000]])
    assert both.texts[0] == text
    assert len(both.texts) == 2


def test_the_commands_transcribe(base, converted, speech, run_cli, capsys):
    assert run_cli("evaluate", converted, speech, "--task", "transcription", "--teacher", base, "--record") == 0
    shown = capsys.readouterr().out
    for word in ("WER", "WER to base", "tokens/s", "bytes", "12 files, 6 references"):
        assert word in " ".join(shown.split())
    (result,) = json.loads((converted / "evaluation.json").read_text())
    assert (result["task"], set(result["scores"])) == ("transcription", {"WER", "WER to base model"})
    files = [speech.parent / "part" / name for name in ("00.wav", "01.flac")]
    assert run_cli("generate", converted, "--audio", files[0], "--audio", files[1]) == 0
    shown = capsys.readouterr()
    model, tokenizer = load_model(str(converted), kind="speech")
    extractor = load_feature_extractor(converted)
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
        (
            ("evaluate", "--task", "transcription", "speech.jsonl", "--stride", "4"),
            "--stride has no effect with --task",
        ),
        (("evaluate", "speech.jsonl", "--teacher", "x"), "--teacher has no effect with --task perplexity"),
    ],
)
def test_commands_that_cannot_be_are_refused(words, message, base, speech, monkeypatch, run_cli, capsys):
    monkeypatch.chdir(speech.parent)
    command, *options = words
    assert run_cli(command, base, *options) != 0
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_model_of_text_transcribes_nothing(speech, refused_command, tiny_parent):
    said = refused_command("evaluate", tiny_parent, speech, "--task", "transcription")
    assert "is a gpt2 model, a decoder that stands alone, but this needs an encoder of audio and a decoder" in said


# The pipeline


@pytest.fixture(scope="module")
def with_stamps(base, tmp_path_factory) -> tuple[Path, Path]:
    """The tiny Whisper with a tokenizer of Whisper's own, and it converted with a window that holds all tokens."""
    folder = tmp_path_factory.mktemp("stamps")
    copy_of(base, folder / "whisper")
    names = ["!", '"', "<|endoftext|>", "<|startoftranscript|>", *map(chr, range(35, 81)), "<|notimestamps|>"]
    names += [f"<|{number / 50:.2f}|>" for number in range(10)]
    vocabulary = {name: number for number, name in enumerate(names)}
    WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="!").save_pretrained(folder / "whisper")
    convert(folder / "whisper", folder / "rfa", preset="exact", window_size=96)
    return folder / "whisper", folder / "rfa"


def test_the_pipeline_is_the_base_models(with_stamps):
    sounds = [tone(seconds, pitch=300 * seconds).astype(np.float32) for seconds in (0.3, 0.6, 0.9)]
    long = np.concatenate([*sounds, *sounds])
    found = []
    for folder in with_stamps:
        recognize = pipeline("automatic-speech-recognition", model=str(folder))
        assert recognize.type == "seq2seq_whisper"
        greedy = {"generate_kwargs": {"num_beams": 1}}
        found.append(
            [
                recognize(sounds[0].copy(), **greedy),
                recognize([each.copy() for each in sounds], batch_size=2, generate_kwargs={"num_beams": 3}),
                recognize(sounds[1].copy(), return_timestamps=True, **greedy),
                recognize(long.copy(), return_timestamps=True, **greedy),
                recognize(long.copy(), chunk_length_s=0.8, ignore_warning=True, **greedy),
            ]
        )
    assert found[0] == found[1]
    assert len(found[0][3]["chunks"]) > 1
    assert pipeline("automatic-speech-recognition", model=str(folder), return_timestamps=True)(long)["chunks"]


def test_without_whispers_own_tokenizer_the_pipeline_transcribes_what_is_heard_at_once(converted):
    recognize = pipeline("automatic-speech-recognition", model=str(converted))
    assert recognize.type == "seq2seq"
    assert recognize({"raw": tone(0.3).astype(np.float32), "sampling_rate": RATE})["text"]


@pytest.mark.slow
def test_a_trained_whisper_that_is_converted_transcribes_as_before(tmp_path):
    """Whisper tiny.en, and 20 sentences that espeak-ng reads: by batches, by beams, and with time stamps."""
    script, sentences = (
        shared("models/get-whisper"),
        read_lines(shared("data/multi30k") / "test_2016_flickr.en.gz")[:20],
    )
    if shutil.which("espeak-ng") is None:
        pytest.skip("needs espeak-ng, which is not here")
    base, converted = tmp_path / "whisper", tmp_path / "rfa"
    if subprocess.run([script, base, sys.executable]).returncode:
        pytest.skip(f"{script} cannot get the weights")
    settings = base / "tokenizer_config.json"  # the pipeline goes by the class of the tokenizer
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "WhisperTokenizer"}))
    convert(base, converted)
    spoken = []
    for text in sentences:
        path = tmp_path / "spoken.wav"
        path.write_bytes(read_aloud(text, voice="en-us+m1", speed=160, pitch=50))
        spoken.append(load_samples(path, RATE))
    outputs = []
    for folder in (base, converted):
        recognize = pipeline("automatic-speech-recognition", model=str(folder))
        assert recognize.type == "seq2seq_whisper"
        greedy, beams = ({"generate_kwargs": {"num_beams": number, "max_new_tokens": 60}} for number in (1, 3))
        outputs.append(
            [
                recognize([samples.copy() for samples in spoken], batch_size=5, **greedy),
                recognize([samples.copy() for samples in spoken], batch_size=4, **beams),
                [recognize(samples.copy(), return_timestamps=True, **greedy) for samples in spoken],
            ]
        )
        with pytest.raises(ValueError, match="alignment_heads"):
            recognize(spoken[0].copy(), return_timestamps="word")
    assert outputs[0] == outputs[1]
