"""Accuracy as an `evaluate` metric without a download: `evaluate.load("accuracy")` fetches its script from the hub."""

from __future__ import annotations

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """Share of predictions that equal their reference."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions, references: class numbers",
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}
