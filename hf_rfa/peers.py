"""What transformers' own tools and its peers need to know of the RFA model types.

Some tools tell a language model by the name of its class, or of its type, in transformers' tables of names: the Trainer
shifts labels for label smoothing only there, `transformers serve` and lm-eval look there. `AutoModel.register` does not reach
them.

peft keeps, per method, the modules that it adapts unless told otherwise, by model type, in dictionaries of
``peft.utils.constants``; it has no function to add to them. It asks for a model's configuration as a dictionary before it
looks there, which is when they are added: importing peft would take longer than importing all of this package. Tested with
peft 0.21.
"""

from __future__ import annotations

import sys

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

#: The model type of which an RFA type has the modules.
PARENT_TYPES = {"rfa_gpt2": "gpt2", "rfa_bart": "bart", "rfa_marian": "marian"}
#: Where peft knows nothing of a parent, it has one with the same names of modules.
SAME_MODULES = {"marian": "bart"}
_PREFIX = "TRANSFORMERS_MODELS_TO_"


def register_with_peft() -> None:
    """Let peft's methods take, for RFA models, the modules that they take for their parents, once peft is imported."""
    constants = sys.modules.get("peft.utils.constants")
    if constants is None:
        return
    for name, modules in vars(constants).items():
        if name.startswith(_PREFIX) and isinstance(modules, dict) and not PARENT_TYPES.keys() <= modules.keys():
            for model_type, parent in PARENT_TYPES.items():
                known = modules.get(parent, modules.get(SAME_MODULES.get(parent, parent)))
                if known is not None:
                    modules.setdefault(model_type, known)


def register_by_name(
    model_type: str, *, causal: type[PreTrainedModel], seq2seq: type[PreTrainedModel] | None = None
) -> None:
    """Enter a model type's language models in transformers' tables of names.

    Args:
        model_type: the configuration's ``model_type``.
        causal: the class that predicts the next token from those before.
        seq2seq: the class that does so from a source, too.
    """
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = causal.__name__
    if seq2seq is not None:
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[model_type] = seq2seq.__name__
