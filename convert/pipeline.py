"""The conversion, stage by stage: check, configure, load, calibrate, measure, write and verify."""

from __future__ import annotations

import gc
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.evaluation.perplexity import score_labels
from hf_rfa.families import reads_audio
from hf_rfa.inference.devices import find_device
from hf_rfa.inference.loading import check_tokens, check_vocabulary, load_tokenizer
from hf_rfa.inference.transcription import load_feature_extractor
from hf_rfa.io.atomic_io import check_destination, check_space, new_folder, remove_leftovers
from hf_rfa.io.audio_io import read_utterances
from hf_rfa.io.text_io import read_documents
from hf_rfa.process_memory import give_back_memory

from .calibrate.calibration import calibrate, output_at_hand
from .calibrate.far_outputs import FITTED_FROM
from .calibrate.retrieval_heads import find_retrieval_heads
from .calibrate.sensitivity import LayerSensitivity, keep_softmax, measure_sensitivity
from .card import model_card
from .checkpoint.base_model import extend_positions, rfa_layers
from .checkpoint.kept_weights import check_kept, digests
from .checkpoint.loading import load_base_model, load_converted, load_models, probe_logits, quiet
from .checkpoint.source import Checkpoint, open_checkpoint
from .configuration import import_words, rfa_config, with_more_positions
from .inputs import (
    AUDIO,
    FEATURE_TEXT_TOKENS,
    MEASURED_TOKENS,
    SLOT_TEXT_TOKENS,
    TEXT_TOKENS,
    Inputs,
    add_outputs,
    batches,
    calibration_inputs,
    first_rows,
    speech_inputs,
)
from .options import ConversionOptions
from .pictures import HeadMap, compare_attention, draw_attention
from .presets import Trained, fits_features, with_preset
from .report import ConversionReport, Perplexities, check_perplexity, model_figures, notes

#: Most bytes of a shard of the result, which is held in memory while it is written.
MAX_SHARD_SIZE = 2_000_000_000
#: Largest difference between the logits of the model in memory and of the reloaded one, relative to the largest logit.
MAX_RELOAD_ERROR = 1e-5

#: Files that say how audio becomes features, and what else a processor holds beside a tokenizer.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
#: Files of a model within sentence-transformers, of which the first names the folders of what follows it.
SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")

#: Called as the work goes on: (name of a step, its number of parts) when it begins, (None, 1) when a part is done.
Progress = Callable[[str | None, int], None]


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
    to ``destination``, and compared with the model in memory and with the weights that transformers loads from the source; on
    any error nothing is left there.

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
    destination = Path(destination)
    report_progress = progress or (lambda step, total: None)
    options = _resolve_options(options, fields)
    words = ["hf-rfa", "convert", str(checkpoint), str(destination), *options.words()]
    command = command or shlex.join(words + import_words(options.feature_map))

    report_progress("checking the checkpoint", 1)
    base = with_more_positions(_check(checkpoint, destination, options, overwrite=overwrite), options)
    _check_force(options, trained)
    options = with_preset(base, options, trained)
    config = rfa_config(base, options)
    tokenizer, no_tokenizer, inputs = _prepare_inputs(base, options, trained=trained)

    heads, earlier = None, None
    if isinstance(options.retrieval_heads, int) and options.retrieval_heads:
        heads, earlier = find_retrieval_heads(base, config, options, inputs, options.retrieval_heads, report_progress)
        options = replace(options, retrieval_heads=[list(head) for head in heads.heads])
        config = rfa_config(base, options)

    report_progress("loading the weights", 1)
    model, base_model = load_models(base, config, options)
    if options.calibrate_on is not None:
        inputs = _add_labels(base_model, inputs, report_progress)

    measured, swapped = first_rows(inputs, MEASURED_TOKENS), None
    if "labels" in measured:
        report_progress("scoring before calibration", 1)
        swapped = score_labels(model, batches(measured))
    if earlier is not None:
        earlier.carry_to(model)
        gains, output = earlier.calibration
    else:
        report_progress("calibrating", len(rfa_layers(model)))
        gains, output = calibrate(
            model, base_model, inputs, on_layer=lambda: report_progress(None, 1), to_train=trained is not None
        )
    sensitivities: list[LayerSensitivity] = []
    if options.keep_softmax:
        report_progress("measuring layers", len(rfa_layers(model)) * len(batches(measured)))
        sensitivities = measure_sensitivity(model, base_model, measured, on_batch=lambda: report_progress(None, 1))
        model = keep_softmax(model, sensitivities, options.keep_softmax)

    perplexities = None
    if swapped is not None:
        report_progress("scoring the base model", 1)
        with output_at_hand(base_model, measured, output):
            softmax = score_labels(base_model, batches(measured))
        report_progress("scoring the result", 1)
        calibrated = score_labels(model, batches(measured))
        perplexities = Perplexities(
            softmax=softmax.perplexity,
            swapped=swapped.perplexity,
            calibrated=calibrated.perplexity,
            tokens=softmax.tokens,
            own_outputs=config.is_encoder_decoder,
        )
        if trained is None and not options.force:
            check_perplexity(perplexities, config)
    maps = []
    if gains:
        report_progress("comparing attention weights", 1)
        maps = compare_attention(model, base_model, measured)
    base_memory = cache_memory(base_model)
    del base_model
    gc.collect()
    give_back_memory()
    if options.max_positions is not None:
        extend_positions(base.family, model, options.max_positions)

    report_progress("writing", 1)
    with new_folder(destination) as folder:
        config, model_class, expected = model.config, type(model), probe_logits(model, options.seed)
        figures = model_figures(model, gains, base_memory, base)
        _write(model, tokenizer, base, folder)
        del model
        gc.collect()
        report_progress("checking the result", 1)
        report = ConversionReport(
            source=str(checkpoint),
            source_revision=base.revision,
            destination=str(destination),
            command=command,
            gains=tuple(gains),
            sensitivities=tuple(sensitivities),
            retrieval_heads=heads,
            perplexities=perplexities,
            max_logit_difference=_verify(base, options, model_class, folder, expected),
            notes=notes(base, config, options, no_tokenizer, perplexities),
            **figures,
        )
        _write_report(report, base, maps, folder)
    return report


