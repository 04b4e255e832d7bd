"""Whether a language model keeps the documents of a packed row apart."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from hf_rfa.models.configuration_rfa import RFAConfigMixin

#: Most tokens of the documents that are tried.
TRIED_TOKENS = 8
#: Largest relative difference of logits that is rounding; what a document before it changes is a hundred times as much.
ROUNDING = 1e-3


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether each document of a row, whose ``position_ids`` restart there, sees nothing of those before it.

    RFA models say so by their layers. Softmax models are tried on two documents: some take no positions, some read them for
    embeddings alone, and convolutions and recurrences do not read them.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    config = model.config
    if isinstance(config, RFAConfigMixin):
        return not config.types_that_read_on()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.get_text_config().vocab_size, (1, 2 * TRIED_TOKENS), generator=generator)
    ids = ids.to(model.device)
    positions = torch.arange(TRIED_TOKENS, device=model.device).repeat(1, 2)
    was_training = model.training
    model.eval()
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, TRIED_TOKENS:]
    alone = model(input_ids=ids[:, TRIED_TOKENS:], use_cache=False).logits
    model.train(was_training)
    return bool((packed - alone).norm() < ROUNDING * alone.norm())
