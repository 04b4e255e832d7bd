"""One decoding step as a function of tensors, for exporters such as `torch.export` and `torch.onnx.export`."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from .errors import InputError
from .models.cache_names import cache_argument
from .models.cache_rfa import RFA_LAYER_TYPE, RFALayer
from .models.configuration_rfa import RFAConfigMixin
from .models.feature_maps import NoFeatures


class DecodingStep(nn.Module):
    """Token, position and states in, logits and states out: a graph with one shape for every position.

        step = DecodingStep(model)
        states = step.states(model(prompt).past_key_values)
        exported = torch.export.export(step, (token, position, states))

    Args:
        model: a decoder with a language-model head, all of whose layers are RFA.

    Raises:
        InputError: for a model with an encoder, or with softmax layers, whose caches grow.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config: Any = model.config
        fits = isinstance(config, RFAConfigMixin) and set(config.cache_layer_types()) == {RFA_LAYER_TYPE}
        if not fits or model.config.is_encoder_decoder:
            raise InputError(
                f"a decoding step of fixed shape needs a decoder whose layers are all RFA, and this is a {config.model_type} "
                "model with an encoder, with softmax layers, or with retrieval heads that see all tokens. Convert all layers "
                "of a decoder, and give retrieval heads a window, all of them (growing_heads=0)."
            )
        self.model = model

    @staticmethod
    def states(cache: Cache) -> list[Tensor]:
        """Return copies of the tensors that a cache holds, layer by layer.

        That is a layer's state [B, H, rows, d + 1] where the model has features, its window [B, H, S + K + W, ·] where it has
        one, and that of retrieval heads where the layer has some.
        """
        return [tensor.clone() for layer in cache.layers for tensor in cast(RFALayer, layer).tensors()]

    def forward(self, token: Tensor, position: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the next token's logits and the states after this one; the states passed in stay as they are.

        Args:
            token: [B, 1].
            position: the token's position in its text, [B, 1].
            states: see `states`.

        Returns:
            The logits [B, 1, vocabulary], and the new states.
        """
        cache = DynamicCache(config=self.model.config)
        config, held = self.model.config, iter(states)
        has_features = config.feature_map != NoFeatures.name
        for index, layer in enumerate(cast(list[RFALayer], cache.layers)):
            layer.lazy_initialization(states[0], states[0])
            if has_features:
                layer.state = next(held).clone()  # a step updates it where it lies
            layer.window_cache = next(held) if config.window_size else None
            layer.retrieval_cache = next(held) if config.retrieval_heads_of(index) else None
        logits = self.model(token, position_ids=position, **cache_argument(cache), use_cache=True).logits
        return logits, [tensor for layer in cache.layers for tensor in cast(RFALayer, layer).tensors()]