def _resolve_options(options: ConversionOptions | None, fields: dict[str, Any]) -> ConversionOptions:
    """Return options with some fields replaced."""
    try:
        return replace(options or ConversionOptions(), **fields)
    except ValueError as error:
        raise InputError(str(error)) from error


def _check_force(options: ConversionOptions, trained: Trained | None) -> None:
    """Raise an `InputError` where there is nothing to force."""
    if options.force and (options.calibrate_on is None or trained is not None):
        why = "nothing is measured without a text (--calibrate)" if trained is None else "training follows"
        raise InputError(f"force=True has no effect: {why}, and then no model is refused. Leave it out.")


def _check(name: str | Path, destination: Path, options: ConversionOptions, *, overwrite: bool) -> Checkpoint:
    """Return the checkpoint, after checking it, the destination and the space on its disk."""
    checkpoint = open_checkpoint(
        name,
        revision=options.revision,
        allow_pickle=options.allow_pickle,
        device=find_device(options.device),
    )
    _files_beside(checkpoint.folder)  # whose list is read before there is work to lose
    check_destination(destination, overwrite=overwrite, sources=(checkpoint.folder,))
    remove_leftovers(destination.resolve())  # which may be what fills the disk
    check_space(destination, checkpoint.num_bytes // (1 if options.dtype in ("auto", "float32") else 2))
    return checkpoint


def _prepare_inputs(
    checkpoint: Checkpoint, options: ConversionOptions, *, trained: Trained | None
) -> tuple[Any, str | None, Inputs]:
    """Return the tokenizer or None, the reason why there is none, and the inputs to calibrate on."""
    if options.calibration_tokens is not None and options.calibrate_on is None:
        raise InputError(
            "calibration_tokens are of a text, and there is none: pass one (--calibrate), or leave them out."
        )
    tokenizer, no_tokenizer = load_tokenizer(checkpoint.folder)
    fits = fits_features(options, trained)
    default = FEATURE_TEXT_TOKENS if fits else SLOT_TEXT_TOKENS if options.num_slots else TEXT_TOKENS
    tokens = options.calibration_tokens or default
    if options.calibrate_on is not None and reads_audio(checkpoint.config):
        extractor = load_feature_extractor(checkpoint.folder, checkpoint.name)
        utterances = read_utterances(options.calibrate_on)
        return tokenizer, no_tokenizer, speech_inputs(extractor, utterances, tokens=tokens)
    documents = None if options.calibrate_on is None else list(read_documents(options.calibrate_on))
    if documents is not None and tokenizer is None:
        raise InputError(
            f"cannot calibrate on {options.calibrate_on} with {checkpoint.name}: {no_tokenizer}. Leave the text out."
        )
    if tokenizer is not None:
        check_vocabulary(tokenizer, checkpoint.config, checkpoint.name)
    inputs = calibration_inputs(checkpoint.config, tokenizer, documents, seed=options.seed, tokens=tokens)
    if documents is not None:
        check_tokens(inputs["input_ids"].unique().tolist(), checkpoint.config)
    of_decoder = not checkpoint.config.is_encoder_decoder
    if fits and of_decoder and (count := inputs["input_ids"].numel()) < FITTED_FROM:
        raise InputError(
            f"feature_map={options.feature_map} is fitted to at least {FITTED_FROM:,} tokens of text, and there are "
            f"{count:,}. Pass a longer text (--calibrate, --calibration-tokens), or another map, such as positive."
        )
    return tokenizer, no_tokenizer, inputs


def _add_labels(base_model: PreTrainedModel, inputs: Inputs, report_progress: Progress) -> Inputs:
    """Return the inputs of a text with its labels, where the model has a head that predicts tokens."""
    config: Any = base_model.config
    if config.is_encoder_decoder:
        report_progress("transcribing" if AUDIO in inputs else "answering the text", 1)
        return add_outputs(base_model, inputs)
    return inputs | {"labels": inputs["input_ids"]} if hasattr(base_model, "lm_head") else inputs


def _write(model: PreTrainedModel, tokenizer: Any, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the model, in shards no larger than the checkpoint's if that has several, with tokenizer and processor if any."""
    sizes = [path.stat().st_size for path in checkpoint.weight_files]
    with quiet():
        model.save_pretrained(
            folder, max_shard_size=min(MAX_SHARD_SIZE, max(sizes) if len(sizes) > 1 else MAX_SHARD_SIZE)
        )
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for path in _files_beside(checkpoint.folder):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif path.is_file():
            shutil.copyfile(path, folder / path.name)


def _files_beside(folder: Path) -> list[Path]:
    """Return the files and folders that a converted model needs beside its weights and tokenizer as its base model does.

    Some of them may not exist.

    Raises:
        InputError: if sentence-transformers' list of modules is none.
    """
    names, modules = [*PROCESSOR_FILES], folder / SENTENCE_FILES[0]
    if modules.is_file():
        try:
            parts = [Path(part["path"]).name for part in json.loads(modules.read_text(encoding="utf-8"))]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{modules} is not a list of the modules of sentence-transformers ({error!r}). Mend it, or remove it where "
                "the model is none of theirs."
            ) from error
        names += [*SENTENCE_FILES, *filter(None, parts)]
    return [folder / name for name in names]


def _write_report(report: ConversionReport, checkpoint: Checkpoint, maps: list[HeadMap], folder: Path) -> None:
    """Write the model card, the figures, and the picture of the layers that calibration reached."""
    model_card(report, checkpoint).save(folder / "README.md")
    (folder / "conversion.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    if report.gains:
        stages = {"swap": {gain.name: gain.before for gain in report.gains}}
        stages["calibration"] = {gain.name: gain.after for gain in report.gains}
        draw_attention(folder / "attention.png", stages, maps)


def _verify(
    checkpoint: Checkpoint,
    options: ConversionOptions,
    model_class: Any,
    folder: Path,
    expected: Tensor,
) -> float:
    """Load the written checkpoint; return the largest difference of its logits from those before it was written.

    Its weights are compared with those that transformers loads from the source.
    """
    base_model = load_base_model(checkpoint, options)
    source = digests(base_model)
    if options.max_positions is not None:
        positions = checkpoint.family.position_embeddings(base_model)
        for name in (name for name, module in base_model.named_modules() if module in positions):
            del source[f"{name}.weight"]
    del base_model
    give_back_memory()
    model = load_converted(checkpoint, model_class, folder, find_device(options.device))
    check_kept(digests(model), source, checkpoint.name)
    logits = probe_logits(model, options.seed)
    difference = float((logits - expected).abs().max())
    if not torch.isfinite(logits).all() or difference > MAX_RELOAD_ERROR * float(expected.abs().max()):
        raise InputError(
            f"the written checkpoint gives other logits than the model it was written from (largest difference "
            f"{difference:.2e}); it is not kept."
        )
    return difference
