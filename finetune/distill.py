"""Distillation from end to end: checkpoint, teacher and text in, distilled checkpoint with its report out."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, default_data_collator

from hf_rfa.convert.configuration import import_words
from hf_rfa.convert.inputs import Inputs, shifted_positions
from hf_rfa.convert.pipeline import MAX_SHARD_SIZE
from hf_rfa.convert.plan import Progress
from hf_rfa.errors import InputError
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.evaluation.perplexity import score_labels, shown
from hf_rfa.families import FAMILIES, has_rotary_positions, position_count
from hf_rfa.inference.loading import check_tokens, kind_of, load_model, read_config
from hf_rfa.inference.transcription import load_feature_extractor
from hf_rfa.io.audio_io import read_utterances
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.no_features import feature_map_class
from hf_rfa.models.rfa_classes import own_prefixes

from .arguments import check_minutes, processes_started
from .card import data_name, trained_card, trained_folder
from .data import (
    PairCollator,
    SpeechCollator,
    load_pairs,
    padding_right,
    rows_to_learn,
    speech_rows,
    text_blocks,
    token_pairs,
)
from .recipe import Recipe
from .run_folder import check_run, check_settings
from .trainers import StageResult, train_stage, transfer_losses

#: Items at the end of the data that are not trained on: perplexities and divergences are measured on them.
HELD_OUT = 8


@dataclass
class DistillationReport:
    """The figures of one distillation."""

    command: str  # the command that repeats it
    data: str  # name of the text that was learned from
    recipe: Recipe  # its settings
    # KL(softmax weights ‖ weights that the features imply) by layer and head on held-out data, in nats per query, before
    # training
    divergence_before: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # the same after attention transfer; empty if that stage was left out
    divergence_after: dict[str, tuple[float, ...]] = field(default_factory=dict)
    stages: list[StageResult] = field(default_factory=list)  # the course of each stage
    # on the held-out items: of the teacher, of the converted model, and after each stage
    perplexities: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the course of the training in words."""
        words = {
            "attention transfer": "feature maps and gates learned the teacher's attention",
            "end to end": "the whole model learned the teacher's outputs",
        }
        stages = ", then ".join(f"{words[stage.name]} ({stage.name}, {stage.steps:,} steps)" for stage in self.stages)
        others = "" if self.stages[-1].name == "end to end" else " All other weights were left as they were."
        return f"distilled on {self.data}: {stages}.{others}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures as (name, value) pairs, for the table and the model card."""
        rows = []
        if self.divergence_after:
            both = (self.divergence_before, self.divergence_after)
            before, after = (fmean(sum(heads.values(), ())) for heads in both)
            rows.append(("KL to the softmax weights, held-out text", f"{before:.3f} nats, {after:.3f} after transfer"))
        end_to_end = self.recipe.end_to_end
        rates = {
            "attention transfer": f"{self.recipe.transfer.learning_rate:g}",
            "end to end": f"{end_to_end.learning_rate:g}, of feature maps and gates {end_to_end.rfa_learning_rate:g}",
        }
        for stage in self.stages:
            losses = [entry["loss"] for entry in stage.log if "loss" in entry]
            if losses:
                course = f"loss {losses[0]:.3f} → {losses[-1]:.3f}, learning rate {rates[stage.name]}"
                rows.append((f"{stage.name}, {stage.steps:,} steps", course))
        perplexities = ", ".join(f"{name} {shown(value)}" for name, value in self.perplexities.items())
        return [*rows, (f"perplexity of the {HELD_OUT} items held out", perplexities)]


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
    max_minutes: float | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> DistillationReport:
    """Distil a converted checkpoint from the softmax model that it was made from.

    The training computes in float32. Its checkpoints are in ``.NAME.training`` beside the destination until it is finished.

    Args:
        checkpoint: the RFA checkpoint.
        destination: folder to write.
        teacher: the softmax model, a folder or a hub name.
        data: text to train on (.txt or .jsonl, plain or .gz); for a model with an encoder the sources, one a line, or a
            ``.jsonl`` file with ``source`` and ``target``; for one that reads audio speech (`read_utterances`), of which the
            teacher's transcripts serve where there is no text.
        references: outputs that belong to the sources, one a line.
        recipe: name or file of a recipe, or a `Recipe`.
        transfer_steps: steps of attention transfer, instead of the recipe's.
        end_to_end_steps: steps of the end-to-end stage, instead of the recipe's.
        max_minutes: end the training after so many minutes, all stages together, if its steps are not over before; learning
            rates fall by the time then.
        resume: continue an interrupted run.
        overwrite: replace a checkpoint that is at ``destination``.
        command: the command that the model card states; None stands for these arguments.
        progress: called with (name, number of steps) when something begins, a stage of the training for instance, and with
            (None, 1) when a step is done.

    Returns:
        The figures of the distillation.

    Raises:
        InputError: if an argument cannot be used; no training has started then.
    """
    report_progress: Progress = progress or (lambda step, total: None)
    check_one_process()
    check_minutes(max_minutes)
    destination = Path(destination)
    settings = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    settings = settings.with_steps(transfer=transfer_steps, end_to_end=end_to_end_steps)
    if not any(stage.steps for stage in settings.stages().values()):
        raise InputError("no stage of the recipe has any steps: there is nothing to train.")
    sources = (Path(checkpoint), Path(teacher))
    work = check_run(destination, sources=sources, resume=resume, overwrite=overwrite)

    report_progress("loading the models", 1)
    kind = kind_of(read_config(checkpoint))
    model, tokenizer = load_model(str(checkpoint), kind=kind, dtype="float32")
    softmax_model, _ = load_model(str(teacher), kind=kind, dtype="float32", need_tokenizer=False)
    _check_teacher(model, softmax_model, str(checkpoint), str(teacher), transfer=settings.transfer.steps > 0)
    extractor = load_feature_extractor(checkpoint) if kind == "speech" else None
    settings = settings.resolve(model.config, min(map(position_count, (model.config, softmax_model.config))))
    report_progress("reading the data", 1)
    if kind == "causal":
        held_out, learned = _load_text(model, tokenizer, data, references, settings)
    else:
        held_out, learned = _load_pairs(softmax_model, tokenizer, extractor, data, references, settings)
    paths = {"teacher": teacher, "data": data, "references": references}
    described = {name: None if path is None else str(Path(path).resolve()) for name, path in paths.items()}
    check_settings(work, described | {"recipe": asdict(settings)}, resume=resume)
    steps = {"transfer_steps": transfer_steps, "end_to_end_steps": end_to_end_steps, "max_minutes": max_minutes}
    options = {**paths, "recipe": recipe, **steps}
    command = command or _command(checkpoint, destination, model.config, **options)
    report = DistillationReport(command, data_name(str(data)), settings)

    collate: Any = default_data_collator
    if extractor is not None:
        collate = SpeechCollator(extractor, tokenizer)
    elif kind == "seq2seq":
        collate = PairCollator(padding_right(tokenizer), model=model)
    batch: Inputs = collate([held_out[index] for index in range(HELD_OUT)])
    # A row at a time: logits take the most memory.
    rows = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(HELD_OUT)]
    for name, scored in (("teacher", softmax_model), ("converted", model)):
        report_progress(f"scoring the {name} model", 1)
        report.perplexities[name] = score_labels(scored, rows).perplexity
    end = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    for name, dataset in learned.items():
        if name == "transfer":
            report_progress("comparing attention weights", 1)
            report.divergence_before = _divergences(model, softmax_model, batch)
        result = train_stage(
            cast(Any, name),
            model,
            softmax_model,
            dataset,
            settings.stages()[name],
            work / name,
            seed=settings.seed,
            collate=collate,
            max_seconds=None if end is None else max(1.0, end - time.monotonic()),
            resume=resume,
            progress=report_progress,
        )
        if name == "transfer":
            report_progress("comparing attention weights", 1)
            report.divergence_after = _divergences(model, softmax_model, batch)
        report.stages.append(result)
        report_progress("scoring the trained model", 1)
        report.perplexities[result.name] = score_labels(model, rows).perplexity
    report_progress("writing", 1)
    table = markdown_table(("", ""), report.rows())
    section = f"## How it was distilled\n\n```bash\n{report.command}\n```\n\n{table}\n"
    card = trained_card(model, destination, str(checkpoint), summary=report.summary(), section=section)
    with trained_folder(destination, str(checkpoint), card, {"distillation.json": asdict(report)}) as folder:
        if extractor is not None:
            extractor.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        rfa_prefixes, dtype = own_prefixes(model), cast(torch.dtype, read_config(checkpoint).dtype) or torch.float32
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and not name.startswith(rfa_prefixes):  # which stay in float32
                tensor.data = tensor.data.to(dtype)
        model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    return report


