"""Language modelling from scratch, as in Peng et al. 2021, section 5.1, and past the length of the training.

``--data`` is a folder with ``train.jsonl.gz`` and ``valid.jsonl.gz``, an article a line in the field "text"; ``--tokenizer``
a folder with a tokenizer. Quality is perplexity in blocks as long as those of the training, and two and four times as long,
which are read in pieces of that length with the state carried from piece to piece.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.errors import InputError
from hf_rfa.evaluation import perplexity
from hf_rfa.inference.loading import find_device
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.configuration_rfa import RFAConfigMixin

from .experiment import Column, Experiment, Options
from .rows import USUAL

FILES = {"train": "train.jsonl.gz", "evaluate": "valid.jsonl.gz"}
#: Tokens of the text that are scored, and how many times the length of the training its blocks have.
TOKENS, TIMES = 65_536, (1, 2, 4)


def prepare(data: Path | None, work: Path) -> Options:
    """Return the files of the articles."""
    if data is None:
        raise InputError(f"pass --data, a folder with {' and '.join(FILES.values())}.")
    for name in FILES.values():
        if not (data / name).is_file():
            raise InputError(f"there is no file {data / name}. --data is a folder with {' and '.join(FILES.values())}.")
    return {option: str(data / name) for option, name in FILES.items()}


def _text(folder: Path, options: Options) -> torch.Tensor:
    return tokenize(AutoTokenizer.from_pretrained(folder), read_documents(Path(options["evaluate"])), most=TOKENS)


def measure(folder: Path, options: Options) -> dict[str, float]:
    """Return perplexities by length; of a softmax model at the length of the training alone, which its positions end at."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = model.to(find_device("auto")).eval()
    ids, length = _text(folder, options), int(options["block_length"])
    carries = isinstance(model.config, RFAConfigMixin)
    found = {}
    for times in TIMES if carries else TIMES[:1]:
        settings: Any = {"context_length": times * length, "carry_state": carries and times > 1}
        found[f"perplexity_{times}"] = perplexity(model, ids, **settings).perplexity
    return found


def chance(options: Options) -> dict[str, float]:
    """Return the perplexity of tokens drawn by their frequencies in the text itself, by which no model could do worse."""
    ids = _text(Path(options["tokenizer"]), options)
    shares = torch.bincount(ids).double() / len(ids)
    shares = shares[shares > 0]
    return {"perplexity": float(torch.exp(-(shares * shares.log()).sum()))}


EXPERIMENT = Experiment(
    recipe="wikitext103-scratch",
    rows=USUAL,
    columns=(
        Column("perplexity_1", "perplexity", ".1f", "perplexity"),
        *(Column(f"perplexity_{times}", f"… {times} times as long", ".1f") for times in TIMES[1:]),
    ),
    prepare=prepare,
    measure=measure,
    chance=chance,
    constants={"scored_tokens": TOKENS},
)
