"""Registration with PEFT, which keeps the modules that each of its methods adapts by default by model type.

PEFT has no function to add to them: they are dictionaries of ``peft.utils.constants``. Tested with peft 0.21.
"""

from __future__ import annotations

import sys
from typing import Any

from .families import FAMILIES
from .models.configuration_rfa import RFAConfigMixin
from .models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin

_PREFIX = "TRANSFORMERS_MODELS_TO_"


def register_with_peft() -> None:
    """Let PEFT's methods adapt, in RFA models, the modules that they adapt in the base models, once PEFT is imported."""
    constants: Any = sys.modules.get("peft.utils.constants")
    for name, modules in ({} if constants is None else vars(constants)).items():
        if name.startswith(_PREFIX) and isinstance(modules, dict):
            for base_type, family in FAMILIES.items():
                known = modules.get(base_type)
                if known is None and issubclass(family.rfa_config, RFASeq2SeqConfigMixin):
                    known = modules.get("bart")  # such families name their modules as BART does
                if known is not None:
                    modules.setdefault(family.rfa_config.model_type, known)


# PEFT asks for a model's configuration before it looks the model type up. Importing PEFT here would take longer.
RFAConfigMixin.BEFORE_FIELDS.append(register_with_peft)
