"""RFA models with an encoder and a decoder: BART, and the models whose encoders, decoders and attention are built as its are.

Such families (Marian, mBART, Pegasus, M2M100, Whisper, …) differ in embeddings, norms and inputs, which stay as they are.

Classes are made by name when they are asked for: ``RFABartForConditionalGeneration`` from transformers'
``BartForConditionalGeneration``. A model is built as its base model first; then its parts become RFA by their class.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.utils.import_utils import is_tracing

from .attention import rfa_layers
from .attention_seq2seq import RFASeq2SeqAttentionMixin
from .cache_names import CACHE_NAME, cache_name, take_cache
from .cache_rfa import self_attention_cache
from .cache_rfa_seq2seq import cross_layer_of
from .configuration_rfa import AttentionKind
from .configuration_rfa_seq2seq import seq2seq_config_class
from .masking import check_direction, check_one_document, check_positions, document_starts, local_padding, read_mask
from .merged_attention import MergedCrossAttention, merged_attention_class
from .rfa_classes import (
    RFAPreTrainedMixin,
    StackCall,
    base_class,
    before_calls,
    make_class,
    make_model_class,
    prepare_calls,
    unread_mask,
)

#: The attention modules of a layer by name, and the attention that each is.
DECODER_KINDS: dict[str, AttentionKind] = {"self_attn": "causal", "encoder_attn": "cross"}
ENCODER_KINDS: dict[str, AttentionKind] = {"self_attn": "encoder"}


class RFASeq2SeqAttention(RFASeq2SeqAttentionMixin):
    """Attention to a memory of fixed size for a class with ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``."""

    num_heads: int
    head_dim: int
    dropout: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def become_rfa(self, config: Any, kind: AttentionKind, layer_idx: int) -> None:
        """Add feature map and gate to a module that was built as the base model's.

        ``kind`` says whether it is the decoder's causal or cross attention, or the encoder's.
        """
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
        *,
        padding_mask: Tensor | None = None,
        source_padding_mask: Tensor | None = None,
        output_rfa_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments as for the family's own attention, whose mask is for softmax layers, and these.

        ``padding_mask`` [B, T] and, for cross attention, ``source_padding_mask`` [B, S] are 0 for padding, or None.

        Returns:
            The output [B, T, width], and the weights [B, H, T, T or S], or None without ``output_rfa_attentions``.

        Raises:
            ValueError: if the layer around it leaves these arguments out, and with them padding.
            TypeError: for a cache under a name that is none of a cache's.
        """
        cache = take_cache(kwargs)
        if output_rfa_attentions is None:
            raise ValueError(
                f"the layer hands no keyword arguments on to its {type(self).__name__.removeprefix('RFA')}, so that padding "
                "does not arrive there: this family is not supported."
            )
        if self.rfa_kind == "cross":
            output, weights = self.attend_to_source(
                hidden_states,
                key_value_states,
                past_key_values=cache,
                padding_mask=source_padding_mask,
                dropout=self.dropout,
                output_attentions=output_rfa_attentions,
            )
        elif self.rfa_kind == "encoder":
            output, _, weights = self.attend_to_all(
                *self.project(hidden_states),
                padding_mask=padding_mask,
                dropout=self.dropout,
                output_attentions=output_rfa_attentions,
            )
        else:
            output, weights = self.attend(
                *self.project(hidden_states),
                hidden_states=hidden_states,
                cache=self_attention_cache(cache),
                padding_mask=padding_mask,
                dropout=self.dropout,
                output_attentions=output_rfa_attentions,
            )
        output = output.transpose(1, 2).reshape(*hidden_states.shape[:2], -1)
        return self.out_proj(output), weights


class RFASeq2SeqMixin(RFAPreTrainedMixin):
    """A model whose encoders and decoders are RFA, but for the layers that the configuration lists as softmax.

    Arguments and results are those of the base model. ``output_attentions=True`` returns RFA's weights, [B, H, T, T] and
    [B, H, T, S].
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for part in list(self.modules()):  # type: ignore[attr-defined]
            if isinstance(part, PreTrainedModel) and isinstance(getattr(part, "layers", None), nn.ModuleList):
                _become_rfa(part)
        self.keep_own_in_float32()

    def _postprocess_outputs(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave the cache out of what Whisper's `generate` returns: it would part it by keys and values."""
        if not isinstance(seek_outputs, Tensor):
            seek_outputs = type(seek_outputs)(**{**seek_outputs, CACHE_NAME: None})
        return super()._postprocess_outputs(seek_outputs, *args, **kwargs)  # type: ignore[misc]


def _become_rfa(stack: Any) -> None:
    """Make attention modules of an encoder or a decoder RFA, those that its configuration says, and prepare its inputs."""
    is_decoder = any(hasattr(layer, "encoder_attn") for layer in stack.layers)
    for index, layer in enumerate(stack.layers):
        for name, kind in (DECODER_KINDS if is_decoder else ENCODER_KINDS).items():
            module = getattr(layer, name)
            if isinstance(module, RFASeq2SeqAttentionMixin | MergedCrossAttention):
                continue
            if stack.config.is_rfa(kind, index):
                _check_attention(module, kind, stack.config)
                module.__class__ = rfa_attention_class(type(module))
                module.become_rfa(stack.config, kind, index)
            elif kind == "cross" and stack.config.merged_source_length:
                _check_attention(module, kind, stack.config)
                module.__class__ = merged_attention_class(type(module))
    stack.rfa_attention = rfa_layers(stack)
    prepare_calls(stack, prepare_decoder if is_decoder else prepare_encoder)


