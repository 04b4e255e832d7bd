"""Decoders exported to ExecuTorch: the program against torch, up to where positions end; its own runner; refusals."""

from __future__ import annotations

import json
import string

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.testing import assert_close

from hf_rfa import InputError
from hf_rfa.export import export
from hf_rfa.inference import load_model
from tests.exported import SUMMARY, saved
from tests.families import tokens

pytest.importorskip("executorch", reason="executorch is not installed: pip install 'hf-rfa[executorch]'")

#: Old tokens do not move along.
STAYS = {"max_distance": None, "distance_step": None}
KINDS = {
    "summary": ("llama", {**SUMMARY, "max_distance": 104, "max_position_embeddings": 120}),
    "features and a gate": (
        "gpt2",
        {"feature_map": "positive", "gate": True, "num_slots": 0, "n_positions": 120, **STAYS},
    ),
}


@pytest.fixture(scope="module", params=["summary", pytest.param("features and a gate", marks=pytest.mark.slow)])
def exported(request, tmp_path_factory):
    """A tiny model, and the folder of its program."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("executorch")
    family, options = KINDS[request.param]
    checkpoint = saved(folder / "model", family, **options)
    report = export(str(checkpoint), folder / "program", to="executorch")
    return load_model(str(checkpoint))[0], folder / "program", report


@torch.no_grad()
def test_a_program_gives_the_models_logits_token_by_token_and_begins_anew(exported):
    """The second text finds nothing of the first, and past the last rotary position there are no logits."""
    from hf_rfa.export.executorch_program import RunningProgram

    model, folder, _ = exported
    running = RunningProgram(folder / "model.pte")
    last = model.config.max_position_embeddings
    alike = model.config.motion_of("causal")[0] or last  # then old tokens move along in torch
    for length in (130, 31):
        ids = tokens(
            1, length if model.config.streams() else min(length, last)
        )  # a table of positions ends with an error
        running.begin()
        logits = torch.stack([running.read(token)[0] for token in ids.split(1, dim=1)])
        assert_close(logits[:alike], model(ids).logits[0, :alike], atol=1e-4, rtol=1e-3)
        assert logits[:last].isfinite().all()
        assert logits[last:].isnan().all()


def test_the_folder_has_figures_and_what_a_runner_asks_for(exported):
    from executorch.runtime import Runtime

    model, folder, report = exported
    assert json.loads((folder / "export.json").read_text())["difference"] == report.difference < 1e-4
    assert (report.same_top, report.split_difference, report.prompt_ms) == (1.0, None, None)
    assert report.num_bytes == (folder / "model.pte").stat().st_size
    assert (folder / "tokenizer.json").is_file()
    program = Runtime.get().load_program(folder / "model.pte")
    asked = {name: program.load_method(name).execute([])[0] for name in ("get_max_seq_len", "get_vocab_size")}
    assert asked["get_vocab_size"] == model.config.vocab_size
    assert asked["get_max_seq_len"] == model.config.max_position_embeddings


@torch.no_grad()
def test_executorchs_own_runner_writes_what_the_model_writes(exported, tmp_path):
    """With a tokenizer of single letters, of a kind that the runner reads."""
    runner = pytest.importorskip("executorch.extension.llm.runner", reason="this build of executorch has no runner")
    model, folder, _ = exported
    letters = (string.ascii_letters + string.digits + ".,")[: model.config.vocab_size]
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt, texts = "".join(letters[number] for number in tokens(1, 9)[0]), []
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    written = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    own = runner.TextLLMRunner(str(folder / "model.pte"), str(tmp_path / "tokenizer.json"))
    own.generate(prompt, runner.GenerationConfig(max_new_tokens=20, temperature=0.0, echo=False), texts.append)
    assert len(written) == 20
    assert "".join(texts) == "".join(letters[number] for number in written)


def test_what_cannot_be_exported_is_refused_before_anything_is_written(tmp_path):
    mixed = saved(tmp_path / "mixed", softmax_layers=[1], **STAYS)
    with pytest.raises(InputError, match="layers are all RFA"):
        export(str(mixed), tmp_path / "out", to="executorch")
    assert not (tmp_path / "out").exists()
