"""Implementations of causal attention that need a GPU; `hf_rfa.models.attention` computes in torch without them."""

from __future__ import annotations

from torch import nn

from hf_rfa.errors import InputError
from hf_rfa.models.attention import BACKENDS, RFAAttentionMixin

from . import fla_attention, triton_attention

BACKENDS["fused"] = triton_attention
BACKENDS["fla"] = fla_attention


def use_backend(model: nn.Module, backend: str) -> None:
    """Choose what computes causal attention without a window.

    Args:
        model: the RFA model, changed in place.
        backend: "torch", the default; "fused" for the Triton kernels; or "fla" for features in torch and the recurrence of
            several tokens by flash-linear-attention. Float64, compiled graphs, maps from outside this
            package ("fused") and packed documents ("fla") stay in torch.

    Raises:
        InputError: if a backend is asked for that does not run on the model's device, or that no layer of the model can use:
            they know neither windows nor grouped queries.
    """
    device = next(model.parameters()).device
    if backend not in ("torch", *BACKENDS):
        raise InputError(f"backend must be one of torch, {', '.join(BACKENDS)}, got {backend!r}.")
    if backend != "torch" and not BACKENDS[backend].available(device):
        needs = BACKENDS[backend].NEEDS
        raise InputError(f"backend {backend!r} needs {needs} and a CUDA device, and this model is on {device}.")
    layers = [module for module in model.modules() if isinstance(module, RFAAttentionMixin)]
    if backend != "torch" and not any(map(_is_served, layers)):
        raise InputError(
            f"backend {backend!r} computes causal attention to features alone, with as many key-value heads as query heads, "
            'and no layer of this model has such attention. Leave it at "torch", or convert with features and no window.'
        )
    for layer in layers:
        layer.backend = backend


def _is_served(layer: RFAAttentionMixin) -> bool:
    """Return whether backends compute a layer's attention."""
    feature_map = layer.feature_map
    return (
        layer.rfa_kind == "causal" and not layer.window_size and feature_map.groups == 1 and feature_map.feature_dim > 0
    )
