"""RFA-GPT-2: GPT-2 with random feature attention in place of softmax attention.

Every class subclasses transformers' own; every parameter keeps its name and shape, so that a GPT-2 state dict loads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Model, GPT2PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.auto import modeling_auto
from transformers.models.gpt2.modeling_gpt2 import (
    GPT2MLP,
    GPT2Attention,
    GPT2DoubleHeadsModel,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
)

from .attention import RFAAttentionMixin
from .cache_rfa import past_length, self_attention_cache, unread_length
from .configuration_rfa import AttentionKind, RFAGPT2Config
from .masking import check_positions, document_starts, local_padding, padding_of_mask
from .rfa_classes import RFAPreTrainedMixin


class RFAGPT2Attention(RFAAttentionMixin, GPT2Attention):
    """GPT-2's attention, self or cross, with random features."""

    def __init__(self, config: RFAGPT2Config, is_cross_attention: bool = False, layer_idx: int = 0) -> None:
        super().__init__(config, is_cross_attention=is_cross_attention, layer_idx=layer_idx)
        kind: AttentionKind = "cross" if is_cross_attention else "causal"
        self.init_rfa(config, kind=kind, scaling=self.scaling, layer_idx=layer_idx)
        # Set at every call of `RFAGPT2Model`: GPT-2's block hands no further arguments to cross attention.
        self.output_rfa_attentions = False

    def _split_heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def project(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [B, H, T, d], of the layer's input [B, T, width] (self-attention)."""
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        return self._split_heads(query), self._split_heads(key), self._split_heads(value)

    def project_query(self, hidden_states: Tensor) -> Tensor:
        """Return the queries [B, H, T, d] of cross attention."""
        return self._split_heads(self.q_attn(hidden_states))

    def project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, S, d] of cross attention."""
        key, value = self.c_attn(source).split(self.split_size, dim=2)
        return self._split_heads(key), self._split_heads(value)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        document_starts: Tensor | None = None,
        output_rfa_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments as for `GPT2Attention`, whose mask is for softmax layers, and what `RFAGPT2Model` adds.

        ``padding_mask`` is [B, T], 0 for padding, or None; ``encoder_attention_mask`` has any form that `padding_of_mask`
        reads. ``document_starts`` is [B, T], True where a document starts, or None.

        Returns:
            The output [B, T, width], and the weights [B, H, T, T or S], or None if they are not asked for.
        """
        if self.is_cross_attention:
            output, weights = self.attend_to_source(
                hidden_states,
                encoder_hidden_states,
                past_key_values=past_key_values,
                padding_mask=padding_of_mask(encoder_attention_mask),
                dropout=self.attn_dropout.p,
                output_attentions=self.output_rfa_attentions,
            )
        else:
            output, weights = self.attend(
                *self.project(hidden_states),
                hidden_states=hidden_states,
                cache=self_attention_cache(past_key_values),
                padding_mask=padding_mask,
                document_starts=document_starts,
                dropout=self.attn_dropout.p,
                output_attentions=output_rfa_attentions,
            )
        # Heads of width 1 are merged without a copy, and GPT-2's projection views what it gets.
        output = output.transpose(1, 2).reshape(*hidden_states.shape[:2], -1).contiguous()
        return self.resid_dropout(self.c_proj(output)), weights


class RFAGPT2PreTrainedModel(RFAPreTrainedMixin, GPT2PreTrainedModel):
    """Base class of the RFA-GPT-2 models."""

    config: RFAGPT2Config
    config_class = RFAGPT2Config
    _no_split_modules = ["GPT2Block"]


