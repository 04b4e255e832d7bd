"""One decoding step as a function of tensors, for exporters such as `torch.export` and `torch.onnx.export`."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from ..errors import InputError
from ..models.attention import RFAAttentionMixin
from ..models.cache_names import cache_argument
from ..models.cache_rfa import RFA_LAYER_TYPE, RFALayer
from ..models.configuration_rfa import RFAConfigMixin
from ..models.streaming import prepare_step


def check_shapes(config: Any) -> None:
    """Raise an `InputError` unless a configuration is of a decoder all of whose caches have one shape."""
    fits = isinstance(config, RFAConfigMixin) and set(config.cache_layer_types()) == {RFA_LAYER_TYPE}
    if not fits or config.is_encoder_decoder:
        raise InputError(
            f"a decoding step of fixed shape needs a decoder whose layers are all RFA, and this is a {config.model_type} "
            "model with an encoder or with softmax layers. Convert all layers of a decoder."
        )


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
        check_shapes(model.config)
        self.model = model

    @staticmethod
    def states(cache: Cache) -> list[Tensor]:
        """Return copies of the tensors that a cache holds, layer by layer (`hf_rfa.models.memory.Memory`)."""
        return [tensor.clone() for tensor in DecodingStep._tensors(cache)]

    def forward(self, token: Tensor, position: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the next token's logits and the states after this one; the states passed in stay as they are.

        Args:
            token: [B, 1].
            position: the token's position in its text, [B, 1].
            states: see `states`.

        Returns:
            The logits [B, 1, vocabulary], and the new states.
        """
        cache = self._cache_of(states)
        logits = self.model(token, position_ids=position, **cache_argument(cache), use_cache=True).logits
        return logits, self._tensors(cache)

    def moved(self, states: list[Tensor]) -> list[Tensor]:
        """Return the states with old tokens where the next token's epoch has them (`hf_rfa.models.positions`).

        A graph does not do so by itself: ask before every step of a text that may be longer than L. Mostly nothing moves.
        """
        cache = self._cache_of(states)
        if self.model.config.streams():
            prepare_step(self.model.rfa_stacks[0], cache)
        return self._tensors(cache)

    @staticmethod
    def _tensors(cache: Cache) -> list[Tensor]:
        return [tensor for layer in cache.layers for tensor in cast(RFALayer, layer).tensors().values()]

    def _cache_of(self, states: list[Tensor]) -> Cache:
        """Return a cache that holds copies of states."""
        cache, remaining = DynamicCache(config=self.model.config), iter(states)
        attention = {
            layer.rfa_layer_idx: layer for layer in self.model.modules() if isinstance(layer, RFAAttentionMixin)
        }
        for index, layer in enumerate(cast(list[RFALayer], cache.layers)):
            layouts = enumerate(attention[index].memory_layouts(self.model.dtype))
            names = [f"{number}.{name}" for number, layout in layouts for name in layout.tensors()]
            # Of the length positions alone would know, which are given. A step updates tensors where they lie.
            layer.restore({name: next(remaining).clone() for name in names}, 0)
        return cache
