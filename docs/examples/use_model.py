"""Classify new rows with the model of a run: python use_model.py RUN_FOLDER ROWS.csv [APP].

The table has the features of the training data, in their order, and a line of names, but no labels. A model
of nodes' own data standardises the features as the nodes did. Others need values scaled as in training. APP
is the folder of an app made by ``hedgerow new``.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from hedgerow.sim import load_model


def main(run: str | Path, table: str | Path, app: str | Path | None = None) -> None:
    """Print each row's probability of each class, in the order of the run's classes."""
    model = load_model(run, app)
    rows = torch.from_numpy(np.loadtxt(table, delimiter=",", skiprows=1, ndmin=2))
    # float64 where the model standardises: float32 would round large values, such as times, before that.
    rows = rows.to(next(iter(model.state_dict().values())).dtype)
    with torch.inference_mode():
        probabilities = model(rows).softmax(dim=1).numpy()
    for row in probabilities:
        print(" ".join(f"{probability:.3f}" for probability in row))


if __name__ == "__main__":
    main(*sys.argv[1:])
