"""Distillation from end to end: checkpoint, teacher and text in, distilled checkpoint with its report out."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import PreTrainedModel, default_data_collator

from hf_rfa.convert.configuration import import_words
from hf_rfa.convert.inputs import Inputs, shifted_positions
from hf_rfa.convert.pictures import compare_attention, draw_attention
from hf_rfa.convert.pipeline import MAX_SHARD_SIZE, Progress
from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import score_labels
from hf_rfa.families import FAMILIES, has_rotary_positions, position_count
from hf_rfa.inference.loading import check_tokens, kind_of, load_model, read_config
from hf_rfa.inference.transcription import load_feature_extractor
from hf_rfa.io.audio_io import read_utterances
from hf_rfa.io.text_io import read_documents
from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.rfa_classes import own_prefixes

from .arguments import check_minutes, processes_started
from .card import data_name, table_of, trained_card, trained_folder
from .data import (
    PairCollator,
    SpeechCollator,
    joined_blocks,
    load_pairs,
    padding_right,
    rows_to_learn,
    speech_rows,
    token_pairs,
)
from .recipe import Recipe, Stage
from .report import HELD_OUT, DistillationReport, plot_losses
from .run_folder import check_run, check_settings, read_settings
from .trainers import train_stage, transfer_losses


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
    positions = min(map(position_count, (model.config, softmax_model.config)))
    settings = settings.resolve(model.config, positions, read_settings(work).get("recipe"))
    report_progress("reading the data", 1)
    stages = settings.stages()
    if extractor is None:
        data_by_stage = {
            name: _load(model, tokenizer, data, references, stage, settings.seed)
            for name, stage in stages.items()
            if stage.steps
        }
    else:
        data_by_stage = _load_speech(softmax_model, tokenizer, extractor, data, references, stages)
    held_out, learned = _hold_out(data_by_stage, settings, pairs=kind != "causal")
    paths = {"teacher": teacher, "data": data, "references": references}
    described = {name: None if path is None else str(Path(path).resolve()) for name, path in paths.items()}
    check_settings(work, described | {"recipe": asdict(settings)}, resume=resume)
    options: dict[str, Any] = {
        **paths,
        "recipe": recipe,
        "transfer_steps": transfer_steps,
        "end_to_end_steps": end_to_end_steps,
    }
    options["max_minutes"] = max_minutes
    command = command or _command(checkpoint, destination, model.config.feature_map, **options)
    report = DistillationReport(command, data_name(str(data)), settings)

    collate: Any = default_data_collator
    if extractor is not None:
        collate = SpeechCollator(extractor, tokenizer.eos_token_id)
    elif kind == "seq2seq":
        collate = PairCollator(padding_right(tokenizer), model=model)
    batch: Inputs = collate([held_out[index] for index in range(HELD_OUT)])
    rows = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(HELD_OUT)]
    for who, scored in (
        ("teacher", softmax_model),
        ("converted", model),
    ):  # a row at a time: logits take the most memory
        report_progress(f"scoring the {who} model", 1)
        report.perplexities[who] = score_labels(scored, rows).perplexity
    end = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    for name, dataset in learned.items():
        if name == "transfer":
            report_progress("comparing attention weights", 1)
            report.before = _divergences(model, softmax_model, batch)
        result = train_stage(
            cast(Any, name),
            model,
            softmax_model,
            dataset,
            stages[name],
            work / name,
            seed=settings.seed,
            collate=collate,
            max_seconds=None if end is None else max(1.0, end - time.monotonic()),
            resume=resume,
            progress=report_progress,
        )
        if name == "transfer":
            report_progress("comparing attention weights", 1)
            report.after = _divergences(model, softmax_model, batch)
            report.maps = compare_attention(model, softmax_model, batch)
        report.stages.append(result)
        report_progress("scoring the trained model", 1)
        report.perplexities[result.name] = score_labels(model, rows).perplexity
    report_progress("writing", 1)
    with trained_folder(destination, str(checkpoint)) as folder:
        if extractor is not None:
            extractor.save_pretrained(folder)
        _write(model, tokenizer, report, str(checkpoint), folder, destination.resolve().name)
    return report


def check_one_process() -> None:
    """Raise an `InputError` if several processes were started: each would train alone, and write the same folder."""
    if processes_started() > 1:
        raise InputError(
            f"{processes_started()} processes were started, but distillation runs in one. Start it without torchrun or "
            "accelerate launch."
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
    if transfer and not any(name.startswith(rfa_prefixes) for name, _ in model.named_parameters()):
        raise InputError(
            f"{checkpoint} has nothing that attention transfer could train: feature_map={config.feature_map!r} has no "
            "parameters, and there is no gate. Pass --recipe pretrained or --transfer-steps 0 to train the whole model, or "
            "convert it with another map or with --gate."
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


def _load(model: PreTrainedModel, tokenizer: Any, data: Any, references: Any, stage: Stage, seed: int) -> Dataset:
    """Return the training data of a stage: blocks of a text, or pairs for a model with an encoder."""
    length = cast(int, stage.block_length)
    if kind_of(model.config) == "seq2seq":
        pairs = rows_to_learn(token_pairs(load_pairs(data, references), tokenizer, length=length), str(data))
        for name in ("input_ids", "labels"):
            check_tokens((index for row in pairs[name] for index in row), model.config)
        return pairs
    if references is not None:
        raise InputError("references belong to a model with an encoder; this one is a decoder that stands alone.")
    repeats: dict[str, Any] = {"repeating_share": stage.repeating_share, "seed": seed, "last": HELD_OUT}
    blocks = joined_blocks(tokenizer, read_documents(data), length, **repeats)
    check_tokens((int(row.max()) for row in blocks["input_ids"]), model.config)
    if not has_rotary_positions(model.config):
        return blocks
    positions = shifted_positions(model.config, len(blocks), length, seed=seed)
    return blocks.add_column("position_ids", list(positions.numpy()))


def _load_speech(
    teacher: PreTrainedModel, tokenizer: Any, extractor: Any, data: Any, references: Any, stages: dict[str, Stage]
) -> dict[str, Dataset]:
    """Return the training data of every stage that has steps, of a model that reads audio; texts are written once."""
    if references is not None:
        raise InputError("what is said belongs into the .jsonl file, beside the path of each utterance, as text.")
    lengths = [cast(int, stage.block_length) for stage in stages.values() if stage.steps]
    rows = speech_rows(teacher, tokenizer, extractor, read_utterances(data), length=min(lengths))
    for name in ("decoder_input_ids", "labels"):
        check_tokens((index for row in rows[name] for index in row), teacher.config)
    return {name: rows for name, stage in stages.items() if stage.steps}


def _hold_out(datasets: dict[str, Dataset], recipe: Recipe, *, pairs: bool) -> tuple[Dataset, dict[str, Dataset]]:
    """Return the last `HELD_OUT` items of the first stage, and what every stage learns: its items that end before those.

    Blocks of another length end elsewhere in the text; pairs are the same in all stages.
    """
    stages = recipe.stages()
    size = {name: 1 if pairs else cast(int, stages[name].block_length) for name in datasets}
    first, dataset = next(iter(datasets.items()))
    before = len(dataset) - HELD_OUT
    if before < 1:
        raise InputError(f"the data gives {len(dataset)} items for {first}; more than {HELD_OUT} are needed.")
    held_out, learned = dataset.select(range(before, len(dataset))), {}
    for name, dataset in datasets.items():
        count = before * size[first] // size[name]
        if count < 1:
            what = f"no block of {size[name]} tokens for {name} before the {HELD_OUT} that are held out"
            raise InputError(f"the data gives {what}: more text is needed.")
        learned[name] = dataset.select(range(count))
    return held_out, learned


def _command(checkpoint: str | Path, destination: Path, feature_map: str, **options: object) -> str:
    """Return the command line that stands for the arguments of `distill`, of a model with such a feature map."""
    words = ["hf-rfa", "distill", str(checkpoint), "--output", str(destination)]
    for name, value in options.items():
        if value is not None and not isinstance(value, Recipe):
            words += ["--" + name.replace("_", "-"), str(value)]
    return shlex.join(words + import_words(feature_map))


@torch.no_grad()
def _divergences(model: PreTrainedModel, teacher: PreTrainedModel, batch: Inputs) -> dict[str, tuple[float, ...]]:
    """Return the divergence of every layer's heads on a batch."""
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    return {name: tuple(loss.tolist()) for name, loss in transfer_losses(model, teacher, inputs)}


def _write(
    model: PreTrainedModel, tokenizer: Any, report: DistillationReport, checkpoint: str, folder: Path, name: str
) -> None:
    """Write the distilled checkpoint in the precision that it had, its report, and its card, which calls it ``name``."""
    dtype = read_config(checkpoint).dtype or torch.float32
    rfa_prefixes = own_prefixes(model)
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not key.startswith(rfa_prefixes):  # these stay in float32
            tensor.data = tensor.data.to(dtype)
    model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    (folder / "distillation.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    plot_losses(folder / "distillation.png", {stage.name: stage.log for stage in report.stages})
    section = f"## How it was distilled\n\n```bash\n{report.command}\n```\n\n{table_of(report.rows())}\n\n"
    section += "![loss](distillation.png)\n"
    if report.after:
        stages = {"before": report.before, "attention transfer": report.after}
        draw_attention(folder / "attention-distilled.png", stages, report.maps)
        section += "\n![attention](attention-distilled.png)\n"
    trained_card(model, name=name, source=checkpoint, summary=report.summary(), section=section).save(
        folder / "README.md"
    )
