"""The attention module: projections in, φ, gate, recurrence, cache, projections out.

What is the same in every family is in `RFAAttentionMixin`; a family's attention class brings its projections.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from .attention_weights import UNSEEN, implied_weights
from .blockwise import blockwise, in_blocks
from .cache_rfa import keys_and_values_in, source_layer_of
from .configuration_rfa import AttentionKind
from .feature_maps import FEATURE_MAPS, FeatureMap, Features, compute_dtype
from .gate import Gate
from .linear_attention import Form, attend_with_state, chunked, mask_padding, rescale, rfa_attention, source_state
from .masking import rows_in_runs
from .sliding_window import windowed_attention

#: Added to a layer's index where its random matrices are drawn, so that cross attention has others than causal attention.
DRAW_OFFSET: dict[AttentionKind, int] = {"causal": 0, "cross": 100_000, "encoder": 200_000}


#: The parts of attention with an exact window (`hf_rfa.inference.use_attention_component`).
AttentionComponent = Literal["both", "linear", "window"]
#: Modules that compute causal attention without a window in place of torch, by name; `hf_rfa.backends` registers its own.
BACKENDS: dict[str, Any] = {}


def build_feature_map(config: Any, *, kind: AttentionKind, scaling: float, layer_idx: int) -> FeatureMap:
    """Build the feature map of one attention layer from a configuration with the fields of `RFAConfigMixin`."""
    return FEATURE_MAPS[config.feature_map](
        num_heads=config.num_heads_for(kind),
        head_dim=config.head_dim_for(kind),
        num_features=config.num_features_for(kind),
        scaling=scaling,
        unit_norm=config.unit_norm,
        orthogonal=config.orthogonal,
        trainable=config.trainable_projection,
        redraw_pool=config.redraw_pool,
        windowed=kind == "causal" and config.window > 0,
        seed=config.feature_seed,
        layer_idx=layer_idx + DRAW_OFFSET[kind],
    )


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of (query, …) so that mixed precision rounds nothing in it: phases, features, gates and states."""

    @wraps(function)
    def run(self: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = query.device.type
        if not torch.is_autocast_enabled(device):
            return function(self, query, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(self, query, *args, **kwargs)

    return run


class _Tokens(NamedTuple):
    """What causal attention reads of some tokens; see `RFAAttentionMixin.attend`."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_gate: Tensor | None
    weights: Tensor | None
    padding: Tensor | None
    starts: Tensor | None

    def first(self, count: int | None) -> _Tokens:
        """Return the first ``count`` of the tokens, or all of them."""
        if count is None:
            return self
        rows = (each[..., :count, :] for each in self[:3])
        return _Tokens(*rows, *(None if each is None else each[..., :count] for each in self[3:]))


class RFAPreTrainedMixin:
    """What every RFA model has of its base class: how φ and gates start, and that they stay in float32.

    Raises:
        ValueError: for a configuration that is not valid; ``from_pretrained(…, window=8)`` sets fields after a configuration
            was checked.
    """

    # φ and the gates cost few bytes, and rounding them to 16 bits costs accuracy.
    _keep_in_fp32_modules_strict: Any = ["feature_map", "gate"]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config.validate_layer_type()
        config.validate_rfa()
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (FeatureMap, Gate)):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class RFAAttentionMixin(nn.Module):
    """Random feature attention for a family's attention class, which projects queries, keys and values."""

    feature_map: FeatureMap
    gate: Gate | None
    rfa_kind: AttentionKind
    scaling: float

    def project_query(self, hidden_states: Tensor) -> Tensor:
        """Return the queries [B, H, T, d] of the layer's input [B, T, width]."""
        raise NotImplementedError

    def project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, S, d] of what is attended to, [B, S, width]."""
        raise NotImplementedError

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [B, H, T, d], of the layer's input [B, T, width] (self-attention)."""
        return self.project_query(hidden_states), *self.project_source(hidden_states)

    def init_rfa(self, config: Any, *, kind: AttentionKind, scaling: float, layer_idx: int) -> None:
        """Add the feature map, and the gate where the configuration asks for one (causal attention only)."""
        self.feature_map = build_feature_map(config, kind=kind, scaling=scaling, layer_idx=layer_idx)
        gated = config.gate and kind == "causal"
        heads, positions = config.num_heads_for(kind), config.max_position_embeddings
        self.gate = Gate(config.hidden_size, heads, positions) if gated else None
        self.rfa_kind = kind
        self.rfa_layer_idx = layer_idx
        self.window = config.window if kind == "causal" else 0
        self.attention_component: AttentionComponent = "both"
        self.backend = "torch"
        self.chunk_size = config.chunk_size
        self.state_dtype = getattr(torch, config.state_dtype)

    def _as_state(self, features: Tensor) -> Tensor:
        """Return features in the dtype of the state."""
        return features.to(torch.promote_types(self.state_dtype, features.dtype))

    def _features(
        self, query: Tensor, key: Tensor | None, least_shift: Tensor | None, *, offset: bool = False
    ) -> Features:
        """Return the features of queries and keys in the dtype of the state."""
        found: Features = self.feature_map(query, key, least_shift=least_shift, offset=offset)
        return Features._make(None if each is None else self._as_state(each) for each in found)

    def _signs(self) -> dict[str, Any]:
        return {"signed": self.feature_map.signed, "floor": self.feature_map.floor}

    def _uses_kernels(self, query: Tensor) -> bool:
        """Return whether the fused kernels compute this: where they were asked for, and fit."""
        if self.backend != "fused" or torch.compiler.is_compiling():
            return False
        written = self.feature_map.affine_form.__func__ is not FeatureMap.affine_form  # type: ignore[attr-defined]
        return written and self.state_dtype == torch.float32 and compute_dtype(query.dtype) == torch.float32

    def _form(self, query: Tensor, starts: Tensor | None) -> Form:
        """Return what computes several tokens of the recurrence."""
        fits = starts is None and self._as_state(query[:0]).dtype == torch.float32
        return (
            BACKENDS["fla"].fla_chunked
            if self.backend == "fla" and fits and not torch.compiler.is_compiling()
            else chunked
        )

    def _attend_fused(
        self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend by the fused kernels; a state is updated in place by one token without gradients."""
        affine = self.feature_map(query, key, affine=True)
        one = state is not None and query.shape[-2] == 1 and not torch.is_grad_enabled()
        if one and not self.feature_map.signed and options["starts"] is None:
            given = {name: options[name] for name in ("log_gate", "weights")}
            return BACKENDS["fused"].fused_step(affine, value, cast(Tensor, state), **given), cast(Tensor, state)
        least = self.feature_map.least_shift(state)
        return BACKENDS["fused"].fused_attention(
            affine, value, state=state, floor=self.feature_map.floor, least_shift=least, **options
        )

    @without_autocast
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        hidden_states: Tensor,
        cache: Cache | None = None,
        padding: Tensor | None = None,
        starts: Tensor | None = None,
        dropout: float = 0.0,
        output_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention: attend to keys and values, and if causal to those that the cache has seen before.

        Dropout cannot act on single attention weights, which never exist: in training it drops a token's value for all
        queries of a head, and leaves the token in the normaliser, as dropout on softmax weights does.

        Args:
            query: [B, H, T, d].
            key: [B, H, T, d].
            value: [B, H, T, d].
            hidden_states: the layer's input, [B, T, width], which the gate reads.
            cache: the cache whose layer is read and updated, or None.
            padding: [B, T], 0 for padding, or None; with the tokens before these of which the cache holds keys and values
                (`unread_length`).
            starts: [B, T], True where a document starts that sees nothing before it (`document_starts`), or None; only
                with causal attention.
            dropout: probability of dropping a value in training.
            output_weights: whether to return the implied attention weights, at quadratic cost.

        Returns:
            The output [B, H, T, d] in the dtype of ``value``, and the weights [B, H, T, T] or None.
        """
        if self.rfa_kind != "causal":
            output, _, implied = self._attend_all(query, key, value, padding, dropout, output_weights)
            return output, implied
        length = query.shape[-2]
        prefix = None if cache is None else keys_and_values_in(cache, self.rfa_layer_idx)
        if prefix is not None:  # tokens of which no more is known: a gate reads zeros, and nobody asks for their output
            old = (prefix[0], *prefix)
            query, key, value = (torch.cat(each, dim=-2) for each in zip(old, (query, key, value), strict=True))
            hidden_states = F.pad(hidden_states, (0, 0, key.shape[-2] - length, 0))
        values = F.dropout(value, dropout, self.training)
        log_gate, weights = (None, None) if self.gate is None else self.gate(hidden_states)
        log_gate, weights = mask_padding(padding, log_gate, weights)
        tokens = _Tokens(query, key, values, log_gate, weights, padding, starts)
        implied = None

        def step(
            state: Tensor | None, window: Tensor | None, count: int | None = None
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            nonlocal implied
            output, state, window, implied = self._attend_causally(tokens.first(count), state, window, output_weights)
            return output, state, window

        if cache is None:
            output = step(None, None)[0]
        else:
            output, _ = cache.update(key, values, self.rfa_layer_idx, step=step)
        implied = None if implied is None else implied[..., -length:, -length:].to(value.dtype)
        return output[..., -length:, :].to(value.dtype), implied

    def _attend_causally(
        self, tokens: _Tokens, state: Tensor | None, window: Tensor | None, output_weights: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the output, the new state and window, and the implied weights."""
        query, key, value, log_gate, weights, padding, starts = tokens
        fused = {"log_gate": log_gate, "weights": weights, "starts": starts}
        if starts is not None:  # a gate that lets nothing through
            log_gate = torch.zeros_like(key[..., 0], dtype=compute_dtype(key.dtype)) if log_gate is None else log_gate
            log_gate = log_gate.masked_fill(starts[:, None], UNSEEN)
        shared: dict[str, Any] = {"log_gate": log_gate, "weights": weights, **self._signs()}
        least_shift = self.feature_map.least_shift(state)
        if self.window and self.attention_component != "linear":
            return windowed_attention(
                self._as_state(query),
                self._as_state(key),
                value,
                features=partial(self._features, least_shift=least_shift, offset=True),
                size=self.window,
                scaling=self.scaling,
                padding=padding,
                state=state,
                window=window,
                chunk_size=self.chunk_size,
                output_weights=output_weights,
                window_only=self.attention_component == "window",
                **shared,
            )
        implied = None
        if output_weights:
            features = self._features(query, key, least_shift)
            met = rescale(state, None, features.shift)
            implied = implied_weights(features.query, features.key, state=met, **shared)
        if self._uses_kernels(query):
            return *self._attend_fused(query, key, value, fused, state), None, implied

        form = self._form(query, starts)

        def run(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            log_gate: Tensor | None,
            weights: Tensor | None,
            state: Tensor | None,
            shift: Tensor | None,
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            features = self._features(query, key, self.feature_map.least_shift(state) if shift is None else shift)
            given: dict[str, Any] = {"log_gate": log_gate, "weights": weights, **self._signs()}
            state = rescale(state, shift, features.shift)
            output, state = rfa_attention(
                features.query, features.key, value, state=state, chunk_size=self.chunk_size, form=form, **given
            )
            return output, state, features.shift

        redrawn = self.training and self.feature_map.redraw_pool > 0  # a second look would see other features
        at_once = redrawn or form is not chunked or not in_blocks(query.shape[-2])
        output, state, shift = (run if at_once else partial(blockwise, run))(
            query, key, value, log_gate, weights, state, None
        )
        return output, cast(Tensor, rescale(state, shift, None)), None, implied

    @without_autocast
    def _attend_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        dropout: float,
        output_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Let every query see every key: queries, keys and values in; output, state and implied weights out.

        One row of keys may serve several rows of queries, as in `attend_with_state`.
        """
        query_features, key_features, _, shift = self._features(query, key, self.feature_map.least_shift(None))
        weights = mask_padding(padding, None, None)[1]
        values = F.dropout(value, dropout, self.training)
        state = source_state(key_features, values, weights=weights, signed=self.feature_map.signed)
        output = attend_with_state(query_features, state, **self._signs()).to(value.dtype)
        state = cast(Tensor, rescale(state, shift, None))
        if not output_weights:
            return output, state, None
        rows = query.shape[0] // key.shape[0]
        key_features = key_features.repeat_interleave(rows, dim=0)
        weights = None if weights is None else weights.repeat_interleave(rows, dim=0)
        implied = implied_weights(query_features, key_features, weights=weights, causal=False, **self._signs())
        return output, state, implied.to(value.dtype)

    @without_autocast
    def _read(self, query: Tensor, state: Tensor) -> Tensor:
        """Return what queries [B, H, T, d] read from a finished state."""
        state = state.to(query.device)
        features = self._features(query, None, self.feature_map.least_shift(state))
        met = cast(Tensor, rescale(state, None, features.shift))
        return attend_with_state(features.query, met, **self._signs()).to(query.dtype)

    def attend_to_source(
        self,
        hidden_states: Tensor,
        source: Tensor | None,
        *,
        past_key_values: Cache | None = None,
        padding: Tensor | None = None,
        dropout: float = 0.0,
        output_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Cross attention: attend to an encoder's output, summed once per sequence and kept in the cache.

        Args:
            hidden_states: the layer's input, [B, T, width].
            source: the encoder's output, [B, S, width]; not read again once the cache holds its sums.
            past_key_values: the `EncoderDecoderCache`, or None.
            padding: [B, S], 0 for padding, or None.
            dropout: probability of dropping a value in training, see `attend`.
            output_weights: whether to return the implied attention weights.

        Returns:
            The output [B, H, T, d] in the dtype of the queries, and the weights [B, H, T, S] or None.

        Raises:
            ValueError: if there is neither a source nor a state.
        """
        query = self.project_query(hidden_states)
        layer: Any = None
        if isinstance(past_key_values, EncoderDecoderCache):
            layer = source_layer_of(past_key_values.cross_attention_cache, self.rfa_layer_idx)
        if layer is not None and layer.state is not None and not output_weights:
            return self._read(query, layer.state), None
        if source is None:
            raise ValueError("cross attention needs encoder_hidden_states, or a cache that has seen them.")
        fills = layer is not None and layer.state is None
        runs = rows_in_runs(source, padding) if fills else 1
        kept = None if padding is None else padding[::runs]
        key, value = self.project_source(source[::runs])
        output, state, implied = self._attend_all(query, key, value, kept, dropout, output_weights)
        if isinstance(past_key_values, EncoderDecoderCache) and fills:
            layer.fill(state, length=source.shape[1], rows_per_state=runs)
            past_key_values.is_updated[self.rfa_layer_idx] = True
        return output, implied
