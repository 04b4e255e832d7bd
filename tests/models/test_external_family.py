"""A family from outside the package: `tests/bigbird_pegasus.py`, one declaration, is all that it takes.

`test_self_contained.py` loads its checkpoint without the package.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_rfa import FAMILIES, register_family
from hf_rfa.families import family_of
from hf_rfa.inference import cache_num_bytes
from tests.conftest import refused, save_tiny_tokenizer, tiny_seq2seq_config


def test_it_is_converted_with_every_weight(family_from_outside):
    softmax, rfa = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in family_from_outside)
    assert type(rfa).__name__ == "RFABigBirdPegasusForConditionalGeneration"
    assert rfa.config.max_position_embeddings == 200
    kept = rfa.state_dict()
    for name, tensor in softmax.state_dict().items():
        assert "embed_positions" in name or torch.equal(kept[name], tensor)


def test_it_decodes_with_a_cache_of_one_size_as_without(family_from_outside):
    model = AutoModelForSeq2SeqLM.from_pretrained(family_from_outside[1]).eval()
    ids, sizes = torch.tensor([[5, 6, 7, 2]]), set()
    for count in (6, 30):
        options = {"do_sample": False, "num_beams": 1, "min_new_tokens": count, "max_new_tokens": count}
        answers = [model.generate(ids, **options, use_cache=use, return_dict_in_generate=True) for use in (True, False)]
        assert torch.equal(answers[0].sequences, answers[1].sequences)
        sizes.add(cache_num_bytes(answers[0].past_key_values))
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        # Its layers take keyword arguments and hand none on: padded sources would give other outputs.
        ("mvp", {}, "hands no keyword arguments on to its MvpAttention"),
        # Its encoder's attention has the four projections, and hidden states of two kinds.
        ("pegasus_x", {"encoder_layers": "all"}, r"leave these layers softmax \(softmax_encoder_layers\)"),
    ],
)
def test_layers_of_another_call_are_refused(model_type, options, message, tmp_path):
    AutoModelForSeq2SeqLM.from_config(tiny_seq2seq_config(model_type)).save_pretrained(tmp_path / "base")
    save_tiny_tokenizer(tmp_path / "base")
    with patch.dict(FAMILIES):
        register_family(family_of(model_type))
        refused(message, tmp_path / "base", tmp_path, **options)
