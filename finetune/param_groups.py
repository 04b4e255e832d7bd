"""Which parameters are trained, and how fast: kinds that fit RFA, each with its own learning rate or frozen, and LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_rfa.errors import InputError
from hf_rfa.models.rfa_classes import own_prefixes

ParameterKind = Literal["feature_maps", "sigma", "gates", "projections", "rest"]
PARAMETER_KINDS: tuple[ParameterKind, ...] = get_args(ParameterKind)
#: Learning rates by kind of parameter; 0 freezes a kind.
Rates = Mapping[ParameterKind, float]


def parameter_kinds(model: nn.Module) -> dict[str, ParameterKind]:
    """Return the kind of every parameter of a model by its name.

    Projections are the linear layers within an attention layer, RFA or softmax. transformers names the class of every
    attention layer ``…Attention``; a checkpoint may bring its own copy of a class, so the class itself does not tell.
    """
    modules = dict(model.named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))}
    attention = [name for name, module in modules.items() if type(module).__name__.endswith("Attention")]
    attention_prefixes = tuple(f"{name}." for name in attention)
    rfa_prefixes = own_prefixes(model)

    def kind(name: str) -> ParameterKind:
        if name.startswith(rfa_prefixes):
            parts = name.split(".")
            return "gates" if "gate" in parts else "sigma" if "sigma" in parts else "feature_maps"
        return "projections" if name.startswith(attention_prefixes) and name.rpartition(".")[0] in linear else "rest"

    return {name: kind(name) for name, _ in model.named_parameters()}


def parameter_groups(
    model: nn.Module, rates: Rates, *, weight_decay: float = 0.0, decayed: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Return optimizer groups, one per kind and decay; a rate of 0 leaves its kind out.

    The parameters named in ``decayed`` decay, or all. Feature maps and gates never do: decay would pull them away from the
    kernel that they stand for.
    """
    kinds = parameter_kinds(model)
    groups: dict[tuple[ParameterKind, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if rates[kinds[name]] > 0 and parameter.requires_grad:
            decays = kinds[name] in ("projections", "rest") and (decayed is None or name in decayed)
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


@contextmanager
def lora(model: nn.Module, rank: int) -> Iterator[None]:
    """Train LoRA matrices of ``rank`` (Hu et al. 2022; α is 2 × rank), feature maps and gates, and no other weights.

    The model is changed in place, so the Trainer's checkpoints hold all of it. At the end the matrices are merged into the
    weights of their layers and removed.

    Raises:
        InputError: if peft is not installed.
    """
    try:
        from peft import LoraConfig, LoraModel
    except ImportError as error:
        raise InputError("lora_rank needs peft: pip install 'hf-rfa[peft]', or set lora_rank to 0.") from error
    conv1d = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", fan_in_fan_out=conv1d)
    tuner: Any = LoraModel(model, config, "default")
    rfa_prefixes = own_prefixes(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith(rfa_prefixes))
    try:
        yield
    finally:
        tuner.merge_and_unload(safe_merge=True)
        vars(model).pop("peft_config", None)