def check_one_process() -> None:
    """Raise an `InputError` if several processes were started: each would train alone, and write the same folder."""
    if (count := processes_started()) > 1:
        raise InputError(
            f"{count} processes were started, but distillation runs in one. Start it without torchrun or accelerate launch."
        )


def _check_teacher(
    model: PreTrainedModel, teacher: PreTrainedModel, checkpoint: str, teacher_name: str, *, transfer: bool
) -> None:
    """Raise an `InputError` if a model cannot learn from a teacher, by attention transfer if ``transfer``."""
    config: Any = model.config
    if not isinstance(config, RFAConfigMixin):
        raise InputError(
            f"{checkpoint} is a {config.model_type} model, not an RFA checkpoint. Convert it first (hf-rfa convert)."
        )
    if isinstance(teacher.config, RFAConfigMixin):
        raise InputError(
            f"the teacher {teacher_name} is an RFA checkpoint. Pass the softmax model that {checkpoint} was made from."
        )
    rfa_prefixes = own_prefixes(model)
    if transfer and feature_map_class(config.feature_map).reads_means:
        raise InputError(
            f"attention transfer cannot train feature_map={config.feature_map!r}, which has no weight of its own for every "
            "token. Pass --recipe pretrained or --transfer-steps 0 to train the whole model."
        )
    if transfer and not any(name.startswith(rfa_prefixes) for name, _ in model.named_parameters()):
        raise InputError(
            f"{checkpoint} has nothing that attention transfer could train: feature_map={config.feature_map!r} has no "
            "parameters, and there is no gate. Pass --recipe pretrained or --transfer-steps 0 to train the whole model, or "
            "convert it with another map or with a gate (--config gate=true)."
        )
    teacher_parameters = dict(teacher.named_parameters())
    positions = {family.position_embedding for family in FAMILIES.values()}
    for name, parameter in model.named_parameters():
        if name.startswith(rfa_prefixes):
            continue
        is_position = not positions.isdisjoint(name.split("."))
        other = teacher_parameters.get(name)
        if other is None or (other.shape != parameter.shape and not is_position):
            raise InputError(
                f"{checkpoint} was not made from {teacher_name}: tensor {name} is missing there, or of another shape. "
                "Pass the softmax model that was converted."
            )
        if transfer and not is_position and not torch.allclose(other, parameter, atol=1e-6, rtol=5e-3):
            raise InputError(
                f"{checkpoint} no longer has the weights of {teacher_name} (tensor {name} differs), so that its attention "
                "cannot be taught by transfer. Pass --transfer-steps 0, or the checkpoint as it was converted."
            )


