"""Models without features against the softmax model under the mask that they make."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_rfa.models.cache_names import cache_argument


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare tensors in float32."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def assert_same_logits(model: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Compare logits: of whole texts, in pieces, token by token, and with padding on either side."""
    ids = torch.randint(1, 61, (2, 50))
    expected = teacher(ids).logits
    close(model(ids).logits, expected)
    for lengths in ([2, 1, 1, 20, 1, 25], [1] * 50):
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, **cache_argument(cache)).logits for piece in ids.split(lengths, dim=1)]
        close(torch.cat(pieces, dim=1), expected)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :10], mask[1, :3], mask[1, 53:] = 0, 0, 0
    padded = torch.zeros_like(mask).masked_scatter(mask.bool(), ids)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    whole = model(padded, attention_mask=mask, position_ids=positions).logits
    close(whole[mask.bool()].view(2, 50, -1), expected)
    cache = DynamicCache(config=model.config)
    pieces = [
        model(padded[:, :stop][:, start:], attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
              **cache_argument(cache)).logits
        for start, stop in ((0, 4), (4, 5), (5, 30), (30, 60))
    ]  # fmt: skip
    close(torch.cat(pieces, dim=1)[mask.bool()].view(2, 50, -1), expected)


def assert_same_gradients(model: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Compare the gradients of the loss on a text."""
    ids = torch.randint(1, 61, (2, 40))
    gradients = []
    for each in (model, teacher):
        each(ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in each.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-3, atol=1e-5)
