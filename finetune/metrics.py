"""Metrics of generated text, as `evaluate.Metric` classes that need no download."""

from __future__ import annotations

from typing import Any

import evaluate
from datasets import Features, Value
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import BLEU

TEXTS = Features({"predictions": Value("string"), "references": Value("string")})


class BleuMetric(evaluate.Metric):
    """Corpus BLEU by sacreBLEU (Post 2018), cased, one reference each."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=str(self.__doc__), citation="", features=TEXTS)

    def _compute(self, predictions: list[str], references: list[str], tokenize: str = "13a") -> dict[str, Any]:
        metric = BLEU(tokenize=tokenize)
        score = metric.corpus_score(predictions, [references])
        return {"bleu": score.score, "signature": str(metric.get_signature())}


class RougeMetric(evaluate.Metric):
    """ROUGE-1, -2, -L and -Lsum (Lin 2004) by rouge_score, with stemming: mean F1 × 100.

    ROUGE-Lsum takes every line of a text as one sentence.
    """

    KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=str(self.__doc__), citation="", features=TEXTS)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scorer = RougeScorer(list(self.KINDS), use_stemmer=True)
        scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
        return {kind: 100.0 * sum(score[kind].fmeasure for score in scores) / len(scores) for kind in self.KINDS}


class AccuracyMetric(evaluate.Metric):
    """Share of predictions that are right."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return evaluate.MetricInfo(description=str(self.__doc__), citation="", features=features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, Any]:
        right = sum(int(found == wanted) for found, wanted in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
