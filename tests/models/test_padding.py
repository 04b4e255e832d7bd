"""Padding neither enters nor decays a state, wherever it is and whatever it holds; masks per query are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_rfa.families import has_rotary_positions
from hf_rfa.models.cache_names import cache_argument
from tests.decoders import converted, parent
from tests.families import (
    LENGTH,
    ROWS,
    SOURCE_LENGTH,
    WIDTH,
    every_decoder_case,
    every_family,
    every_seq2seq_case,
    has_encoder,
    logits,
    make,
    read,
    relative_error,
    rfa_modules,
    source,
    tokens,
)

#: Masks that say the same of every token, by what they are made of; the last as packing code numbers documents.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": Tensor.bool,
    "float": Tensor.float,
    "bfloat16": Tensor.bfloat16,
    "numbers": lambda mask: mask * (1 + torch.arange(mask.shape[1]) * 3 // mask.shape[1]),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


@torch.no_grad()
@every_decoder_case
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_pads_neither_enter_nor_decay_the_state(family, variant, side):
    """Batched output equals single output, whatever the padding holds and wherever it is."""
    model, ids = make(family, variant), tokens()
    mask = torch.ones_like(ids)
    for row, length in enumerate([LENGTH, 17, 4]):
        first = {"left": 0, "right": length, "inside": length // 2}[side]
        mask[row, first : first + LENGTH - length] = 0
    kept = mask.bool()
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    found = model(ids, use_cache=False, **options).logits
    other = model(torch.where(kept, ids, (ids + 7) % 61), use_cache=False, **options).logits
    assert_close(other[kept], found[kept])
    assert torch.isfinite(found).all()
    for row in range(ROWS):
        single = logits(model, ids[row : row + 1, kept[row]])
        assert_close(found[row, kept[row]], single[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "variant"), [("gpt2", "window-gate"), ("gpt2", "mlp"), ("llama", "slots-gate"), ("llama", "retrieval")]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_are_those_of_the_text_without_padding(family, variant, side):
    """In a batch of one, whose mask some models pass over."""
    model, ids = make(family, variant, dtype=torch.float64), tokens(1)
    weights, pads = torch.randn(1, LENGTH, 61), torch.full((1, 7), 9)
    padded = torch.cat([pads, ids] if side == "left" else [ids, pads], dim=1)
    mask = torch.ones_like(padded)
    mask[:, slice(7) if side == "left" else slice(LENGTH, None)] = 0
    found = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), use_cache=False).logits
    names, parameters = zip(*model.named_parameters(), strict=True)
    losses = (found[mask.bool()][None] * weights).sum(), (model(ids, use_cache=False).logits * weights).sum()
    padded_gradients, gradients = (torch.autograd.grad(loss, parameters) for loss in losses)
    for name, gradient, expected in zip(names, padded_gradients, gradients, strict=True):
        assert_close(gradient, expected, atol=1e-8, rtol=1e-6, msg=name)


@every_seq2seq_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_source_is_not_seen(family, variant, side):
    """Batched output equals single output for sources of different lengths."""
    model, ids, given = make(family, variant), tokens(), source(side=side)
    found, kept = logits(model, ids, **given), given["attention_mask"].bool()
    other_pads = torch.where(kept, given["input_ids"], (given["input_ids"] + 5) % 61)
    assert_close(logits(model, ids, **{**given, "input_ids": other_pads}), found, atol=1e-5, rtol=1e-5)
    for row in range(ROWS if side == "right" else 0):  # positions count padding: on the left it gives another input
        alone = {"input_ids": given["input_ids"][row : row + 1, kept[row]], "attention_mask": None}
        assert_close(found[row : row + 1], logits(model, ids[row : row + 1], **alone), atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_padding_of_choices():
    model, ids = make("gpt2", "positive", head="GPT2DoubleHeadsModel"), tokens()
    choices = torch.stack([ids, ids.flip(0)], dim=1)
    mask = torch.ones_like(choices)
    mask[0, 0, 20:] = 0
    output = model(choices, attention_mask=mask, mc_token_ids=torch.full((ROWS, 2), 10))
    single = model(ids[:1, :20][:, None], mc_token_ids=torch.tensor([[10]]))
    assert output.logits.shape == (ROWS, 2, LENGTH, 61)
    assert_close(output.logits[0, 0, :20], single.logits[0, 0], atol=1e-4, rtol=1e-4)
    assert_close(output.mc_logits[0, 0], single.mc_logits[0, 0], atol=1e-4, rtol=1e-4)


@every_kind
@pytest.mark.parametrize(
    ("family", "variant"), [("gpt2", "hybrid"), ("llama", "hybrid"), ("bart", "per-layer"), ("marian", "per-layer")]
)
def test_what_is_not_zero_is_a_token(family, variant, kind):
    """Of a model with RFA layers of every kind and softmax layers, its source too."""
    model, ids, given = make(family, variant), tokens(), source(side="left")
    mask = torch.ones_like(ids)
    mask[1, :11] = mask[2, 20:] = 0
    if not has_encoder(family):
        found, expected = (logits(model, ids, mask=each) for each in (KINDS[kind](mask), mask))
    else:
        others = {**given, "attention_mask": KINDS[kind](given["attention_mask"])}
        found, expected = (
            logits(model, ids, mask=each, **sources) for each, sources in ((KINDS[kind](mask), others), (mask, given))
        )
    assert torch.equal(found, expected)


@torch.no_grad()
@every_kind
@pytest.mark.parametrize("name", ["llama", "opt", "stablelm"])
def test_positions_are_those_of_the_base_model_whatever_a_mask_is_made_of(name, kind):
    """Past 256 tokens too, where a count in 16 bits is rounded."""
    softmax = parent(name, max_position_embeddings=400)
    model = converted(softmax, feature_map="none", window_size=300)
    ids = tokens(2, 300)
    mask = torch.ones_like(ids)
    mask[1, 290:] = 0
    found, expected = logits(model, ids, mask=KINDS[kind](mask)), logits(softmax, ids, mask=mask)
    assert relative_error(found[mask > 0], expected[mask > 0]) < 1e-5


@torch.no_grad()
@every_family
def test_masks_per_query_are_refused(family):
    model, ids = make(family, {} if not has_encoder(family) else "everything"), tokens()
    with pytest.raises(ValueError, match="softmax_layers"):
        read(model, ids, mask=torch.ones(ROWS, 1, LENGTH, LENGTH))
    if model.config.is_encoder_decoder:
        with pytest.raises(ValueError, match="softmax_layers"):
            read(model, ids, attention_mask=torch.ones(ROWS, 1, SOURCE_LENGTH, SOURCE_LENGTH))
        cross = next(module for name, module in rfa_modules(model).items() if "encoder_attn" in name)
        with pytest.raises(ValueError, match="encoder_hidden_states"):
            cross(torch.zeros(1, 1, WIDTH), output_rfa_attentions=False)


@torch.no_grad()
@every_family
def test_positions_past_the_table_are_refused(family):
    """So are rotary ones past the trained length, beside features; where all that is kept are tokens, there is no end."""
    model, too_many = make(family, {}), torch.full((1, 97), 5)
    if has_rotary_positions(model.config):
        assert torch.isfinite(read(make(family, "slots"), too_many).logits).all()
    with pytest.raises(ValueError, match=r"position 96.*96 positions.*--max-positions 97"):
        read(model, too_many)
    cache = read(model, too_many[:, :96]).past_key_values
    with pytest.raises(ValueError, match="--max-positions"):
        read(model, too_many[:, :1], **cache_argument(cache))
    if model.config.is_encoder_decoder:
        with pytest.raises(ValueError, match=r"position 96.*96 positions.*--max-positions 97"):
            model(too_many, decoder_input_ids=too_many[:, :5])
    else:
        padded = torch.arange(100).clamp_max(95)[None]  # more tokens than positions, none past the table
        assert torch.isfinite(model(torch.ones(1, 100, dtype=torch.long), position_ids=padded).logits).all()
