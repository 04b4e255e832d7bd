"""transformers' pipeline of speech recognition, for RFA models of Whisper.

transformers treats audio that is longer than a model hears at once, and time stamps, by Whisper's rules where a model's
``model_type`` is "whisper". This pipeline does so for "rfa_whisper" too, and takes the place of transformers' own.
"""

from __future__ import annotations

from typing import Any

from transformers import AutomaticSpeechRecognitionPipeline
from transformers.pipelines import PIPELINE_REGISTRY

TASK = "automatic-speech-recognition"


class SpeechRecognitionPipeline(AutomaticSpeechRecognitionPipeline):
    """transformers' pipeline, in which an RFA model of Whisper is one of Whisper.

    Its tokenizer has to be Whisper's own, which knows time stamps; with another one the pipeline transcribes what the model
    hears at once.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **kwargs: Any) -> None:
        self._is_whisper = model.config.model_type == "rfa_whisper" and hasattr(tokenizer, "_decode_asr")
        super().__init__(model, tokenizer=tokenizer, **kwargs)

    @property
    def type(self) -> str:
        """What transformers calls the kind of the model."""
        return "seq2seq_whisper" if self._is_whisper else self._type

    @type.setter
    def type(self, kind: str) -> None:
        self._type = kind


# `PIPELINE_REGISTRY.register_pipeline` warns of every task that it knows already.
PIPELINE_REGISTRY.supported_tasks[TASK]["impl"] = SpeechRecognitionPipeline
