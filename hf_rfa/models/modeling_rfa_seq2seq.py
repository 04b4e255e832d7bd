"""The common part of RFA models with an encoder and a decoder: attention, encoder, decoder, body.

BART and the models that descend from it (Marian, mBART, …) have the same attention, and encoders and decoders that differ in
embeddings and norms only. A family mixes these classes into its own; see `modeling_rfa_bart`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from .attention import RFAAttentionMixin
from .cache_rfa import cross_layer_of, past_length, self_attention_cache, unread_length
from .configuration_rfa import AttentionKind
from .masking import check_positions, local_padding


class RFASeq2SeqAttention(RFAAttentionMixin):
    """Random feature attention for an attention class with ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``.

    ``kind`` says whether it is the decoder's causal or cross attention, or the encoder's.
    """

    num_heads: int
    head_dim: int
    dropout: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, config: Any, *, kind: AttentionKind, layer_idx: int) -> None:
        super().__init__(
            embed_dim=config.d_model,
            num_heads=config.num_heads_for(kind),
            dropout=config.attention_dropout,
            is_decoder=kind != "encoder",
            is_causal=kind == "causal",
            config=config,
            layer_idx=layer_idx,
        )
        self.init_rfa(config, kind=kind, scaling=self.scaling, layer_idx=layer_idx)

    def _split_heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def project_query(self, hidden_states: Tensor) -> Tensor:
        """Return the queries [B, H, T, d] of the layer's input [B, T, width]."""
        return self._split_heads(self.q_proj(hidden_states))

    def project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, S, d] of what is attended to, [B, S, width]."""
        return self._split_heads(self.k_proj(source)), self._split_heads(self.v_proj(source))

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        source_padding_mask: Tensor | None = None,
        output_rfa_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments as for the family's own attention, whose mask is for softmax layers, and these.

        ``padding_mask`` [B, T] and, for cross attention, ``source_padding_mask`` [B, S] are 0 for padding, or None.

        Returns:
            The output [B, T, width], and the weights [B, H, T, T or S], or None without ``output_rfa_attentions``.
        """
        if self.rfa_kind == "cross":
            output, weights = self.attend_to_source(
                hidden_states,
                key_value_states,
                past_key_values=past_key_values,
                padding_mask=source_padding_mask,
                dropout=self.dropout,
                output_attentions=output_rfa_attentions,
            )
        else:
            output, weights = self.attend(
                *self.project(hidden_states),
                hidden_states=hidden_states,
                cache=self_attention_cache(past_key_values),
                padding_mask=padding_mask,
                dropout=self.dropout,
                output_attentions=output_rfa_attentions,
            )
        output = output.transpose(1, 2).reshape(*hidden_states.shape[:2], -1)
        return self.out_proj(output), weights


def _no_mask(device: torch.device) -> Tensor:
    """Return a mask that transformers takes as prepared, so that it builds none of T × T entries: RFA reads none."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


class _RFAStack:
    """The common part of an encoder and a decoder."""

    attention_class: type[RFASeq2SeqAttention]
    #: The attention modules of a layer by name, and the attention that each is.
    kinds: ClassVar[dict[str, AttentionKind]]
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        for index, layer in enumerate(self.layers):  # type: ignore[attr-defined]
            for name, kind in self.kinds.items():
                if config.is_rfa(kind, index):
                    setattr(layer, name, self.attention_class(config, kind=kind, layer_idx=index))
        self.post_init()  # type: ignore[attr-defined]

    def _length(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, torch.device]:
        """Return the number of tokens and their device; without exactly one of the two the parent raises."""
        if input_ids is not None:
            return input_ids.shape[-1], input_ids.device
        if inputs_embeds is None:
            raise ValueError("pass either token ids or embeddings.")
        return inputs_embeds.shape[-2], inputs_embeds.device

    def _wants_weights(self, kwargs: dict[str, Any]) -> bool:
        wanted = kwargs.get("output_attentions")
        return bool(self.config.output_attentions if wanted is None else wanted)


class RFAEncoderMixin(_RFAStack):
    """An encoder whose attention layers but those in ``config.softmax_encoder_layers`` are RFA (bidirectional)."""

    kinds = {"self_attn": "encoder"}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the encoder; arguments and results are those of the family's own.

        Raises:
            ValueError: for a mask per query, or for a source longer than the encoder's positions.
        """
        length, device = self._length(input_ids, inputs_embeds)
        check_positions(length - 1, self.config.max_position_embeddings)
        if self.config.any_rfa("encoder"):
            kwargs["padding_mask"] = local_padding(attention_mask, length)
            kwargs["output_rfa_attentions"] = self._wants_weights(kwargs)
        if not self.config.softmax_layers_for("encoder"):
            attention_mask = _no_mask(device)
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )


