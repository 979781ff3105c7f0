"""A real set of two classes, which every app that learns from samples can learn."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

from hedgerow.tasks import Dataset


def load(_: Path | None) -> Dataset:
    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    y = y.astype(np.int64)
    return Dataset("biopsies", x[:450], y[:450], x[450:], y[450:], num_classes=2)