def _check_attention(module: nn.Module, kind: AttentionKind, config: Any) -> None:
    """Raise a ValueError for an attention module whose projections and call are not those of BART's."""
    projections = all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
    if not projections or "hidden_states" not in inspect.signature(module.forward).parameters:
        fields = {each: name for name, each in config.SOFTMAX_LAYERS.items()}
        raise ValueError(f"{type(module).__name__} is not supported: leave these layers softmax ({fields[kind]}).")


@before_calls
def prepare_encoder(stack: Any, call: StackCall) -> None:
    """Add what RFA layers read to the inputs of an encoder, and take away the mask that they do not.

    Raises:
        ValueError: for a mask per query, for causal attention, or for a source longer than the encoder's positions.
    """
    config, arguments = stack.config, call.arguments
    if config.any_rfa("encoder"):
        check_direction(arguments.get("is_causal"), causal=False)
    else:
        del arguments["output_rfa_attentions"]
    if call.tokens is None:  # audio has one length, and no padding
        return
    check_positions(call.length - 1, config.max_position_embeddings)
    arguments["attention_mask"] = read_mask(arguments.get("attention_mask"))
    if config.any_rfa("encoder"):
        arguments["padding_mask"] = local_padding(arguments["attention_mask"], call.length)
    if not config.softmax_layers_for("encoder"):
        arguments["attention_mask"] = unread_mask(call.tokens.device)


@before_calls
def prepare_decoder(stack: Any, call: StackCall) -> None:
    """Add what RFA layers read to the inputs of a decoder, and take away the masks that they do not.

    Raises:
        ValueError: for a mask per query, for attention of another direction, for positions past the model's, or for rows of
            several documents.
    """
    config, arguments, cache = stack.config, call.arguments, call.cache
    attention_mask, source = arguments.get("attention_mask"), arguments.get("encoder_hidden_states")
    if attention_mask is None and cache is None:
        reason = f"decoders of type {config.model_type} read a row as one text"
        check_one_document(document_starts(arguments.get("position_ids")), reason)
    if not is_tracing(call.tokens):
        check_positions(int(call.past) + call.length - 1, config.max_position_embeddings)
    if isinstance(attention_mask, dict):  # `generate` makes masks by layer type if none of the layers is RFA
        attention_mask = attention_mask["full_attention"]
    arguments["attention_mask"] = read_mask(attention_mask)
    if config.any_rfa("causal"):
        call.add_padding(config, arguments["attention_mask"])
    if call.length == 1 and stack.rfa_attention:
        stack.rfa_attention[0].prepare_token(stack.rfa_attention, self_attention_cache(cache), call.tokens.device)
    no_mask = unread_mask(call.tokens.device)
    if not config.softmax_layers_for("causal"):
        arguments["attention_mask"] = no_mask
    if source is not None:
        softmax_layers = config.softmax_layers_for("cross")
        if config.any_rfa("cross"):
            check_direction(arguments.get("is_causal"), causal=False)
        cache = call.cache_with_source(config)
        if isinstance(cache, EncoderDecoderCache):  # refused here, before self-attention changes it
            for index in range(config.num_layers_for("causal")):
                cross_layer_of(cache.cross_attention_cache, index, softmax=index in softmax_layers)
        finished = isinstance(cache, EncoderDecoderCache) and any(cache.is_updated.values())
        source_mask = arguments.get("encoder_attention_mask")
        if not finished or arguments["output_rfa_attentions"]:  # a finished state is read without any mask
            arguments["source_padding_mask"] = local_padding(read_mask(source_mask), source.shape[1])
        if "encoder_attention_mask" in stack.reads_inputs:
            arguments["encoder_attention_mask"] = read_mask(source_mask) if softmax_layers else no_mask
    arguments[cache_name(stack.reads_inputs)] = cache


def rfa_attention_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the RFA class of a family's attention class."""
    return make_class(globals(), base, (RFASeq2SeqAttention,), f"{base.__name__} with a memory of fixed size.")


def rfa_model_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the RFA class of a model class of an encoder-decoder family: a body, one with a head, or their base class."""
    base_config: Any = base.config_class
    names = vars(sys.modules[base.__module__])
    layers = [name for name in names if name.endswith(("EncoderLayer", "DecoderLayer"))]
    split = base._no_split_modules or layers
    return make_model_class(
        globals(), base, RFASeq2SeqMixin, seq2seq_config_class(base_config), _no_split_modules=split
    )


def __getattr__(name: str) -> Any:
    """Return a class by its name, ``RFABartModel`` say; an AttributeError if transformers has no base class."""
    base = base_class(__name__, name, nn.Module)
    return rfa_model_class(base) if issubclass(base, PreTrainedModel) else rfa_attention_class(base)