class RFADecoderMixin(_RFAStack):
    """A decoder whose causal and cross attention are RFA, but for ``config.softmax_layers`` and ``softmax_cross_layers``."""

    kinds = {"self_attn": "causal", "encoder_attn": "cross"}

    def _prepare_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return a cache for self- and cross attention, each of whose layers is of the kind that the model has there."""
        softmax_layers = self.config.softmax_cross_layers
        if cache is None:
            if not (softmax_layers and (self.config.use_cache if use_cache is None else use_cache)):
                return None  # the family's own forward builds it, if one is wanted
            cache = DynamicCache(config=self.config)
        if not isinstance(cache, EncoderDecoderCache):
            cache = EncoderDecoderCache(cache, DynamicCache(config=self.config))
        for index in range(self.config.decoder_layers):  # before self-attention changes a cache that is refused
            cross_layer_of(cache.cross_attention_cache, index, softmax=index in softmax_layers)
        return cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the decoder; arguments and results are those of the family's own.

        ``output_attentions=True`` returns RFA's weights, [B, H, T, T] and [B, H, T, S].

        Raises:
            ValueError: for a mask per query, or for positions past the model's.
        """
        length, device = self._length(input_ids, inputs_embeds)
        past = past_length(past_key_values)
        check_positions(past + length - 1, self.config.max_position_embeddings)
        kwargs["output_rfa_attentions"] = self._wants_weights(kwargs)
        if isinstance(attention_mask, dict):  # `generate` makes masks by layer type if none of the layers is RFA
            attention_mask = attention_mask["full_attention"]
        if self.config.any_rfa("causal"):
            kwargs["padding_mask"] = local_padding(attention_mask, length + unread_length(past_key_values, self.config))
        if not self.config.softmax_layers_for("causal"):
            attention_mask = _no_mask(device)
        if encoder_hidden_states is not None:
            past_key_values = self._prepare_cache(past_key_values, use_cache)
            finished = isinstance(past_key_values, EncoderDecoderCache) and any(past_key_values.is_updated.values())
            if not finished or kwargs["output_rfa_attentions"]:  # a finished state is read without any mask
                source_length = encoder_hidden_states.shape[1]
                kwargs["source_padding_mask"] = local_padding(encoder_attention_mask, source_length)
            if not self.config.softmax_layers_for("cross"):
                encoder_attention_mask = _no_mask(device)
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class _RFAParts:
    """Replaces parts of a family's model by the classes that class attributes name."""

    #: The parts by the names of the class attributes.
    parts: ClassVar[dict[str, str]]
    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        for attribute, name in self.parts.items():
            setattr(
                self, name, getattr(self, attribute)(self.config)
            )  # which a decoder alone may have copied and changed
        self.post_init()  # type: ignore[attr-defined]


class RFABodyMixin(_RFAParts):
    """An encoder and a decoder, in place of the family's own."""

    parts = {"encoder_class": "encoder", "decoder_class": "decoder"}


class RFADecoderWrapperMixin(_RFAParts):
    """The body of a decoder that stands alone."""

    parts = {"decoder_class": "decoder"}


class RFAHeadMixin(_RFAParts):
    """Gives a head class of a family the RFA body."""

    parts = {"body_class": "model"}
