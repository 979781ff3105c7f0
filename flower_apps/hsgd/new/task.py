"""YOUR MODEL AND YOUR DATA: replace the bodies of these two functions, and nothing else.

pyproject.toml names them as ``dataset`` and ``model``. The example is scikit-learn's wine: of each of 178
wines the hospital has 7 measurements and the device 6.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_wine

from hedgerow.tasks import SplitModel, VerticalDataset, split_model


def load(data_dir: Path | None) -> VerticalDataset:
    """Return the data: row i of the hospital's and of the device's part is the same person.

    Inputs are float32, (people, ...), scaled as the model wants them; labels are int64, indices into
    ``classes``. ``data_dir`` is the run-config key ``data-dir``, on a device its node config's.
    """
    wine = load_wine()
    x = ((wine.data - wine.data.mean(0)) / wine.data.std(0)).astype(np.float32)
    y = wine.target.astype(np.int64)
    ids = np.array([f"wine-{row}" for row in range(len(x))])
    hospital, device = x[:, :7], x[:, 7:]
    test = np.arange(len(x)) % 5 == 0
    return VerticalDataset(
        name="wine",
        hospital_train=hospital[~test],
        device_train=device[~test],
        y_train=y[~test],
        ids_train=ids[~test],
        hospital_test=hospital[test],
        device_test=device[test],
        y_test=y[test],
        ids_test=ids[test],
        classes=tuple(map(str, wine.target_names)),
    )


def build(hospital_shape: tuple[int, ...], device_shape: tuple[int, ...], num_classes: int) -> SplitModel:
    """Return the model in its three pieces: head, hospital's encoder, device's encoder.

    For pieces of your own: ``SplitModel(head, hospital, device, e1, e2)``, with the lengths of the encodings.
    """
    return split_model("mlp", hospital_shape, device_shape, num_classes, seed=0)
