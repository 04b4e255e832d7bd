"""Speech as the data of a training."""

from __future__ import annotations

import pytest
from torch.testing import assert_close

from hf_rfa.convert import InputError
from hf_rfa.convert.inputs import transcript_inputs
from hf_rfa.finetune.data import SpeechCollator, speech_rows
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.inference import load_model
from hf_rfa.inference.transcription import load_feature_extractor, load_features
from hf_rfa.io.audio_io import read_utterances
from tests.conftest import leftovers

RECIPE = Recipe(
    transfer=Stage(steps=3, batch_size=2, learning_rate=0.02),
    end_to_end=Stage(steps=3, batch_size=2, learning_rate=0.002, rfa_learning_rate=0.004),
)


def test_rows_to_learn_have_the_texts_or_the_teachers_transcripts(speech_parts, speech):
    model, tokenizer, extractor = speech_parts
    utterances = read_utterances(speech)
    rows = speech_rows(model, tokenizer, extractor, utterances, length=96)
    assert [row["path"] for row in rows] == [str(each.path) for each in utterances]
    assert rows[1]["decoder_input_ids"] == [3, 50, 5, 9]
    assert rows[1]["labels"] == [-100, 5, 9, 2]
    written = transcript_inputs(model, load_features(extractor, [utterances[0].path]))
    assert rows[0]["labels"] == written["labels"][0].tolist()
    batch = SpeechCollator(extractor, tokenizer)([rows[0], rows[1]])
    assert_close(batch["input_features"], load_features(extractor, [each.path for each in utterances[:2]]))
    pads = len(rows[0]["labels"]) - 4
    assert batch["decoder_attention_mask"][1].tolist() == [1] * 4 + [0] * pads
    assert batch["labels"][1].tolist() == [-100, 5, 9, 2] + [-100] * pads
    assert batch["decoder_input_ids"][1].tolist() == [3, 50, 5, 9] + [1] * pads
    cut = speech_rows(model, tokenizer, extractor, utterances[:2], length=3)
    assert cut[1]["labels"] == [-100, 5, 9]


def test_a_converted_whisper_is_distilled_by_both_stages(whisper, converted_whisper, speech, tmp_path):
    report = distill(converted_whisper, tmp_path / "out", teacher=whisper, data=speech, recipe=RECIPE)
    assert [stage.steps for stage in report.stages] == [3, 3]
    assert set(report.divergence_after) == set(report.divergence_before)
    assert {"encoder_attn" in name for name in report.divergence_after} == {True, False}
    model, _ = load_model(str(tmp_path / "out"), kind="speech")
    features = load_features(load_feature_extractor(tmp_path / "out"), [read_utterances(speech)[0].path])
    assert len(transcript_inputs(model, features)["labels"])
    assert leftovers(tmp_path) == ["out"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "automatic-speech-recognition" in card
    with pytest.raises(InputError, match=r"put the transcripts into the \.jsonl file"):
        distill(converted_whisper, tmp_path / "b", teacher=whisper, data=speech, references=speech, recipe=RECIPE)
