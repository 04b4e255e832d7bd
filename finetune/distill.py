"""The whole of a distillation: checkpoint, teacher and text in, distilled checkpoint with its report out."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, TrainingArguments

from hf_rfa.convert.atomic_io import check_destination, new_folder
from hf_rfa.convert.base_model import rfa_layers
from hf_rfa.convert.calibration_data import Inputs
from hf_rfa.convert.configuration import import_words
from hf_rfa.convert.pictures import HeadMap, compare_attention, draw_attention
from hf_rfa.convert.pipeline import MAX_SHARD_SIZE, Progress
from hf_rfa.convert.text_io import read_documents, read_pairs
from hf_rfa.errors import InputError
from hf_rfa.inference import kind_of, load_model
from hf_rfa.models.configuration_rfa import RFAConfigMixin

from .arguments import processes_started
from .card import copy_referred, data_name, rows_of, trained_card
from .data import Blocks, PairCollator, Pairs
from .distillation import distill_logits, transfer_attention, transfer_losses
from .param_groups import is_rfa_parameter
from .recipe import Recipe, Stage
from .report import HELD_OUT, DistillationReport
from .run_folder import check_settings, check_training_folder, training_folder


def _check_pair(model: PreTrainedModel, teacher: PreTrainedModel, names: tuple[str, str], recipe: Recipe) -> Recipe:
    """Return the recipe with its block lengths; raise an `InputError` if a model cannot learn from a teacher."""
    config: Any = model.config
    if not isinstance(model.config, RFAConfigMixin):
        raise InputError(
            f"{names[0]} is a {config.model_type} model, not an RFA checkpoint. Convert it first (hf-rfa convert)."
        )
    if isinstance(teacher.config, RFAConfigMixin):
        raise InputError(
            f"the teacher {names[1]} is an RFA checkpoint. Pass the softmax model that {names[0]} was made from."
        )
    if recipe.transfer.steps and not any(is_rfa_parameter(name) for name, _ in model.named_parameters()):
        raise InputError(
            f"{names[0]} has nothing that attention transfer could train: feature_map={config.feature_map!r} has no "
            "parameters, and there is no gate. Pass --transfer-steps 0, or convert it with another map or with --gate."
        )
    theirs = dict(teacher.named_parameters())
    for name, parameter in model.named_parameters():
        if "feature_map" in name.split(".") or "gate" in name.split("."):
            continue
        is_position = not {"wpe", "embed_positions"}.isdisjoint(name.split("."))
        other = theirs.get(name)
        if other is None or (other.shape != parameter.shape and not is_position):
            raise InputError(
                f"{names[1]} is not the parent of {names[0]}: tensor {name} is missing or of another shape."
            )
        if recipe.transfer.steps and not is_position and not torch.allclose(other, parameter, atol=1e-6, rtol=5e-3):
            raise InputError(
                f"{names[0]} no longer has the weights of {names[1]} (tensor {name} differs), so that its attention cannot "
                "be taught by transfer. Pass --transfer-steps 0, or the checkpoint as it was converted."
            )
    positions = min(config.max_position_embeddings, teacher.config.max_position_embeddings)
    for name, stage in (("transfer", recipe.transfer), ("end_to_end", recipe.end_to_end)):
        if stage.steps and stage.block_length is not None and stage.block_length > positions:
            raise InputError(
                f"recipe: {name}.block_length is {stage.block_length}, but the models have {positions} positions."
            )
    return replace(
        recipe,
        transfer=recipe.transfer.resolve(config, positions),
        end_to_end=recipe.end_to_end.resolve(config, positions),
    )


def _data(model: PreTrainedModel, tokenizer: Any, data: Path, references: Path | None, stage: Stage) -> Dataset:
    if kind_of(model.config) == "causal":
        if references is not None:
            raise InputError("references belong to a model with an encoder; this one is a decoder that stands alone.")
        return Blocks(tokenizer, read_documents(data), cast(int, stage.block_length))
    sources, targets = read_pairs(data, references)
    return Pairs(tokenizer, sources, targets, cast(int, stage.block_length))


def distill(
    checkpoint: str | Path,
    destination: str | Path,
    *,
    teacher: str | Path,
    data: str | Path,
    references: str | Path | None = None,
    recipe: str | Path | Recipe = "default",
    transfer_steps: int | None = None,
    end_to_end_steps: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> DistillationReport:
    """Distil a converted checkpoint from its softmax parent.

    Training is done in float32. Checkpoints of it lie in ``.NAME.training`` beside the destination until it is finished.

    Args:
        checkpoint: the RFA checkpoint.
        destination: folder to write.
        teacher: its softmax parent, a folder or a hub name.
        data: text to train on (.txt or .jsonl, plain or .gz); for a model with an encoder the sources, one a line, or a
            ``.jsonl`` file with ``source`` and ``target``.
        references: outputs that belong to the sources, one a line.
        recipe: name or file of a recipe, or a `Recipe`.
        transfer_steps: steps of attention transfer, instead of the recipe's.
        end_to_end_steps: steps of the end-to-end stage, instead of the recipe's.
        resume: go on where an interrupted run stopped.
        overwrite: replace a checkpoint that is at ``destination``.
        command: what the model card says made it; None stands for these arguments.
        progress: told of the stages: (name, number of steps) at the start of one, (None, 1) when a step is done.

    Returns:
        The figures of the distillation.

    Raises:
        InputError: if anything that was passed cannot be used; no training has started then.
    """
    arguments = locals()
    check_one_process()
    destination = Path(destination)
    settings = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    settings = settings.with_steps(transfer=transfer_steps, end_to_end=end_to_end_steps)
    stages = {"transfer": settings.transfer, "end_to_end": settings.end_to_end}
    for name, stage in stages.items():
        stage.check(name)
    if not any(stage.steps for stage in stages.values()):
        raise InputError("no stage of the recipe has any steps: there is nothing to train.")
    check_destination(destination, overwrite=overwrite, sources=(Path(checkpoint), Path(teacher)))
    work = training_folder(destination)
    check_training_folder(work, resume=resume)

    model, tokenizer = load_model(str(checkpoint), dtype="float32")
    parent, _ = load_model(str(teacher), kind=kind_of(model.config), dtype="float32", need_tokenizer=False)
    settings = _check_pair(model, parent, (str(checkpoint), str(teacher)), settings)
    command = command or _command(arguments, model.config.feature_map)
    stages = {"transfer": settings.transfer, "end_to_end": settings.end_to_end}
    datasets = {
        name: _data(model, tokenizer, Path(data), None if references is None else Path(references), stage)
        for name, stage in stages.items()
        if stage.steps
    }
    for name, dataset in datasets.items():
        if len(dataset) <= HELD_OUT:  # type: ignore[arg-type]
            raise InputError(f"the data gives {len(dataset)} items for {name}; more than {HELD_OUT} are needed.")  # type: ignore[arg-type]
    sources = {"teacher": teacher, "data": data, "references": references}
    described = {name: None if path is None else str(Path(path).resolve()) for name, path in sources.items()}
    check_settings(work, described | {"recipe": settings.to_dict()}, resume=resume)
    report = _run(model, parent, datasets, settings, work, resume, command, str(data), progress)
    with new_folder(destination) as folder:
        _write(model, tokenizer, report, str(checkpoint), folder, destination.resolve().name)
    shutil.rmtree(work, ignore_errors=True)
    return report


def check_one_process() -> None:
    """Raise an `InputError` if several processes were started: each would train alone, and write the same folder."""
    if processes_started() > 1:
        raise InputError(
            f"{processes_started()} processes were started, but distillation runs in one. Start it without torchrun or "
            "accelerate launch."
        )


def training_arguments(stage: Stage, folder: Path, *, seed: int) -> TrainingArguments:
    """Return the Trainer's arguments for one stage of a recipe, with its checkpoints in ``folder``."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=stage.steps,
        per_device_train_batch_size=cast(int, stage.batch_size),
        learning_rate=stage.learning_rate,
        bf16=stage.bf16,
        use_cpu=not torch.accelerator.is_available(),
        lr_scheduler_type="cosine",
        logging_steps=max(1, stage.steps // 50),
        save_strategy="steps",
        save_steps=max(1, stage.steps // 5),
        save_total_limit=1,
        disable_tqdm=True,  # `distill` is asked for progress, or silent
        logging_nan_inf_filter=False,  # a loss that is not finite must not be replaced by the mean of those before
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.accelerator.is_available(),
        seed=seed,
    )


def _command(options: dict[str, Any], feature_map: str) -> str:
    """Return the command line that stands for the arguments of `distill`, of a model with such a feature map."""
    words = ["hf-rfa", "distill", str(options["checkpoint"]), "--output", str(options["destination"])]
    for name in ("teacher", "data", "references", "recipe", "transfer_steps", "end_to_end_steps"):
        value = options[name]
        if value is not None and not isinstance(value, Recipe):
            words += ["--" + name.replace("_", "-"), str(value)]
    return shlex.join(words + import_words(feature_map))


def _run(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    datasets: dict[str, Dataset],
    recipe: Recipe,
    work: Path,
    resume: bool,
    command: str,
    data: str,
    progress: Progress | None,
) -> DistillationReport:
    """Run the stages."""
    collate = None if kind_of(model.config) == "causal" else PairCollator(model.config)
    results, before, after = [], {}, {}
    batch: Inputs = {}
    perplexities: dict[str, float] = {}
    maps: list[HeadMap] = []
    for name, dataset in datasets.items():
        stage: Stage = getattr(recipe, name)
        count = len(dataset)  # type: ignore[arg-type]
        training = Subset(dataset, range(count - HELD_OUT))
        held_out = [dataset[index] for index in range(count - HELD_OUT, count)]
        if not perplexities:
            batch = _collated(held_out, collate)
            perplexities = {"parent": _perplexity(teacher, batch), "converted": _perplexity(model, batch)}
        arguments = training_arguments(stage, work / name, seed=recipe.seed)
        if name == "transfer":
            before = _divergences(model, teacher, held_out, collate)
            results.append(
                transfer_attention(
                    model,
                    teacher,
                    training,
                    arguments,
                    own_inputs=stage.own_inputs,
                    output_weight=stage.output_weight,
                    collate=collate,
                    resume=resume,
                    progress=progress,
                )
            )
            after = _divergences(model, teacher, held_out, collate)
            maps = compare_attention(model, teacher, batch)
        else:
            results.append(
                distill_logits(
                    model,
                    teacher,
                    training,
                    arguments,
                    rfa_rate=stage.rfa_learning_rate,
                    kl_weight=stage.kl_weight,
                    dropout=stage.dropout,
                    lora_rank=stage.lora_rank,
                    collate=collate,
                    resume=resume,
                    progress=progress,
                )
            )
        perplexities[results[-1].name] = _perplexity(model, batch)
    return DistillationReport(
        command, data_name(data), recipe, before, after, tuple(results), perplexities, tuple(maps)
    )


def _collated(items: list[Any], collate: Any) -> Inputs:
    return collate(items) if collate else {name: torch.stack([item[name] for item in items]) for name in items[0]}


@torch.no_grad()
def _perplexity(model: PreTrainedModel, batch: Inputs) -> float:
    """Return the perplexity of a batch's labels."""
    loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}, use_cache=False).loss
    return math.exp(min(700.0, float(loss)))


