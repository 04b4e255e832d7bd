"""Translation from scratch, as in Peng et al. 2021, section 5.2: the captions of Multi30k, English to German.

``--data`` is a folder with ``train``, ``val`` and ``test_2016_flickr``, each ``.en.gz`` and ``.de.gz``, one caption a line;
``--tokenizer`` a folder with a tokenizer of both languages. Quality is sacreBLEU of the test captions, greedy and with 4
beams.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.errors import InputError
from hf_rfa.evaluation.generation_scores import evaluate_generation
from hf_rfa.finetune.recipe import merge
from hf_rfa.inference.loading import find_device
from hf_rfa.io.text_io import read_pairs

from .experiment import Column, Experiment, Options
from .rows import ALONE, USUAL, settings_of

LANGUAGES = ("en", "de")
TEST = "test_2016_flickr"
BEAMS = (1, 4)
MAX_NEW_TOKENS = 60


def prepare(data: Path | None, work: Path) -> Options:
    """Return the files of the captions."""
    if data is None:
        raise InputError("pass --data, a folder with the captions of Multi30k (train.en.gz, …).")
    files = {name: [data / f"{name}.{language}.gz" for language in LANGUAGES] for name in ("train", "val", TEST)}
    missing = [str(path) for pair in files.values() for path in pair if not path.is_file()]
    if missing:
        raise InputError(f"there is no file {missing[0]}. --data is a folder with the captions of Multi30k.")
    names = {"train": "train", "val": "evaluate"}
    options = {option: str(files[name][0]) for name, option in names.items()}
    return options | {f"{option}_references": str(files[name][1]) for name, option in names.items()}


def settings(row: str, recipe: dict[str, Any], work: Path, seed: int) -> dict[str, Any]:
    """Return a recipe's settings for a row, in which one kind of attention may stay softmax in all layers."""
    found = settings_of(row, recipe)
    if row not in ALONE:
        return found
    layers = list(range(found["config_overrides"]["decoder_layers"]))
    return merge(found, {"config_overrides": {ALONE[row]: layers}})


def measure(folder: Path, options: Options) -> dict[str, float]:
    """Return the BLEU of the test captions."""
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_pretrained(folder).to(find_device("auto")).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source, target = (Path(options["train"]).with_name(f"{TEST}.{language}.gz") for language in LANGUAGES)
    sources, references = read_pairs(source, target)
    found = {}
    for beams in BEAMS:
        settings: Any = {"task": "translation", "num_beams": beams, "max_new_tokens": MAX_NEW_TOKENS, "batch_size": 50}
        report = evaluate_generation(model, tokenizer, sources, references, **settings)
        found[f"bleu_{beams}"] = report.scores["sacreBLEU"]
    return found


EXPERIMENT = Experiment(
    recipe="multi30k",
    rows=(*USUAL, *ALONE),
    columns=(Column("bleu_1", "BLEU, greedy"), Column("bleu_4", "BLEU, 4 beams")),
    prepare=prepare,
    measure=measure,
    settings=settings,
)
