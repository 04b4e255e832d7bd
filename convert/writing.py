"""The last stages of a conversion: the folder is written, loaded again, and compared with what it was made from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.inference.devices import find_device
from hf_rfa.process_memory import give_back_memory

from .calibrate.calibration import LayerGain
from .card import model_card
from .checkpoint.base_model import extend_positions
from .checkpoint.kept_weights import check_kept, digests
from .checkpoint.loading import load_base_model, load_converted, probe_logits, quiet
from .plan import Plan
from .refusal import Perplexities
from .report import ConversionReport, make_report

#: Most bytes of a shard of the result, which is held in memory while it is written.
MAX_SHARD_SIZE = 2_000_000_000
#: Largest difference between the logits of the model in memory and of the reloaded one, relative to the largest logit.
MAX_RELOAD_ERROR = 1e-5


class Written(NamedTuple):
    """What is known of a model that has been written: its class, its first logits, and the report but for the comparison."""

    model_class: type[PreTrainedModel]
    logits: Tensor
    report: ConversionReport


def write(
    plan: Plan,
    model: PreTrainedModel,
    base_model: PreTrainedModel,
    gains: list[LayerGain],
    perplexities: Perplexities | None,
    folder: Path,
) -> Written:
    """Write the calibrated model to a folder, with what goes beside its weights."""
    plan.begin("writing")
    base_memory = cache_memory(base_model)
    if plan.options.max_positions is not None:
        extend_positions(plan.source.family, model, plan.options.max_positions)
    logits = probe_logits(model, plan.options.seed)
    report = make_report(plan, model, base_memory, gains, perplexities)
    sizes = [path.stat().st_size for path in plan.source.weight_files]  # shards are no larger than theirs
    with quiet():
        model.save_pretrained(
            folder, max_shard_size=min(MAX_SHARD_SIZE, max(sizes) if len(sizes) > 1 else MAX_SHARD_SIZE)
        )
    if plan.tokenizer is not None:
        plan.tokenizer.save_pretrained(folder)
    for path in plan.files:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif path.is_file():
            shutil.copyfile(path, folder / path.name)
    return Written(type(model), logits, report)


def check_written(plan: Plan, written: Written, folder: Path) -> ConversionReport:
    """Load the folder and compare the model with what it was made from; write the card and the figures, and return these.

    Raises:
        InputError: if its logits are not those before it was written, or its weights not those that transformers loads from
            the source.
    """
    plan.begin("checking the result")
    source = _source_digests(plan)
    model = load_converted(plan.source, written.model_class, folder, find_device(plan.options.device))
    check_kept(digests(model), source, plan.source.name)
    logits = probe_logits(model, plan.options.seed)
    difference = float((logits - written.logits).abs().max())
    if not torch.isfinite(logits).all() or difference > MAX_RELOAD_ERROR * float(written.logits.abs().max()):
        raise InputError(
            f"the written checkpoint gives other logits than the model it was written from (largest difference "
            f"{difference:.2e}); it is not kept."
        )
    report = replace(written.report, max_logit_difference=difference)
    model_card(report, plan.source, plan.config).save(folder / "README.md")
    (folder / "conversion.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    return report


def _source_digests(plan: Plan) -> dict[str, str]:
    """Return the digests of the source's tensors as transformers loads them, without a table that was extended."""
    base_model = load_base_model(plan.source, plan.options)
    source = digests(base_model)
    if plan.options.max_positions is not None:
        positions = plan.source.family.position_embeddings(base_model)
        for name in (name for name, module in base_model.named_modules() if module in positions):
            del source[f"{name}.weight"]
    del base_model
    give_back_memory()
    return source
