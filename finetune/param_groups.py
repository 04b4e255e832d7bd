"""Groups of parameters that fit RFA: each kind with its own learning rate, or frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from torch import nn
from transformers.pytorch_utils import Conv1D

ParameterKind = Literal["feature_maps", "sigma", "gates", "projections", "rest"]
PARAMETER_KINDS: tuple[ParameterKind, ...] = get_args(ParameterKind)
#: Learning rates by kind of parameter; 0 freezes a kind.
Rates = Mapping[ParameterKind, float]


def is_rfa_parameter(name: str) -> bool:
    """Return whether a parameter, by its name in the model, belongs to a feature map or a gate."""
    return not {"feature_map", "gate"}.isdisjoint(name.split("."))


def parameter_kinds(model: nn.Module) -> dict[str, ParameterKind]:
    """Return the kind of every parameter of a model by its name.

    Projections are the linear layers within an attention layer, RFA or softmax. transformers names the class of every
    attention layer ``…Attention``; a checkpoint may bring its own copy of a class, so the class itself does not tell.
    """
    attention = [name for name, module in model.named_modules() if type(module).__name__.endswith("Attention")]
    linear = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    prefixes = tuple(f"{name}." for name in attention)

    def kind(name: str) -> ParameterKind:
        if is_rfa_parameter(name):
            parts = name.split(".")
            return "gates" if "gate" in parts else "sigma" if "sigma" in parts else "feature_maps"
        return "projections" if name.startswith(prefixes) and name.rpartition(".")[0] in linear else "rest"

    return {name: kind(name) for name, _ in model.named_parameters()}


def parameter_groups(
    model: nn.Module, rates: Rates, *, weight_decay: float = 0.0, decayed: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Return optimizer groups, one per kind and decay; a rate of 0 leaves its kind out.

    Args:
        model: the model.
        rates: learning rate by kind.
        weight_decay: of the parameters named in ``decayed``, or of all.
        decayed: names of the parameters that decay; None for all. Feature maps and gates never do: decay would pull them away
            from the kernel that they stand for.
    """
    kinds = parameter_kinds(model)
    groups: dict[tuple[ParameterKind, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if rates[kinds[name]] > 0 and parameter.requires_grad:
            decays = not is_rfa_parameter(name) and (decayed is None or name in decayed)
            groups.setdefault((kinds[name], decays), []).append(parameter)
    return [
        {"params": parameters, "lr": rates[kind], "weight_decay": weight_decay if decays else 0.0}
        for (kind, decays), parameters in groups.items()
    ]


def freeze(model: nn.Module, rates: Rates) -> None:
    """Let no gradient be computed for the kinds whose rate is 0."""
    kinds = parameter_kinds(model)
    for name, parameter in model.named_parameters():
        if rates.get(kinds[name]) == 0:
            parameter.requires_grad_(False)
