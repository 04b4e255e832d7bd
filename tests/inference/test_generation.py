"""`generate` on every family: against loops over full forward passes, and in every cell of the table in the docs."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import StoppingCriteria, StoppingCriteriaList, set_seed

from hf_rfa.models.cache_names import cache_argument
from tests.conftest import ROOT
from tests.families import FAMILIES, has_encoder, logits, make, softmax_model, tokens

DECODERS = ["positive-gate", "gaussian-paper", "hybrid", "retrieval", "window-gate"]
TRANSLATORS = ["both-gate", "paper", "causal-only", "everything", "per-layer"]
DECODER_CASES = [("gpt2", variant) for variant in DECODERS]
BART_CASES = [("bart", variant) for variant in TRANSLATORS]
#: Marian differs from BART in embeddings and norms only.
CASES = [*DECODER_CASES, *BART_CASES, ("marian", "both-gate")]
ALONE = [("bart", "decoder-alone"), ("marian", "decoder-alone")]
#: Lengths of the prompts of a decoder, or of the sources of an encoder.
LENGTHS = (11, 3, 1, 7)


def long(family: str, variant: Any, dtype: torch.dtype = torch.float64, positions: int = 300, **options: Any) -> Any:
    """Return a model with positions for long texts."""
    return make(family, variant, dtype=dtype, **{FAMILIES[family].positions_field: positions}, **options)


def prompt_for(family: str) -> Tensor:
    """Return a decoder's prompt, or an encoder's sources."""
    return tokens(1, 7) if not has_encoder(family) else tokens(2, 9)


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    """Generate from a prompt, or from sources, without an end-of-text token, so that lengths are known."""
    options = {"eos_token_id": None, "pad_token_id": 1, "do_sample": False, **options}
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, **options)


@pytest.mark.parametrize(("family", "variant"), CASES + ALONE)
def test_greedy_is_the_argmax_of_a_full_forward(family, variant):
    """Every token is the one that the text before it makes most likely, without a cache; a static cache changes none."""
    model, ids, count = long(family, variant), prompt_for(family), 100 if not has_encoder(family) else 40
    written = generate(model, ids, max_new_tokens=count)
    first, sources = ids, {}
    if model.config.is_encoder_decoder:
        first = torch.full((len(ids), 1), model.config.decoder_start_token_id)
        sources = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(written[:, :-count], first)
    assert torch.equal(logits(model, written[:, :-1], **sources)[:, -count:].argmax(-1), written[:, -count:])
    static = generate(model, ids, max_new_tokens=30, cache_implementation="static")
    assert torch.equal(static, written[:, : static.shape[1]])


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_beams_find_what_they_find_without_a_cache(family, variant):
    """States are reordered with their beams, and the beams of each of several sources read its one state.

    Without an end, and with ends that finish hypotheses at different lengths: tokens that beams do come to.
    """
    model, ids, count = long(family, variant), prompt_for(family), 15 if not has_encoder(family) else 12
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": count, "early_stopping": False}
    free = generate(model, ids, **options)
    for cache in ({"use_cache": False}, {"cache_implementation": "static"}):
        assert torch.equal(free, generate(model, ids, **options, **cache))
    for eos in free[0, -count + 1 : -1 : 6].tolist():
        ended = generate(model, ids, **options, eos_token_id=eos)
        assert not torch.equal(ended, free)
        assert torch.equal(ended, generate(model, ids, **options, eos_token_id=eos, use_cache=False))


BATCHES = [*((*case, 1) for case in (*DECODER_CASES, *BART_CASES)), *((*case, 4) for case in BART_CASES)]


@pytest.mark.parametrize(("family", "variant", "beams"), BATCHES)
def test_batches_of_mixed_lengths_equal_single_runs(family, variant, beams):
    """Prompts are padded on the left, sources on the right."""
    model, texts = long(family, variant), [tokens(1, length) for length in LENGTHS]
    batch, mask = torch.ones(len(texts), max(LENGTHS), dtype=torch.long), torch.zeros(len(texts), max(LENGTHS)).long()
    for row, ids in enumerate(texts):
        place = slice(max(LENGTHS) - ids.shape[1], None) if not has_encoder(family) else slice(ids.shape[1])
        batch[row, place], mask[row, place] = ids[0], 1
    options = {"max_new_tokens": 20, "num_beams": beams}
    found = generate(model, batch, attention_mask=mask, **options)
    for row, ids in enumerate(texts):
        alone = generate(model, ids, **options)[0]
        assert torch.equal(found[row, -20:], alone[-20:])


@torch.no_grad()
@pytest.mark.parametrize(("family", "variant"), [("gpt2", "positive-gate"), ("gpt2", "hybrid"), ("bart", "both-gate")])
def test_a_cache_handed_back_continues_the_text_and_copies_of_it_fork(family, variant):
    """A prompt, or sources, and two continuations."""
    model, ids = long(family, variant), prompt_for(family)
    name, sources = ("input_ids", {}) if not has_encoder(family) else ("decoder_input_ids", {"input_ids": ids})
    first = generate(model, ids, max_new_tokens=15, return_dict_in_generate=True)
    cache = cache_argument(first.past_key_values)
    for token in (5, 8):
        longer = torch.cat([first.sequences, torch.full((len(ids), 1), token)], dim=1)
        # by this mask transformers sees that the tokens hold those that the cache has seen
        options = {name: longer, name.replace("input_ids", "attention_mask"): torch.ones_like(longer), **sources}
        options |= {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        assert torch.equal(model.generate(**options, **copy.deepcopy(cache)), model.generate(**options))


def test_chunked_prefill():
    model, ids = long("gpt2", "positive-gate"), tokens(2, 21)
    expected = generate(model, ids, max_new_tokens=10)
    assert torch.equal(generate(model, ids, max_new_tokens=10, prefill_chunk_size=4), expected)


# What docs/guide.md says of generating


class Ends(StoppingCriteria):
    """Stops once there are a number of tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 9)


