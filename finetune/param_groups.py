"""Groups of parameters that fit RFA: each kind with its own learning rate, or frozen."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers import Trainer

ParameterKind = Literal["feature_maps", "sigma", "gates", "projections", "rest"]
KINDS: tuple[ParameterKind, ...] = ("feature_maps", "sigma", "gates", "projections", "rest")
#: Modules of an attention layer that project queries, keys, values and outputs, in all families.
PROJECTIONS = {"c_attn", "q_attn", "q_proj", "k_proj", "v_proj", "out_proj"}
#: Modules that are attention layers; GPT-2's output projection has a name that its feed-forward layer uses too.
ATTENTIONS = {"attn", "crossattention", "self_attn", "encoder_attn"}


def kind_of_parameter(name: str) -> ParameterKind:
    """Return the kind of a parameter by its name in the model."""
    parts = set(name.split("."))
    if "feature_map" in parts:
        return "sigma" if "sigma" in parts else "feature_maps"
    if "gate" in parts:
        return "gates"
    if parts & PROJECTIONS or ("c_proj" in parts and parts & ATTENTIONS):
        return "projections"
    return "rest"


def is_rfa_parameter(name: str) -> bool:
    """Return whether a parameter belongs to a feature map or a gate."""
    return kind_of_parameter(name) in ("feature_maps", "sigma", "gates")


def parameter_groups(
    model: nn.Module, rates: dict[ParameterKind, float], *, weight_decay: float = 0.0, decayed: set[str] | None = None
) -> list[dict[str, Any]]:
    """Return optimiser groups, one per kind and decay; a rate of 0 leaves its kind out.

    Args:
        model: the model.
        rates: learning rate by kind.
        weight_decay: of the parameters named in ``decayed``, or of all.
        decayed: names of the parameters that decay; None for all. Feature maps and gates never do: decay would pull them away
            from the kernel that they stand for.
    """
    groups: dict[tuple[ParameterKind, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        kind = kind_of_parameter(name)
        if rates[kind] > 0 and parameter.requires_grad:
            decays = not is_rfa_parameter(name) and (decayed is None or name in decayed)
            groups.setdefault((kind, decays), []).append(parameter)
    return [
        {"params": parameters, "lr": rates[kind], "weight_decay": weight_decay if decays else 0.0}
        for (kind, decays), parameters in groups.items()
    ]


class GroupedTrainer(Trainer):
    """A `Trainer` whose optimiser, any that it knows, gets the groups of `parameter_groups`.

    Args:
        rates: learning rate by kind; a kind that is not named has ``args.learning_rate``, and 0 freezes it.
    """

    def __init__(self, *args: Any, rates: dict[ParameterKind, float] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates = rates or {}

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimiser once."""
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            rates: dict[ParameterKind, float] = {kind: self.rates.get(kind, self.args.learning_rate) for kind in KINDS}
            groups = parameter_groups(
                trained,
                rates,
                weight_decay=self.args.weight_decay,
                decayed=set(self.get_decay_parameter_names(trained)),
            )
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            self.optimizer = cls(groups, **options)
        return self.optimizer


def freeze(model: nn.Module, rates: dict[ParameterKind, float]) -> None:
    """Let no gradient be computed for the kinds whose rate is 0."""
    for name, parameter in model.named_parameters():
        if rates.get(kind_of_parameter(name)) == 0:
            parameter.requires_grad_(False)
