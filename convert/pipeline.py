"""The conversion, stage by stage: plan, choose heads, calibrate, refuse, write, check what was written."""

from __future__ import annotations

import gc
import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import Perplexity, score_labels
from hf_rfa.inference.loading import find_device
from hf_rfa.io.atomic_io import new_folder
from hf_rfa.process_memory import give_back_memory

from .calibrate.calibration import LayerGain, calibrate
from .calibrate.retrieval_heads import choose_retrieval_heads
from .card import model_card
from .checkpoint.base_model import extend_positions, rfa_layers
from .checkpoint.loading import check_kept, digests, load_base_model, load_converted, load_models, probe_logits, quiet
from .inputs import AUDIO, HEAD_TEXT_TOKENS, MEASURED_TOKENS, Inputs, add_outputs, batches, first_rows
from .options import ConversionOptions
from .plan import Plan, Progress, make_plan
from .presets import RECALL_SHARE, RETRIEVAL_TOKENS, Trained
from .report import ConversionReport, Perplexities, check_perplexity, make_report

#: Most bytes of a shard of the result, which is held in memory while it is written.
MAX_SHARD_SIZE = 2_000_000_000
#: Largest difference between the logits of the model in memory and of the reloaded one, relative to the largest logit.
MAX_RELOAD_ERROR = 1e-5


class Models(NamedTuple):
    """The RFA model and the base model, which share their weights, and what both read, with labels if there is a head."""

    rfa: PreTrainedModel
    base: PreTrainedModel
    inputs: Inputs