WARPERS = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.98, "epsilon_cutoff": 1e-4}
WARPERS |= {"eta_cutoff": 1e-4, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
FORCED = {"bad_words_ids": [[7], [9, 3]], "suppress_tokens": [11], "forced_bos_token_id": 7, "forced_eos_token_id": 2}
FORCED |= {"min_length": 11}
#: Options of a cell, by a name that the guide has.
CELLS: dict[str, dict[str, Any]] = {
    "greedy search": {},
    "sampling": {"do_sample": True},
    "sampling with all warpers": {"do_sample": True, **WARPERS},
    "beam search": {"num_beams": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "length penalty, early stopping": {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True},
    "several answers": {"num_beams": 4, "num_return_sequences": 3},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "bad words, forced and suppressed tokens": FORCED,
    "stopping criteria": {"stopping_criteria": StoppingCriteriaList([Ends()])},
    "scores and logits": {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    "a dynamic cache": {"cache_implementation": "dynamic"},
    "a static cache": {"cache_implementation": "static"},
    "an offloaded cache": {"cache_implementation": "offloaded"},
    "an offloaded, static cache": {"cache_implementation": "offloaded_static"},
    "classifier-free guidance": {"guidance_scale": 1.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "an assistant": {"assistant_model": "itself"},
}
#: Cells that one of the families does not have, with the reason.
ABSENT = {("bart", "classifier-free guidance"): "softmax BART too answers otherwise with a cache than without one"}
#: Options that change how tokens are found, and not which.
SPECULATIVE = ("prompt_lookup_num_tokens", "assistant_model")
SHARED = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1}
SPECIAL = {"eos_token_id": 2, "pad_token_id": 1}


@functools.cache
def model_of_cells(family: str) -> Any:
    return make(
        family, {"num_features": 8, "gate": not has_encoder(family)}, **(SPECIAL if not has_encoder(family) else {})
    )


def inputs_of_cells(family: str, rows: int) -> dict[str, Tensor]:
    """Return inputs padded on the left for a decoder, on the right for an encoder."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 2], [1, 1, 12, 13, 14, 15, 2]])[:rows]
    ids = ids if not has_encoder(family) else ids.flip(1).clone()
    return {"input_ids": ids, "attention_mask": (ids != 1).long()}


@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_a_cell_is_the_same_without_a_cache(family, cell):
    if (family, cell) in ABSENT:
        pytest.skip(ABSENT[family, cell])
    if "offloaded" in cell and not torch.cuda.is_available():
        pytest.skip("transformers offloads caches from accelerators only")
    model, options = model_of_cells(family), dict(CELLS[cell])
    inputs = inputs_of_cells(family, rows=1 if cell in ("prompt lookup", "an assistant") else 2)
    if cell == "prompt lookup":
        base = softmax_model(model, family, **SPECIAL)
        plain, looked_up = (base.generate(**inputs, **SHARED, **each) for each in ({}, options))
        if not torch.equal(plain, looked_up):
            pytest.skip(
                "the prompt lookup of this transformers ends at an end token in the prompt, in softmax models too"
            )
    if "assistant_model" in options:
        options["assistant_model"] = copy.deepcopy(model)
    plain_options = {k: v for k, v in options.items() if k not in ("cache_implementation", *SPECULATIVE)}
    set_seed(3)
    expected = model.generate(**inputs, **{**SHARED, **plain_options, "use_cache": False})
    set_seed(3)
    found = model.generate(**inputs, **{**SHARED, **options})
    assert torch.equal(*(getattr(each, "sequences", each) for each in (found, expected)))
    if options.get("return_dict_in_generate"):
        for name in ("scores", "logits"):
            assert_close(getattr(found, name), getattr(expected, name), atol=1e-4, rtol=1e-4)


def test_every_cell_stands_in_the_docs():
    page = " ".join((ROOT / "docs" / "guide.md").read_text().lower().split())
    for cell in [*CELLS, "streaming"]:
        assert cell in page, cell


def test_continuous_batching_is_refused_before_it_starts():
    model = make("llama", {"feature_map": "none", "window_size": 3})
    with pytest.raises(ValueError, match="RFA models have a memory of one size"):
        model.generate_batch([[5, 6, 7]])
