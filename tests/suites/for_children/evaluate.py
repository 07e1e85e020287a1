"""GLUE's metrics in the place of the package `evaluate`, which downloads each one's script."""

from typing import Any


def load(*names: str, **told: Any) -> "_Metric":
    return _Metric()


class _Metric:
    def __init__(self) -> None:
        self._predictions: list[int] = []
        self._references: list[int] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._predictions += predictions.tolist()
        self._references += references.tolist()

    def compute(self) -> dict[str, float]:
        right = [a == b for a, b in zip(self._predictions, self._references, strict=True)]
        self._predictions, self._references = [], []
        return {"accuracy": sum(right) / len(right)}
