"""OrganAMNIST, abdominal CT slices in MedMNIST's file; its validation images are not used."""

from pathlib import Path

import numpy as np

from .checks import described
from .images import Images

__all__ = ["ORGANS", "read_organamnist"]

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)


def read_organamnist(folder: Path) -> Images:
    """Read the training and test images; the pixels become (N, 1, H, W).

    Raises
    ------
    ValueError
        If an array is missing, or has a wrong type or shape.
    """
    path = folder / "organamnist.npz"
    with np.load(path) as file:
        lacking = [key for key in _KEYS if key not in file]
        if lacking:
            raise ValueError(f"{path} must have the arrays {', '.join(_KEYS)}, got no {', '.join(lacking)}")
        arrays = [file[key] for key in _KEYS]
    for key, images in zip(_KEYS[::2], arrays[::2], strict=True):
        if images.dtype != np.uint8 or images.ndim != 3:
            raise ValueError(f"{path}: {key} must be uint8 of shape (N, H, W), got {described(images)}")
    x_train, y_train, x_test, y_test = arrays
    return Images(x_train[:, None], y_train.ravel(), x_test[:, None], y_test.ravel())
