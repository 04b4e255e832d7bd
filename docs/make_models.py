"""Writes docs/models.md: every causal language model of the installed transformers, supported or refused and why.

Run it as ``python -m docs.make_models`` in the repository, with the newest transformers that hf-rfa supports. Each model is
built in a tiny shape (tests/tiny_models.py), given random features next to a window as long as the text, and compared with
its base model: what is supported has the same logits, with and without padding, and generates the same tokens.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, logging

from hf_rfa.families import DECODERS, FAMILIES, Family, family_of
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin
from hf_rfa.models.modeling_rfa_decoder import rfa_model_class
from tests.tiny_models import UNBUILDABLE, model_class, model_types, tiny_config, tiny_model

PAGE = Path(__file__).with_name("models.md")
#: Largest difference of logits relative to the largest logit, in float32.
TOLERANCE = 1e-5
WINDOW, LENGTH, PADDING, NEW_TOKENS = 40, 30, 7, 6

OUTSIDE = "its attention does not go through transformers' attention interface"
NO_ATTENTION = "it has no softmax attention"
LATENT = "latent attention: values of another width than keys"
ENCODER = "an encoder, which a decoder's head makes a language model"
SPARSE = "keys are selected by an index"
SHARED = "layers share keys and values"
COMPOSITE = "text and images or audio"
#: Reasons that no error tells: of models that would convert into something else, or that no one has checked.
REASONS = {
    **dict.fromkeys(("bloom", "cpmant", "mpt", "falcon", "gpt_neo", "xglm", "openai-gpt"), OUTSIDE),
    **dict.fromkeys(
        ("git", "big_bird", "megatron-bert", "prophetnet", "reformer", "rembert", "roformer", "trocr"), OUTSIDE
    ),
    **dict.fromkeys(("xlm", "xlnet", "mvp", "gpt_neox_japanese"), OUTSIDE),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), NO_ATTENTION),
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta"), ENCODER),
    **dict.fromkeys(("roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"), ENCODER),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"), LATENT
    ),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "mimo_v2_flash"), LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"), SPARSE),
    **dict.fromkeys(("minimax_m3_vl_text", "qwen4_exp", "qwen4_exp_text", "doge", "deepseek_v4"), SPARSE),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text", "zamba", "zamba2"), SHARED),
    **dict.fromkeys(("fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "mllama", "phi4_multimodal"), COMPOSITE),
    "moss_transcribe_diarize": COMPOSITE,
    "laguna": "its layers have different numbers of heads",
    "llama4_text": "chunked attention, whose masks next to RFA layers are not made yet",
    "zaya": "its attention mixes tokens before it compares them",
    "minimax": "its models build a cache of their own",
    "diffllama": "two attentions a layer, one subtracted from the other",
    "falcon_h1": "attention and a state-space model in the same layer share a cache",
    **dict.fromkeys(
        ("codegen", "gptj"), "its attention goes through transformers' attention interface from 5.24 on alone"
    ),
    **dict.fromkeys(("dory", "hrm_text"), "its layers run several times a token"),
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_loop_text"), "a bias of positions is added to the logits"
    ),
    "lara_mini": "recurrent layers by types whose masks next to RFA layers are not made yet",
    "lfm3": "its layer types have no masks of the usual names",
    "recurrent_gemma": "its attention sees a sliding window: its cache does not grow",
    "blt": "several stacks over bytes and patches",
    "ctrl": "its attention takes the layer's input three times",
    "jetmoe": "experts have key-value heads of their own",
    "moshi": "several streams of audio tokens",
    "musicgen": "several streams of audio tokens",
    "musicgen_melody": "several streams of audio tokens",
}
UNCHECKED = "not checked"


def problem(model_type: str) -> str | None:
    """Return why a model is not supported, or None if it is.

    Raises:
        AssertionError: if a model of `DECODERS` differs from its base model.
    """
    if model_type in UNBUILDABLE:
        return UNBUILDABLE[model_type]
    if model_type in DECODERS:
        check(model_type)
        return None
    if model_type in FAMILIES:  # tests of their own
        return None
    if model_type in REASONS:
        return REASONS[model_type]
    config_class: Any = model_class(model_type).config_class
    if config_class.model_type != model_type:
        return f"it is loaded as a model of type {config_class.model_type}"
    if CONFIG_MAPPING[model_type].is_encoder_decoder:
        return "an encoder and a decoder of a family that is not declared"
    return UNCHECKED


def check(model_type: str) -> None:
    """Compare the RFA model of a decoder with its base model where the window covers the text; an AssertionError says how."""
    capped: dict[str, Any] = (
        {"attn_logit_softcapping": None} if hasattr(tiny_config(model_type), "attn_logit_softcapping") else {}
    )
    base: Any = tiny_model(model_type, **capped)
    config: Any = family_of(model_type).rfa_config.from_base(base.config, window_size=WINDOW, num_features=16)
    model: Any = rfa_model_class(type(base))(config).eval()
    model.load_state_dict(base.state_dict(), strict=False)
    layers = sum(isinstance(module, RFAAttentionMixin) for module in model.modules())
    assert layers == config.cache_layer_types().count("rfa") > 0, f"{model_type}: {layers} RFA layers"
    ids = torch.randint(3, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    taken = inspect.signature(base.forward).parameters
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}):
            options = {name: each for name, each in options.items() if name in taken}
            found, expected = (each(ids, use_cache=False, **options).logits for each in (model, base))
            error = ((found - expected).abs() * mask[..., None]).max() / expected.abs().max()
            assert error <= TOLERANCE, f"{model_type}: logits differ by {error:.1e}"
    answers = [
        each.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            pad_token_id=0,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )
        for each in (model, base)
    ]
    assert torch.equal(*answers), f"{model_type}: other tokens"


def page(problems: dict[str, str | None]) -> str:
    """Return the text of docs/models.md."""
    encoders = sorted(name for name, each in FAMILIES.items() if issubclass(each.rfa_config, RFASeq2SeqConfigMixin))
    lines = [
        "# Models",
        "",
        "Written by `python -m docs.make_models`, which builds every causal language model of transformers in a tiny shape,",
        "converts it, and compares it with its base model where a window covers the text. Do not edit.",
        f"transformers {transformers.__version__} has {len(problems)} model types of causal language models.",
        "",
        "## Supported decoders",
        "",
        "Layers with attention to all tokens become RFA. Layers of other types stay as they are: their caches do not grow.",
        "",
        "| model_type | heads that come along | layers that stay, in the default configuration |",
        "| --- | --- | --- |",
    ]
    for name in sorted(
        name for name in FAMILIES if name in problems and problems[name] is None and name not in encoders
    ):
        family = FAMILIES[name]
        config = tiny_config(name)
        types = family.rfa_config.from_base(config, **_uncapped(config)).cache_layer_types()
        lines.append(f"| {name} | {_heads(family)} | {', '.join(sorted({each for each in types if each != 'rfa'}))} |")
    lines += ["", "## Supported encoder-decoder families", ""]
    lines += ["NLLB's checkpoints are of type m2m_100. Whisper's encoder reads audio.", ""]
    lines += ["| model_type | heads that come along |", "| --- | --- |"]
    lines += [f"| {name} | {_heads(FAMILIES[name])} |" for name in encoders]
    lines += ["", "## Not supported", "", "| reason | model_type |", "| --- | --- |"]
    by_reason: dict[str, list[str]] = {}
    for name, reason in problems.items():
        if reason is not None:
            by_reason.setdefault(reason, []).append(name)
    lines += [f"| {reason} | {', '.join(sorted(names))} |" for reason, names in sorted(by_reason.items())]
    lines += [
        "",
        "Refused as well: capped logits (`attn_logit_softcapping`), quantized checkpoints, and models with a sliding",
        "window in every layer, where nothing grows.",
    ]
    return "\n".join(lines) + "\n"


def _heads(family: Family) -> str:
    """Return the heads of a family's models, by the ends of their names."""
    prefix = family.base_config.__name__.removesuffix("Config")
    names = (name.partition("For")[2] or name.removeprefix(prefix) for name in family.architectures)
    return ", ".join(sorted({each for each in names if each != "Model"}))


def _uncapped(config: Any) -> dict[str, Any]:
    fields = {"attn_logit_softcapping": None} if hasattr(config, "attn_logit_softcapping") else {}
    return fields | {"window_size": WINDOW}


if __name__ == "__main__":
    logging.set_verbosity_error()
    PAGE.write_text(page({name: problem(name) for name in model_types()}), encoding="utf-8")
