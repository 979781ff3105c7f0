"""YOUR MODEL AND YOUR DATA: replace the bodies of these two functions, and nothing else.

pyproject.toml names them as ``dataset`` and ``model``. The example is scikit-learn's digits: 1,797 images of
8x8 pixels, and a linear classifier, since decoding one-bit messages takes long for larger models.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

from hedgerow.tasks import Dataset


def load(data_dir: Path | None) -> Dataset:
    """Return the data: in a simulation all of it, which ``partition`` splits across the nodes.

    Inputs are float32, (samples, ...), scaled as the model wants them; labels are int64, 0 to
    ``num_classes - 1``. ``data_dir`` is the run-config key ``data-dir``, on a device its node config's.
    """
    digits = load_digits()
    x = (digits.data / 8 - 1).astype(np.float32)  # (samples, 64)
    y = digits.target.astype(np.int64)
    test = np.arange(len(x)) % 5 == 0
    return Dataset("digits", x[~test], y[~test], x[test], y[test], num_classes=10)


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the model for samples of this shape, which returns one logit per class.

    It is built under the run's seed: the same for all nodes.
    """
    (features,) = input_shape
    return nn.Sequential(nn.Linear(features, num_classes))
