"""The model card of a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.version import __version__

from .checkpoint.source import Checkpoint
from .configuration import outside_modules
from .report import ConversionReport, in_units

#: Beginning of the card's paragraph on training, which trainings replace.
TRAINING = "**Training**:"
#: That paragraph for a model without any.
UNTRAINED = (
    f"{TRAINING} none after the conversion. The base model's weights are untouched. Distil or fine-tune it before you rely "
    "on it."
)

#: How a model is loaded, and what else there is to say of an RFA model.
USE = """## Use

```python
{imports}from transformers import {auto_class}

model = {auto_class}.from_pretrained("{name}")
```
"""
USE_WITHOUT_PACKAGE = """
Where hf-rfa is not installed, the code in the checkpoint loads it:
`{auto_class}.from_pretrained("{name}", trust_remote_code=True)`.
"""

#: The Auto class that loads a model class, and the hub's name of its task, by the ending of the class's name.
HEADS = {
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "WhisperForConditionalGeneration": ("AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
    "ForConditionalGeneration": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "MTModel": ("AutoModelForSeq2SeqLM", "translation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
}


def head_of(architecture: str) -> tuple[str, str]:
    """Return the Auto class that loads a model class, and the hub's name of its task."""
    heads = (value for ending, value in HEADS.items() if architecture.endswith(ending))
    return next(heads, ("AutoModel", "feature-extraction"))


def use_section(auto_class: str, name: str, config: Any) -> str:
    """Return the section of a card that says how a model with a configuration is loaded."""
    if not isinstance(config, RFAConfigMixin):
        return USE.format(auto_class=auto_class, name=name, imports="")
    imports = "import hf_rfa  # registers the RFA models with transformers\n"
    for what, module in outside_modules(config).items():
        if module != "__main__":
            imports += f"import {module}  # registers the {what}\n"
    return (USE + USE_WITHOUT_PACKAGE).format(auto_class=auto_class, name=name, imports=imports)


def model_card(report: ConversionReport, checkpoint: Checkpoint, config: Any) -> ModelCard:
    """Return the model card of a conversion to a configuration, with license, languages and task of the checkpoint's."""
    auto_class, task = head_of(checkpoint.architecture)
    path = checkpoint.folder / "README.md"
    theirs = ModelCard.load(path).data if path.is_file() else ModelCardData()
    fields = ("license", "license_name", "license_link", "language", "pipeline_tag")
    data: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task, "base_model": checkpoint.hub_name}
    data |= {field: theirs.get(field) for field in fields if theirs.get(field) is not None}
    has_features = any(report.feature_dims.values())
    tags = ["hf-rfa", *(["random-feature-attention", "linear-attention"] if has_features else [])]
    title = report.destination.rstrip("/").rsplit("/", 1)[-1]
    hub_name, revision = checkpoint.hub_name, report.source_revision
    tree = f"/tree/{revision}" if revision else ""
    return ModelCard.from_template(
        ModelCardData(**data, tags=tags),
        template_path=str(Path(__file__).with_name("model_card.md")),
        title=title,
        source=hub_name or report.source.rstrip("/").rsplit("/", 1)[-1],
        link=f"https://huggingface.co/{hub_name}{tree}" if hub_name else "#how-it-was-made",
        version=__version__,
        untrained=UNTRAINED,
        use=use_section(auto_class, title, config),
        has_features=has_features,
        state=in_units(report.memory.fixed),
        report=report,
    )