def _load_text(
    model: PreTrainedModel, tokenizer: Any, data: Any, references: Any, recipe: Recipe
) -> tuple[Dataset, dict[str, Dataset]]:
    """Return the last `HELD_OUT` blocks of a text, cut as for the first stage, and of every stage those before them."""
    if references is not None:
        raise InputError("references belong to a model with an encoder; this model is a decoder.")
    ids = tokenize(tokenizer, read_documents(data))
    check_tokens(ids.tolist(), model.config)
    stages = {name: stage for name, stage in recipe.stages().items() if stage.steps}
    lengths = {name: cast(int, stage.block_length) for name, stage in stages.items()}
    first, size = next(iter(lengths.items()))
    end = (len(ids) // size - HELD_OUT) * size
    if end <= 0:
        raise InputError(f"the data gives {len(ids) // size} items for {first}; more than {HELD_OUT} are needed.")

    def blocks(ids: Tensor, length: int, share: float = 0.0) -> Dataset:
        rows = text_blocks(ids, length, repeating_share=share, seed=recipe.seed)
        if not has_rotary_positions(model.config):
            return rows
        positions = shifted_positions(model.config, len(rows), length, seed=recipe.seed)
        return rows.add_column("position_ids", list(positions.numpy()))

    for name, length in lengths.items():
        if length > end:
            raise InputError(
                f"the data gives no block of {length} tokens for {name} before the {HELD_OUT} that are held out: more text "
                "is needed."
            )
    learned = {name: blocks(ids[:end], lengths[name], stage.repeating_share) for name, stage in stages.items()}
    return blocks(ids[end:], size), learned


def _load_pairs(
    teacher: PreTrainedModel, tokenizer: Any, extractor: Any, data: Any, references: Any, recipe: Recipe
) -> tuple[Dataset, dict[str, Dataset]]:
    """Return the last `HELD_OUT` pairs of texts, or utterances for an extractor, and of every stage those before them."""
    lengths = {name: cast(int, stage.block_length) for name, stage in recipe.stages().items() if stage.steps}
    if extractor is None:
        texts = load_pairs(data, references)
        rows = {
            name: rows_to_learn(token_pairs(texts, tokenizer, length=length), str(data))
            for name, length in lengths.items()
        }
    elif references is None:
        length = min(lengths.values())
        rows = dict.fromkeys(lengths, speech_rows(teacher, tokenizer, extractor, read_utterances(data), length=length))
    else:
        raise InputError("put the transcripts into the .jsonl file, as the text of each utterance.")
    first, dataset = next(iter(rows.items()))
    for column in {"input_ids", "decoder_input_ids", "labels"}.intersection(dataset.column_names):
        check_tokens((index for row in dataset[column] for index in row), teacher.config)
    count = len(dataset) - HELD_OUT
    if count < 1:
        raise InputError(f"the data gives {len(dataset)} items for {first}; more than {HELD_OUT} are needed.")
    held_out = dataset.select(range(count, len(dataset)))
    return held_out, {name: each.select(range(count)) for name, each in rows.items()}


def _command(checkpoint: str | Path, destination: Path, config: Any, **options: object) -> str:
    """Return the command line that stands for the arguments of `distill`, of a model with a configuration."""
    words = ["hf-rfa", "distill", str(checkpoint), "--output", str(destination)]
    for name, value in options.items():
        if value is not None and not isinstance(value, Recipe):
            words += ["--" + name.replace("_", "-"), str(value)]
    return shlex.join(words + import_words(config))


@torch.no_grad()
def _divergences(model: PreTrainedModel, teacher: PreTrainedModel, batch: Inputs) -> dict[str, tuple[float, ...]]:
    """Return the divergence of every layer's heads on a batch."""
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    return {name: tuple(loss.tolist()) for name, loss in transfer_losses(model, teacher, inputs)}
