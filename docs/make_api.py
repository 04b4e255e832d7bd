"""Writes docs/api.md from the docstrings: python docs/make_api.py (make docs).

griffe2md renders each object; this file holds the order and the tables.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
import griffe2md

import hf_rfa
from hf_rfa.convert import ConversionOptions

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
WRAPPER = textwrap.TextWrapper(120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)

#: Headings, what stands under each, and which methods are shown (None: all that have a docstring): what a user calls.
SECTIONS: dict[str, dict[str, list[str] | None]] = {
    "Converting": {"hf_rfa.convert.convert": None},
    "Loading and generating": {
        "hf_rfa.inference.load_model": None,
        "hf_rfa.inference.generate_text": None,
    },
    "Texts without end": {
        "hf_rfa.inference.read_stream": None,
        "hf_rfa.inference.continue_stream": None,
        "hf_rfa.inference.Reading": ["load", "save"],
    },
    "Caches": {
        "hf_rfa.inference.save_cache": None,
        "hf_rfa.inference.load_cache": None,
        "hf_rfa.inference.cache_num_bytes": None,
        "hf_rfa.RFALayer": ["activate_past_recording", "crop"],
        "hf_rfa.export.DecodingStep": ["states", "forward"],
    },
    "Out of torch": {"hf_rfa.export.export": None},
    "Measuring": {
        "hf_rfa.evaluation.perplexity.perplexity": None,
    },
    "Training": {
        "hf_rfa.finetune.distill.distill": None,
        "hf_rfa.finetune.recipe.Recipe": [],
        "hf_rfa.finetune.recipe.Stage": [],
        "hf_rfa.finetune.tasks.finetune": None,
    },
    "Models": {"hf_rfa.RFAConfigMixin": [], "hf_rfa.RFASeq2SeqConfigMixin": []},
    "Families and feature maps of your own": {
        "hf_rfa.register_family": None,
        "hf_rfa.register_feature_map": None,
        "hf_rfa.register_importance": None,
    },
}
#: What goes with these, by one sentence each.
OTHERS = (
    "hf_rfa.Family",
    "hf_rfa.FeatureMap",
    "hf_rfa.Importance",
    "hf_rfa.InputError",
    "hf_rfa.RFASourceLayer",
    "hf_rfa.convert.ConversionReport",
    "hf_rfa.export.ExportReport",
    "hf_rfa.evaluation.Perplexity",
    "hf_rfa.evaluation.generation_scores.GenerationScores",
    "hf_rfa.evaluation.generation_scores.evaluate_generation",
    "hf_rfa.evaluation.recall.RecallReport",
    "hf_rfa.evaluation.recall.recall_suite",
    "hf_rfa.evaluation.recall.window_and_sinks",
    "hf_rfa.finetune.arguments.FinetuneArguments",
    "hf_rfa.finetune.distill.DistillationReport",
    "hf_rfa.finetune.trainers.GroupedTrainer",
    "hf_rfa.inference.Generation",
    "hf_rfa.inference.use_attention_component",
    "hf_rfa.io.text_io.tokenize",
)

OPTIONS: dict[str, Any] = {
    "heading_level": 3,
    "show_submodules": False,
    "inherited_members": False,
    "docstring_section_style": "list",
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

#: How the model classes are called, which have transformers' methods.
MODELS = """Auto classes return the model of a checkpoint. By name a class is `RFA` and the name of the softmax class:
`hf_rfa.RFALlamaForCausalLM`, with the configuration `hf_rfa.RFALlamaConfig`, for every family of [models.md](models.md)."""


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


def first_sentence(obj: Any) -> str:
    """Return the first sentence of a docstring as one line for a table."""
    sentence = " ".join((inspect.getdoc(obj) or "").split()).partition(". ")[0].rstrip(".")
    return sentence.replace("|", "\\|").replace("``", "`") + "."


def feature_maps() -> str:
    """Return the classes of the registry, by name."""
    maps, rules = (
        ", ".join(f"`{name}` (`{cls.__name__}`)" for name, cls in registry.items())
        for registry in (hf_rfa.FEATURE_MAPS, hf_rfa.IMPORTANCES)
    )
    return (
        f"`hf_rfa.FEATURE_MAPS` has, by name: {maps}. `hf_rfa.IMPORTANCES` has {rules}. What they are says "
        "[method.md](method.md#feature-maps)."
    )


def others() -> str:
    """Return a table of `OTHERS`."""
    return table(
        ("name", "what it is"), *((f"`{name}`", first_sentence(pkgutil.resolve_name(name))) for name in OTHERS)
    )


def conversion_options() -> str:
    """Return the section of the options of a conversion, whose fields describe themselves."""
    options = dataclasses.fields(ConversionOptions)
    rows = ((f"`{option.name}`", f"`{option.default!r}`", option.metadata["help"]) for option in options)
    return f"### `hf_rfa.convert.ConversionOptions`\n\n{table(('field', 'default', 'what it says'), *rows)}"


#: Text by the heading whose section it ends.
ENDS = {"Converting": conversion_options()}
#: Text by the heading that it follows.
TEXTS = {"Models": MODELS, "Families and feature maps of your own": feature_maps()}


def make_page() -> str:
    """Return the page."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser="google")
    package: Any = loader.load("hf_rfa", try_relative_path=False)
    loader.resolve_aliases()
    parts = [HEAD.rstrip()]
    for heading, objects in SECTIONS.items():
        parts.append(f"## {heading}")
        parts += [TEXTS[heading]] if heading in TEXTS else []
        parts += [render(package[name.removeprefix("hf_rfa.")], members) for name, members in objects.items()]
        parts += [ENDS[heading]] if heading in ENDS else []
    parts += ["## Other names", others()]
    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", part) for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
