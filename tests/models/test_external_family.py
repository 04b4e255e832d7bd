"""A family from outside the package: `tests/bigbird_pegasus.py`, one declaration, is all that it takes."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BigBirdPegasusForConditionalGeneration,
)

from hf_rfa import FAMILIES, register_family
from hf_rfa.families import family_of
from hf_rfa.inference import cache_num_bytes
from hf_rfa_cli import main as cli
from tests.conftest import ROOT, refused, save_tiny_tokenizer, tiny_seq2seq_config
from tests.without_package import assert_loads_without_package

FAMILY = ROOT / "tests" / "bigbird_pegasus.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a softmax model and of what ``hf-rfa convert --import`` makes of it."""
    base, converted = (tmp_path_factory.mktemp("own-family") / name for name in ("softmax", "converted"))
    torch.manual_seed(1)
    config = tiny_seq2seq_config("bigbird_pegasus", attention_type="original_full")
    BigBirdPegasusForConditionalGeneration(config).save_pretrained(base)
    save_tiny_tokenizer(base)
    options = ["--window-size", "4", "--max-positions", "200"]
    cli.app(["convert", str(base), str(converted), "--import", str(FAMILY), *options], standalone_mode=False)
    yield base, converted
    del FAMILIES["bigbird_pegasus"]


def test_it_is_converted_with_every_weight(folders):
    softmax, rfa = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in folders)
    assert type(rfa).__name__ == "RFABigBirdPegasusForConditionalGeneration"
    assert rfa.config.max_position_embeddings == 200
    kept = rfa.state_dict()
    for name, tensor in softmax.state_dict().items():
        assert "embed_positions" in name or torch.equal(kept[name], tensor)


def test_it_decodes_with_a_cache_of_one_size_as_without(folders):
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[1]).eval()
    ids, sizes = torch.tensor([[5, 6, 7, 2]]), set()
    for count in (6, 60):
        options = {"do_sample": False, "num_beams": 1, "min_new_tokens": count, "max_new_tokens": count}
        answers = [model.generate(ids, **options, use_cache=use, return_dict_in_generate=True) for use in (True, False)]
        assert torch.equal(answers[0].sequences, answers[1].sequences)
        sizes.add(cache_num_bytes(answers[0].past_key_values))
    assert len(sizes) == 1


def test_its_checkpoints_carry_their_code(folders, tmp_path):
    models = {folders[1].name: AutoModelForSeq2SeqLM.from_pretrained(folders[1])}
    assert_loads_without_package(folders[1].parent, "AutoModelForSeq2SeqLM", models, tmp_path)


@pytest.fixture
def families():
    """The families, to which a test may add some of its own."""
    before = dict(FAMILIES)
    yield FAMILIES
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        # Its layers take keyword arguments and hand none on: padded sources would give other outputs.
        ("mvp", {}, "hands no keyword arguments on to its MvpAttention"),
        # Its encoder's attention has the four projections, and hidden states of two kinds.
        ("pegasus_x", {"encoder_layers": "all"}, r"leave these layers softmax \(softmax_encoder_layers\)"),
    ],
)
def test_layers_of_another_call_are_refused(model_type, options, message, families, tmp_path):
    register_family(family_of(model_type))
    torch.manual_seed(1)
    AutoModelForSeq2SeqLM.from_config(tiny_seq2seq_config(model_type)).save_pretrained(tmp_path / "base")
    save_tiny_tokenizer(tmp_path / "base")
    refused(message, tmp_path / "base", tmp_path, **options)
