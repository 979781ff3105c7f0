"""Classify new rows with the model of a run on own data: python use_model.py RUN_FOLDER ROWS.csv.

The table has the same columns as the nodes' files, in the same order, without the label.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from hedgerow.sim import read_config, read_model
from hedgerow.tasks import Standardisation, build_model, parse_standardise


def load_trained(run: Path) -> tuple[torch.nn.Module, Standardisation | None]:
    """Return a run's model, and the standardisation of its nodes' features."""
    config = read_config(run)
    data = config["own-data"]
    model = build_model(config["run"]["model"], tuple(data["input-shape"]), data["num-classes"], seed=0)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in read_model(run).items()})
    if "mean" in data:
        return model.eval(), Standardisation(tuple(data["mean"]), tuple(data["std"]))
    return model.eval(), parse_standardise(config["run"]["standardise"])


def main(run: Path, table: Path) -> None:
    """Print each row's probability of each class, in the order of the run's classes."""
    model, scale = load_trained(run)
    rows = np.loadtxt(table, delimiter=",", skiprows=1, ndmin=2)
    rows = rows.astype(np.float32) if scale is None else scale.apply(rows)
    with torch.inference_mode():
        probabilities = model(torch.from_numpy(rows)).softmax(dim=1).numpy()
    for row in probabilities:
        print(" ".join(f"{probability:.3f}" for probability in row))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
