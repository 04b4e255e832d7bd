"""The plan of a conversion: all that can be decided, and refused, before any weight is loaded."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_rfa.errors import InputError
from hf_rfa.families import has_rotary_positions, position_count, reads_audio
from hf_rfa.inference.loading import check_tokens, check_vocabulary, find_device, load_tokenizer
from hf_rfa.inference.transcription import load_feature_extractor, load_features
from hf_rfa.io.atomic_io import check_destination, check_space, remove_leftovers
from hf_rfa.io.audio_io import read_utterances
from hf_rfa.io.text_io import BLOCK_LENGTH, read_documents
from hf_rfa.models.no_features import feature_map_class

from .calibrate.retrieval_heads import RetrievalHeads
from .checkpoint.source import Checkpoint, open_checkpoint
from .configuration import check_names, import_words, rfa_config, with_more_positions
from .inputs import (
    AUDIO,
    FEATURE_TEXT_TOKENS,
    OUTPUT_TOKENS,
    SLOT_TEXT_TOKENS,
    TEXT_TOKENS,
    Inputs,
    random_inputs,
    shifted_positions,
    text_blocks,
    text_sources,
)
from .options import ConversionOptions
from .presets import Trained, fits_features, with_preset

#: Files that say how audio becomes features, and what else a processor holds beside a tokenizer.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
#: Files of a model within sentence-transformers, of which the first names the folders of what follows it.
SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")

#: Called as the work goes on: (name of a step, its number of parts) when it begins, (None, 1) when a part is done.
Progress = Callable[[str | None, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a conversion does."""

    source: Checkpoint  # the softmax checkpoint
    destination: Path  # the folder to write
    options: ConversionOptions  # its options, none of which is open but a number of retrieval heads
    config: Any  # the RFA model's configuration
    tokenizer: Any  # the checkpoint's, or None
    no_tokenizer: str | None  # why there is none
    inputs: Inputs  # what to calibrate on; of a model with an encoder the sources
    trained: Trained | None  # what is trained on the base model afterwards
    files: tuple[Path, ...]  # files and folders that go beside the weights
    command: str  # the command line that repeats the conversion
    progress: Progress  # called as the work goes on
    heads: RetrievalHeads | None = None  # retrieval heads that were chosen, and what they change

    def with_options(self, **fields: Any) -> Plan:
        """Return the plan with other options."""
        options = replace(self.options, **fields)
        return replace(self, options=options, config=rfa_config(self.source, options))

    def begin(self, stage: str, parts: int = 1) -> Callable[[], None]:
        """Say that a stage of some parts begins, and return what says that one of them is done."""
        self.progress(stage, parts)
        return lambda: self.progress(None, 1)


def make_plan(
    checkpoint: str | Path,
    destination: str | Path,
    options: ConversionOptions,
    *,
    trained: Trained | None,
    overwrite: bool,
    command: str | None,
    progress: Progress,
) -> Plan:
    """Return the plan of a conversion; the arguments are those of `hf_rfa.convert.convert`.

    Raises:
        InputError: if the checkpoint, the destination, an option or the text cannot be used, or has no effect.
    """
    progress("checking the checkpoint", 1)
    check_names(options)
    destination = Path(destination)
    device = find_device(options.device)
    source = open_checkpoint(checkpoint, revision=options.revision, allow_pickle=options.allow_pickle, device=device)
    check_destination(destination, overwrite=overwrite, sources=(source.folder,))
    remove_leftovers(destination.resolve())  # which may be what fills the disk
    check_space(destination, source.num_bytes // (1 if options.dtype in ("auto", "float32") else 2))
    files = _files_beside(source.folder)
    base = with_more_positions(source, options)
    if options.force and (options.calibrate_on is None or trained is not None):
        why = "nothing is measured without a text (--calibrate)" if trained is None else "training follows"
        raise InputError(f"force=True has no effect: {why}, and then no model is refused. Leave it out.")
    resolved = with_preset(base, options, trained)
    config = rfa_config(base, resolved)
    tokenizer, no_tokenizer = load_tokenizer(base.folder)
    words = ["hf-rfa", "convert", str(checkpoint), str(destination), *options.words()]
    return Plan(
        source=base,
        destination=destination,
        options=resolved,
        config=config,
        tokenizer=tokenizer,
        no_tokenizer=no_tokenizer,
        inputs=_calibration_inputs(base, resolved, trained, tokenizer, no_tokenizer),
        trained=trained,
        files=files,
        command=command or shlex.join(words + import_words(config)),
        progress=progress,
    )


def _files_beside(folder: Path) -> tuple[Path, ...]:
    """Return the files and folders that a converted model needs beside its weights and tokenizer as its base model does.

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
    return tuple(folder / name for name in names if (folder / name).exists())


def _calibration_inputs(
    checkpoint: Checkpoint,
    options: ConversionOptions,
    trained: Trained | None,
    tokenizer: Any,
    no_tokenizer: str | None,
) -> Inputs:
    """Return what to calibrate on; an `InputError` for a text that the model cannot read, or that is too short."""
    data, fits, config = options.calibrate_on, fits_features(options, trained), checkpoint.config
    if options.calibration_tokens is not None and data is None:
        raise InputError("calibration_tokens needs a text: pass one (--calibrate), or leave them out.")
    default = FEATURE_TEXT_TOKENS if fits else SLOT_TEXT_TOKENS if options.num_slots else TEXT_TOKENS
    tokens = options.calibration_tokens or default
    if data is not None and reads_audio(config):
        extractor = load_feature_extractor(checkpoint.folder, checkpoint.name)
        utterances = read_utterances(data)[: math.ceil(tokens / OUTPUT_TOKENS)]
        return {AUDIO: load_features(extractor, [utterance.path for utterance in utterances])}
    documents = None if data is None else list(read_documents(data))
    if documents is not None and tokenizer is None:
        raise InputError(f"cannot calibrate on {data} with {checkpoint.name}: {no_tokenizer}. Leave the text out.")
    if tokenizer is not None:
        check_vocabulary(tokenizer, config, checkpoint.name)
    if documents is None:
        inputs = random_inputs(config, seed=options.seed)
    else:
        read = text_sources if config.is_encoder_decoder else text_blocks
        inputs = read(tokenizer, documents, min(BLOCK_LENGTH, position_count(config)), tokens=tokens)
        check_tokens(inputs["input_ids"].unique().tolist(), config)
    if has_rotary_positions(config) and not feature_map_class(str(options.feature_map)).unrotated:
        inputs["position_ids"] = shifted_positions(config, *inputs["input_ids"].shape, seed=options.seed)
    if fits and not config.is_encoder_decoder:
        rows, length = inputs["input_ids"].shape
        places = sum(size or 0 for size in (options.window_size, options.num_sinks, options.num_slots))
        if rows < 2 or length <= places:
            raise InputError(
                f"feature_map={options.feature_map} is fitted to two blocks or more, longer than {places} tokens that are "
                f"kept, and there are {rows} of {length}. Pass a longer text (--calibrate), keep less, or pass preset exact."
            )
    return inputs
