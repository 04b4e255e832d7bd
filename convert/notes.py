"""What a conversion tells its user beside the figures."""

from __future__ import annotations

from typing import Any

from hf_rfa.families import reads_audio
from hf_rfa.models.importance import IMPORTANCES

from .configuration import outside_modules
from .plan import Plan
from .refusal import Perplexities


def notes(plan: Plan, config: Any, perplexities: Perplexities | None) -> tuple[str, ...]:
    """Return hints: a ruined model, the code that a feature map needs, growing caches, what would be better."""
    hints = []
    if perplexities is not None and perplexities.ruined:
        hints.append(
            f"The conversion has ruined the model: on the text its perplexity is {perplexities.ratio:.1f} times the base "
            "model's. Train it before you use it."
        )
    for name, module in outside_modules(config).items():
        advice = f"Import its module {module} before the checkpoint is loaded, in Python or with --import."
        if module == "__main__":
            advice = "Put its class into a module, and import that before the checkpoint is loaded."
        hints.append(f"The {name} is not hf-rfa's own, and the checkpoint does not hold its code. {advice}")
    if plan.no_tokenizer is not None:
        hints.append(f"The result has no tokenizer (of the checkpoint: {plan.no_tokenizer}).")
    for name, kind in config.SOFTMAX_LAYERS.items():
        indices = getattr(config, name)
        if kind != "encoder" and indices:
            layers = ("layer " if len(indices) == 1 else "layers ") + ", ".join(map(str, indices))
            growth = "grows with the sequence" if kind == "causal" else "has the source's length, whatever the output's"
            hints.append(f"The {kind} attention of {layers} is softmax: its cache {growth}.")
    if plan.options.max_positions is not None:
        hints.append(plan.source.family.note_on_positions(config, plan.options.max_positions))
    fits_slots = config.num_slots and IMPORTANCES[config.importance].needs_text
    if plan.options.calibrate_on is None and (config.feature_map != "none" or fits_slots):
        better = "; text like the model's inputs (--calibrate) does better"
        if plan.source.predicts_tokens and config.feature_map == "none" and config.num_heads_for("causal") > 1:
            better += ", and brings --memory N retrieval heads, which recall what is far back"
        hints.append("Calibrated on random tokens" + (" and noise for audio" if reads_audio(config) else better) + ".")
    return tuple(hints)