@torch.no_grad()
def _divergences(
    model: PreTrainedModel, teacher: PreTrainedModel, items: list[Any], collate: Any
) -> dict[str, tuple[float, ...]]:
    """Return the divergence of every layer's heads on some items."""
    inputs = _collated(items, collate)
    moved: Any = teacher.to(model.device)  # type: ignore[arg-type]
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    return {name: tuple(loss.tolist()) for name, loss in transfer_losses(model, moved, inputs).items()}


def _write(
    model: PreTrainedModel, tokenizer: Any, report: DistillationReport, checkpoint: str, folder: Path, name: str
) -> None:
    """Write the distilled checkpoint, its report and its card, which calls it by ``name``."""
    source = Path(checkpoint)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) if source.is_dir() else {}
    stored = getattr(torch, config.get("dtype") or "float32")
    if stored != torch.float32:
        model.to(stored)
        for layer in rfa_layers(model).values():  # φ and gates stay in float32
            for module in (layer.feature_map, layer.gate):
                if module is not None:
                    module.float()
    model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    copy_referred(checkpoint, folder)
    (folder / "distillation.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    report.plot(folder / "distillation.png")
    if report.after:
        stages = {"before": report.before, "attention transfer": report.after}
        draw_attention(folder / "attention-distilled.png", stages, list(report.maps))
    section = f"## How it was distilled\n\n```bash\n{report.command}\n```\n\n{rows_of(report.rows())}\n\n"
    section += "![loss](distillation.png)\n"
    section += "\n![attention](attention-distilled.png)\n" if report.after else ""
    card = trained_card(model, name=name, source=checkpoint, summary=report.summary(), section=section)
    card.save(folder / "README.md")
