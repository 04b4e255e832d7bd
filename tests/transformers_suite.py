"""transformers' own tests of its models, `ModelTesterMixin`, on RFA models: run by `tests/test_transformers_suite.py`.

The environment variable ``TRANSFORMERS_TESTS`` names a folder that holds transformers' ``tests``: a checkout, or its source
distribution, which lacks the tests of generation and of export.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_rfa.families import FAMILIES, reads_audio
from tests.families import TINY_MEMORIES, base_config, has_encoder

FOLDER = Path(os.environ["TRANSFORMERS_TESTS"]) / "tests"
#: What models keep of a text of 7 tokens, named as in the names of classes. Without features cross attention is softmax.
SETTINGS = {name.title(): options for name, options in TINY_MEMORIES.items()}
UNSHIFTED = "the base model's loss does not shift either, and the suite leaves it out by name"
RESIZED = "it takes tokens for the model's inputs; transformers' tests of Whisper replace it"
#: Tests that are left out and why, of all models and of some kinds.
LEFT_OUT: dict[str, dict[str, str]] = {
    "": {
        "test_retain_grad_hidden_states_attentions": "the output is no function of the attention weights that are returned",
        "test_bc_cache_name_forward": "the cache is read under either name, without a warning",
    },
    "Bart": {"test_inputs_embeds": "sequence classification takes no embeddings, as in the base model"},
    "BartDecoder": {"test_causal_lm_loss_honors_shift_labels": UNSHIFTED},
    "Whisper": {"test_resize_tokens_embeddings": RESIZED, "test_resize_embeddings_untied": RESIZED},
    "WhisperDecoder": {"test_causal_lm_loss_honors_shift_labels": UNSHIFTED},
}


def suite_class(module: str, name: str) -> Any:
    """Return a class of transformers' tests; an empty one, if the folder lacks its module."""
    if not (FOLDER / f"{module.replace('.', '/')}.py").is_file():
        sys.modules[f"transformers_tests.{module}"] = stand_in = ModuleType(module)
        setattr(stand_in, name, type(name, (), {}))
    return getattr(importlib.import_module(f"transformers_tests.{module}"), name)


# Under a name of their own: this folder is called `tests` too.
sys.modules["transformers_tests"] = ModuleType("transformers_tests")
sys.modules["transformers_tests"].__path__ = [str(FOLDER)]
suite_class("exporters.test_export", "ExportTesterMixin")
GenerationTesterMixin = suite_class("generation.test_utils", "GenerationTesterMixin")
ModelTesterMixin = suite_class("test_modeling_common", "ModelTesterMixin")


class ModelInputs:
    """Makes configurations and inputs: what transformers' tests of every model hand to the mixins as ``model_tester``."""

    batch_size, seq_length, is_training = 13, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 24, 2, 2

    def __init__(self, family: str, options: dict[str, Any], *, is_encoder_decoder: bool) -> None:
        self.family, self.options, self.is_encoder_decoder = family, options, is_encoder_decoder
        if family == "whisper" and is_encoder_decoder:
            self.encoder_seq_length = self.key_length = 20

    def get_config(self) -> PreTrainedConfig:
        """Return the configuration of a model of two layers, with initial values as small as by default."""
        if self.family == "gpt2":
            fields: dict[str, Any] = {"n_layer": 2, "n_head": 2, "initializer_range": 0.02}
        elif has_encoder(self.family):
            fields = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
            fields |= {"init_std": 0.02, "is_encoder_decoder": self.is_encoder_decoder}
        else:
            fields = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.02}
        return FAMILIES[self.family].rfa_config.from_base(
            base_config(self.family, **fields, pad_token_id=1), **self.options
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        """Return a configuration, and a model's inputs."""
        config: Any = self.get_config()
        ids = torch.randint(3, 61, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids)
        if not self.is_encoder_decoder:
            return config, {"input_ids": ids, "attention_mask": mask}
        decoder = {"decoder_input_ids": torch.randint(3, 61, ids.shape), "decoder_attention_mask": mask}
        if reads_audio(config):
            return config, {"input_features": torch.rand(self.batch_size, config.num_mel_bins, 40), **decoder}
        ids[:, -1] = config.eos_token_id
        return config, {"input_ids": ids, "attention_mask": mask, **decoder}


class Suite(ModelTesterMixin, GenerationTesterMixin):
    """transformers' tests of some classes of a family in one setting."""

    family: str
    options: dict[str, Any]

    def setUp(self) -> None:
        self.model_tester = ModelInputs(self.family, self.options, is_encoder_decoder=self.is_encoder_decoder)

    def _prepare_for_class(
        self, inputs: dict[str, Any], model_class: Any, return_labels: bool = False
    ) -> dict[str, Any]:
        """Return a class's inputs, and labels for speech recognition too, which the mixin knows not to need any."""
        inputs = super()._prepare_for_class(inputs, model_class, return_labels)
        if return_labels and model_class.main_input_name == "input_features":
            inputs["labels"] = inputs["decoder_input_ids"]
        return inputs


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield kinds of models, settings and attributes of test classes; decoders of models with an encoder are a kind."""
    for family in ("gpt2", "bart", "llama", "whisper"):
        architectures = FAMILIES[family].architectures.items()
        # The suite has no inputs for a model of two heads.
        models = [model for name, (_, model) in architectures if name != "GPT2DoubleHeadsModel"]
        alone = [model for model in models if has_encoder(family) and model.__name__.endswith("ForCausalLM")]
        for setting, options in SETTINGS.items():
            if has_encoder(family) and options["feature_map"] == "none":
                options = {**options, "softmax_cross_layers": [0, 1]}
            attributes: dict[str, Any] = {"family": family, "options": options}
            others = tuple(model for model in models if model not in alone)
            attributes |= {"all_model_classes": others, "is_encoder_decoder": has_encoder(family)}
            yield family.title(), setting, attributes
            if alone:  # without a source there is nothing that cross attention attends to
                attributes = {**attributes, "all_model_classes": tuple(alone), "is_encoder_decoder": False}
                yield f"{family.title()}Decoder", setting, {**attributes, "test_all_params_have_gradient": False}


for _kind, _setting, _attributes in cases():
    _left_out = {
        test: unittest.skip(f"left out: {reason}")(lambda self: None)
        for test, reason in (LEFT_OUT[""] | LEFT_OUT.get(_kind, {})).items()
    }
    globals()[_kind + _setting] = type(_kind + _setting, (Suite, unittest.TestCase), _attributes | _left_out)
