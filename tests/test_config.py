"""The configuration: what it refuses, and that it says the field, the value and what is allowed."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import StrictDataclassError

from hf_rfa import FEATURE_MAPS, RFAGPT2Config

from .conftest import tiny_parent_config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_map": "cosine"}, ["feature_map", "cosine", "gaussian", "positive"]),
        ({"num_features": 0}, ["num_features", "0", "at least 1"]),
        ({"chunk_size": 0}, ["chunk_size", "0"]),
        ({"state_dtype": "bfloat16"}, ["state_dtype", "bfloat16", "float32"]),
        ({"redraw_pool": -1}, ["redraw_pool", "-1"]),
        ({"redraw_pool": 5, "feature_map": "elu"}, ["redraw_pool", "elu"]),
        ({"trainable_projection": True, "feature_map": "hedgehog"}, ["trainable_projection", "hedgehog"]),
        ({"redraw_pool": 5, "trainable_projection": True}, ["redraw_pool", "trainable_projection"]),
        ({"unit_norm": True, "feature_map": "t2r"}, ["unit_norm", "t2r"]),
        ({"softmax_layers": [2]}, ["softmax_layers", "[2]", "0 to 1"]),
        ({"softmax_layers": [0, 0]}, ["softmax_layers"]),
        ({"n_head": 5}, ["5", "24"]),
        ({"num_features": 9, "feature_map": "hedgehog"}, ["num_features", "9", "hedgehog", "8"]),
    ],
)
def test_refusals_name_field_value_and_range(options, words):
    with pytest.raises(StrictDataclassError) as error:
        RFAGPT2Config.from_parent(tiny_parent_config(), **options)
    message = str(error.value)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_round_trip(name, tmp_path):
    config = RFAGPT2Config.from_parent(tiny_parent_config(), feature_map=name, gate=True, softmax_layers=[1])
    config.save_pretrained(tmp_path)
    again = RFAGPT2Config.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.layer_types == ["rfa", "full_attention"]
    assert again.n_embd == 24
    count = FEATURE_MAPS[name].default_num_features
    assert again.num_features == (8 if count is None else count)


@pytest.mark.parametrize(("name", "count"), [("elu", 8), ("hedgehog", 8), ("gaussian", 64), ("positive", 128)])
def test_numbers_of_features_unless_told_otherwise(name, count):
    assert RFAGPT2Config.from_parent(tiny_parent_config(), feature_map=name).num_features == count


def test_parent_fields_are_kept():
    parent = tiny_parent_config(scale_attn_by_inverse_layer_idx=True, n_inner=7, summary_type="mean")
    config = RFAGPT2Config.from_parent(parent)
    kept = set(parent.to_dict()) - {"model_type", "architectures", "transformers_version"}
    assert all(getattr(config, name) == getattr(parent, name) for name in kept - {"id2label", "label2id"})
    assert config.model_type == "rfa_gpt2"
