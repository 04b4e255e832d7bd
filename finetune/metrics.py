"""Metrics of generated text, as `evaluate.Metric` classes that need no download."""

from __future__ import annotations

from typing import Any

import evaluate
from datasets import Features, Value
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import BLEU


class _TextMetric(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("string"), "references": Value("string")})
        return evaluate.MetricInfo(description=str(self.__doc__), citation="", features=features)


class BleuMetric(_TextMetric):
    """Corpus BLEU by sacreBLEU (Post 2018), cased, one reference each."""

    def _compute(self, predictions: list[str], references: list[str], tokenize: str = "13a") -> dict[str, Any]:
        metric = BLEU(tokenize=tokenize)
        score = metric.corpus_score(predictions, [references])
        return {"bleu": score.score, "signature": str(metric.get_signature())}


class RougeMetric(_TextMetric):
    """ROUGE-1, -2, -L and -Lsum (Lin 2004) by rouge_score, with stemming: mean F1 × 100.

    ROUGE-Lsum takes every line of a text as one sentence.
    """

    TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scorer = RougeScorer(list(self.TYPES), use_stemmer=True)
        scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
        return {name: 100.0 * sum(score[name].fmeasure for score in scores) / len(scores) for name in self.TYPES}