class RFAGPT2Model(RFAGPT2PreTrainedModel, GPT2Model):
    """GPT-2 without a head, its attention layers but those in ``config.softmax_layers`` RFA."""

    def __init__(self, config: RFAGPT2Config) -> None:
        super().__init__(config)
        for index, block in enumerate(self.h):
            if config.is_rfa("causal", index):
                block.attn = RFAGPT2Attention(config, layer_idx=index)
                if config.add_cross_attention:
                    block.crossattention = RFAGPT2Attention(config, is_cross_attention=True, layer_idx=index)
        self.post_init()
        # GPT-2 starts what is added to the residual stream smaller. In classes that are not its own, transformers leaves out
        # modules without parameters of their own, by which it does so.
        for module in self.modules():
            if isinstance(module, (GPT2Attention, GPT2MLP)):
                self._init_weights(module)

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model; arguments and results are those of `GPT2Model`.

        ``output_attentions=True`` returns RFA's weights, [B, H, T, T], at quadratic cost; with a cache
        that has seen tokens before, the columns are those of this call's tokens.

        Without a mask and a cache, ``position_ids`` that do not go on by one start a new document, which sees nothing of
        those before it in its row: packed batches, as transformers' softmax models take them.

        Raises:
            ValueError: for a mask per query, or for positions past the learned ones.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("pass either input_ids or inputs_embeds, and not both.")
        length = inputs.shape[-1] if input_ids is not None else inputs.shape[-2]
        past = past_length(past_key_values)
        last = past + length - 1
        if last >= self.config.n_positions and position_ids is not None:
            last = int(position_ids.max())  # left padding makes positions smaller than the number of tokens
        check_positions(last, self.config.n_positions)

        if attention_mask is not None and attention_mask.ndim == 3:  # (batch, choices, tokens) of multiple choice
            attention_mask = attention_mask.view(-1, attention_mask.shape[-1])
        padding_mask = local_padding(attention_mask, length + unread_length(past_key_values, self.config))
        starts = document_starts(position_ids) if attention_mask is None and past_key_values is None else None
        if starts is not None:
            use_cache = False  # rows of several documents are for training; softmax layers keep them apart only so
        if not self.config.softmax_layers:
            # No layer reads a causal mask. Handing over a prepared one keeps transformers from building T × T entries.
            attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.device)
            if encoder_attention_mask is not None and encoder_attention_mask.ndim == 2:
                encoder_attention_mask = encoder_attention_mask[:, None, None, :] != 0

        output_weights = kwargs.get("output_attentions")
        if output_weights is None:
            output_weights = self.config.output_attentions
        for block in self.h:
            if isinstance(cross_attention := getattr(block, "crossattention", None), RFAGPT2Attention):
                cross_attention.output_rfa_attentions = bool(output_weights)
        return super().forward(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            padding_mask=padding_mask,
            document_starts=starts,
            output_rfa_attentions=bool(output_weights),
            **kwargs,
        )


class _RFAGPT2Head(RFAGPT2PreTrainedModel):
    """Gives a head class of GPT-2 the RFA body."""

    def __init__(self, config: RFAGPT2Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.transformer = RFAGPT2Model(config)
        self.post_init()


class RFAGPT2LMHeadModel(_RFAGPT2Head, GPT2LMHeadModel):  # type: ignore[misc]
    """RFA-GPT-2 with a language-modelling head."""

    def __init__(self, config: RFAGPT2Config) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"


class RFAGPT2DoubleHeadsModel(_RFAGPT2Head, GPT2DoubleHeadsModel):  # type: ignore[misc]
    """RFA-GPT-2 with a language-modelling and a multiple-choice head."""


class RFAGPT2ForSequenceClassification(_RFAGPT2Head, GPT2ForSequenceClassification):  # type: ignore[misc]
    """RFA-GPT-2 that classifies sequences by their last token."""


class RFAGPT2ForTokenClassification(_RFAGPT2Head, GPT2ForTokenClassification):  # type: ignore[misc]
    """RFA-GPT-2 that classifies every token."""


class RFAGPT2ForQuestionAnswering(_RFAGPT2Head, GPT2ForQuestionAnswering):  # type: ignore[misc]
    """RFA-GPT-2 that marks the span of an answer."""


# Trainer, transformers serve and lm-eval tell language models by these tables of names.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["rfa_gpt2"] = "RFAGPT2LMHeadModel"