def convert(
    checkpoint: str | Path,
    destination: str | Path,
    options: ConversionOptions | None = None,
    *,
    trained: Trained | None = None,
    overwrite: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> ConversionReport:
    """Convert a softmax checkpoint into an RFA checkpoint.

    The base model's weights are reused untouched. Feature maps (and gates) are added and calibrated, layer by layer, on the
    softmax model's own queries and keys (`hf_rfa.convert.calibrate.calibration`). The result is reloaded before it is moved
    to ``destination``, and compared with the model in memory and with the weights that transformers loads from the source;
    on any error nothing is left there.

    The blocks of a checkpoint over 1 GB stay in their files, and a matrix is read when it is needed
    (`hf_rfa.convert.checkpoint.offload`); smaller ones and pickles are loaded whole.

    Args:
        checkpoint: folder of the softmax checkpoint, or its name on the hub.
        destination: folder to write.
        options: the options of the conversion; None takes the defaults.
        trained: what is going to be trained on the base model, on which some defaults depend: "features", by attention
            transfer, or the whole "model"; None for nothing.
        overwrite: replace a checkpoint that is at ``destination``.
        command: the command line that the model card shows; None derives it from the options.
        progress: called as the work goes on.
        fields: fields of `ConversionOptions`, which override those of ``options``: ``convert(a, b, num_features=64)``.

    Returns:
        The figures of the conversion.

    Raises:
        InputError: if the checkpoint, the destination or an option cannot be used; nothing has been written then.
    """
    try:
        asked = replace(options or ConversionOptions(), **fields)
    except ValueError as error:
        raise InputError(str(error)) from error
    show = progress or (lambda step, total: None)
    plan = make_plan(
        checkpoint, destination, asked, trained=trained, overwrite=overwrite, command=command, progress=show
    )
    plan = choose_heads(plan)
    models = load(plan)
    gains, perplexities = calibrate_and_measure(plan, models)
    if perplexities is not None and plan.trained is None and not plan.options.force:
        check_perplexity(perplexities, plan.config)
    with new_folder(plan.destination) as folder:
        report, logits = write(plan, models, gains, perplexities, folder)
        model_class = type(models.rfa)
        del models
        gc.collect()
        give_back_memory()
        return check_written(plan, report, logits, model_class, folder)


def choose_heads(plan: Plan) -> Plan:
    """Return the plan with retrieval heads where it asks for a number of them: no other stage changes what was asked for.

    Raises:
        InputError: if no head would gain anything.
    """
    count = plan.options.retrieval_heads
    if not count or isinstance(count, list):
        return plan
    models = load(plan)
    calibrate_models(plan, models._replace(inputs=first_rows(models.inputs, HEAD_TEXT_TOKENS)))
    on_head = plan.begin("choosing retrieval heads", count)
    keep_many = (plan.options.retrieval_window or 0) + (plan.options.retrieval_slots or 0) >= RETRIEVAL_TOKENS
    by_recall = count if keep_many else math.ceil(RECALL_SHARE * count)
    heads = choose_retrieval_heads(*models, count, by_recall=by_recall, seed=plan.options.seed, on_head=on_head)
    if not heads.heads:
        raise InputError(
            "no head tells more of the text when it sees all of it. Leave retrieval_heads out, or take a longer text."
        )
    del models
    give_back_memory()
    chosen = plan.with_options(retrieval_heads=[list(head) for head in heads.heads])
    return replace(chosen, heads=heads)


def load(plan: Plan) -> Models:
    """Return the models of a plan, not yet calibrated, and their inputs; a base model with an encoder answers its sources."""
    plan.begin("loading the weights")
    model, base_model = load_models(plan.source, plan.config, plan.options)
    if plan.options.calibrate_on is None:
        return Models(model, base_model, plan.inputs)
    if plan.config.is_encoder_decoder:
        plan.begin("transcribing" if AUDIO in plan.inputs else "answering the text")
        return Models(model, base_model, add_outputs(base_model, plan.inputs))
    labels = {"labels": plan.inputs["input_ids"]} if hasattr(base_model, "lm_head") else {}
    return Models(model, base_model, plan.inputs | labels)


def calibrate_models(plan: Plan, models: Models) -> list[LayerGain]:
    """Calibrate the RFA model."""
    on_layer = plan.begin("calibrating", len(rfa_layers(models.rfa)))
    return calibrate(*models, on_layer=on_layer, to_train=plan.trained is not None)


def calibrate_and_measure(plan: Plan, models: Models) -> tuple[list[LayerGain], Perplexities | None]:
    """Calibrate the RFA model; return the gains, and where there are labels its perplexities beside the base model's."""

    def score(name: str, model: PreTrainedModel) -> Perplexity:
        plan.begin(name)
        return score_labels(model, batches(first_rows(models.inputs, MEASURED_TOKENS)))

    gains = calibrate_models(plan, models)
    if "labels" not in models.inputs:
        return gains, None
    softmax = score("scoring the base model", models.base)
    perplexities = Perplexities(
        softmax=softmax.perplexity,
        calibrated=score("scoring the result", models.rfa).perplexity,
        tokens=softmax.tokens,
        own_outputs=plan.config.is_encoder_decoder,
    )
    return gains, perplexities


def write(
    plan: Plan, models: Models, gains: list[LayerGain], perplexities: Perplexities | None, folder: Path
) -> tuple[ConversionReport, Tensor]:
    """Write the calibrated model to a folder, with what goes beside its weights; return the report and its first logits."""
    plan.begin("writing")
    if plan.options.max_positions is not None:
        extend_positions(plan.source.family, models.rfa, plan.options.max_positions)
    logits = probe_logits(models.rfa, plan.options.seed)
    report = make_report(plan, models.rfa, models.base, gains, perplexities)
    sizes = [path.stat().st_size for path in plan.source.weight_files]  # shards are no larger than theirs
    size = min(MAX_SHARD_SIZE, max(sizes) if len(sizes) > 1 else MAX_SHARD_SIZE)
    with quiet():
        models.rfa.save_pretrained(folder, max_shard_size=size)
    if plan.tokenizer is not None:
        plan.tokenizer.save_pretrained(folder)
    for path in plan.files:
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, folder / path.name)
    return report, logits


def check_written(
    plan: Plan, report: ConversionReport, logits: Tensor, model_class: type[PreTrainedModel], folder: Path
) -> ConversionReport:
    """Load the folder and compare the model with what it was made from; write the card and the figures, and return these.

    Raises:
        InputError: if its logits are not those before it was written, or its weights not those that transformers loads from
            the source.
    """
    plan.begin("checking the result")
    source = _source_digests(plan)
    model = load_converted(plan.source, model_class, folder, find_device(plan.options.device))
    check_kept(digests(model), source, plan.source.name)
    reloaded = probe_logits(model, plan.options.seed)
    difference = float((reloaded - logits).abs().max())
    if not torch.isfinite(reloaded).all() or difference > MAX_RELOAD_ERROR * float(logits.abs().max()):
        raise InputError(
            f"the written checkpoint gives other logits than the model it was written from (largest difference "
            f"{difference:.2e}); it is not kept."
        )
    report = replace(report, max_logit_difference=difference)
    model_card(report, plan.source, plan.config).save(folder / "README.md")
    (folder / "conversion.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
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
