"""Writes docs/api.md from the docstrings: python docs/make_api.py (make docs).

griffe2md renders each object; this file holds the order and the tables.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
import griffe2md

import hf_rfa
from hf_rfa.finetune.arguments import FinetuneArguments

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
WRAPPER = textwrap.TextWrapper(120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)

#: Headings, what stands under each, and which methods are shown (None: all that have a docstring).
SECTIONS: dict[str, dict[str, list[str] | None]] = {
    "Converting": {
        "hf_rfa.convert.convert": None,
        "hf_rfa.convert.ConversionOptions": [],
        "hf_rfa.convert.ConversionReport": None,
        "hf_rfa.register_family": None,
        "hf_rfa.Family": [],
    },
    "Loading and generating": {
        "hf_rfa.inference.load_model": None,
        "hf_rfa.inference.generate_text": None,
        "hf_rfa.inference.Generation": [],
    },
    "Caches": {
        "hf_rfa.inference.save_cache": None,
        "hf_rfa.inference.load_cache": None,
        "hf_rfa.inference.cache_num_bytes": None,
        "hf_rfa.RFALayer": ["activate_past_recording", "crop", "get_seq_length", "get_max_length"],
        "hf_rfa.RFASourceLayer": [],
        "hf_rfa.export.DecodingStep": ["states", "forward"],
    },
    "Measuring": {
        "hf_rfa.io.text_io.tokenize": None,
        "hf_rfa.evaluation.perplexity": None,
        "hf_rfa.evaluation.Perplexity": None,
        "hf_rfa.evaluation.generation_scores.evaluate_generation": None,
        "hf_rfa.evaluation.generation_scores.GenerationScores": [],
        "hf_rfa.evaluation.recall.recall_suite": None,
        "hf_rfa.evaluation.recall.RecallReport": [],
        "hf_rfa.evaluation.recall.window_and_sinks": None,
    },
    "Training": {
        "hf_rfa.finetune.distill.distill": None,
        "hf_rfa.finetune.recipe.Recipe": ["load", "stages", "with_steps"],
        "hf_rfa.finetune.recipe.Stage": [],
        "hf_rfa.finetune.report.DistillationReport": None,
        "hf_rfa.finetune.finetune.finetune": None,
        "hf_rfa.finetune.arguments.FinetuneArguments": [],
        "hf_rfa.finetune.trainers.GroupedTrainer": [],
    },
    "Models": {},
    "Configuration": {
        "hf_rfa.RFAConfigMixin": ["from_base", "validate_rfa", "is_rfa"],
        "hf_rfa.RFASeq2SeqConfigMixin": [],
    },
    "Attention": {
        "hf_rfa.inference.use_attention_component": None,
    },
    "Feature maps": {
        "hf_rfa.register_feature_map": None,
        "hf_rfa.FeatureMap": ["query_input", "key_input", "query", "key", "feature_dim", "log_factor", "affine_form"],
    },
    "Errors": {"hf_rfa.InputError": []},
}

OPTIONS: dict[str, Any] = {
    "heading_level": 3,
    "show_submodules": False,
    "inherited_members": False,
    "docstring_section_style": "table",
    "summary": False,
    "members_order": "source",
    "show_bases": False,
    "show_if_no_docstring": False,
    "line_length": 100_000,  # lines are broken here, whether or not black is installed
}

HEAD = """# API

Made from the docstrings by `make docs`; what is not listed here may change. `import hf_rfa` registers the models with
transformers' Auto classes. Shapes: B batch, H heads, T tokens, d width of a head, F features; the rest of the notation is
that of [method.md](method.md). Commands: `hf-rfa --help`.
"""

#: What the table of models leaves out.
OTHER_MODELS = """Every other family of [models.md](models.md) has classes of the same form, made when they are asked for as
`hf_rfa.RFALlamaForCausalLM`, say: `RFA` and the name of the softmax class, with the configuration `RFA` and the name of the
base model's, such as `RFAGPT2Config`, `RFABartConfig` and `RFAMarianConfig`. Auto classes return them."""


def render(obj: Any, members: list[str] | None) -> str:
    """Return the section of one object, in Markdown without HTML, without dead links, its signature on several lines."""
    text = griffe2md.render_object_docs(obj, {**OPTIONS, "members": members})
    text = re.sub(r"\[([^\]\n]*)\]\(#[^)\n]*\)", r"\1", text)
    text = re.sub(r"</?code>|(?<!`)``(?!`)", "`", text)
    return re.sub(r"(?<=```python\n).*(?=\n```)", lambda found: "\n".join(WRAPPER.wrap(found[0])), text).strip()


def table(*rows: tuple[str, ...]) -> str:
    """Return a table, the first row being its head."""
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def describe(cls: type) -> str:
    """Return a class's docstring as one line for a table."""
    return " ".join((inspect.getdoc(cls) or "").split()).replace("|", "\\|").replace("``", "`")


def models() -> str:
    """Return a table of the model classes."""
    rows = [("class", "what it is", "Auto class")]
    models: list[Any] = [cls for name in ("gpt2", "bart", "marian") for cls in hf_rfa.FAMILIES[name].model_classes]
    for cls in models:
        auto_map = cls.config_class().AUTO_MAP  # which a first configuration fills
        loaders = [f"`{auto}`" for auto, place in auto_map.items() if place.endswith(f".{cls.__name__}")]
        rows.append((f"`{cls.__name__}`", describe(cls), ", ".join(loaders)))
    return table(*rows) + "\n\n" + OTHER_MODELS


def feature_maps() -> str:
    """Return a table of the registry."""
    rows = [(f"`{name}`", f"`{cls.__name__}`", describe(cls)) for name, cls in hf_rfa.FEATURE_MAPS.items()]
    return "`hf_rfa.FEATURE_MAPS`, by name:\n\n" + table(("name", "class", "what it is"), *rows)


def finetune_options() -> str:
    """Return a table of the fields of `FinetuneArguments`."""
    rows = [("field", "what it is", "default")]
    for field in dataclasses.fields(FinetuneArguments):
        default = "*required*" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        rows.append((f"`{field.name}`", field.metadata["help"], default))
    return table(*rows)


#: Tables, by the heading or the object that they follow.
TABLES = {
    "Models": models,
    "Feature maps": feature_maps,
    "hf_rfa.finetune.arguments.FinetuneArguments": finetune_options,
}


def make_page() -> str:
    """Return the page."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser="google")
    package: Any = loader.load("hf_rfa", try_relative_path=False)
    loader.resolve_aliases()
    parts = [HEAD.rstrip()]
    for heading, objects in SECTIONS.items():
        parts.append(f"## {heading}")
        parts += [TABLES[heading]()] if heading in TABLES else []
        for name, members in objects.items():
            parts.append(render(package[name.removeprefix("hf_rfa.")], members))
            parts += [TABLES[name]()] if name in TABLES else []
    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", part) for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
