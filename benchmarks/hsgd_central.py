"""What a model that sees all data in one place reaches on the hours in intensive care that HSGD learns from.

    python benchmarks/hsgd_central.py --data-dir /path/to/data > results/hsgd/central.md

Logistic regression and gradient boosting of scikit-learn on the features and people of `sepsis2019-windows`,
trained as HSGD trains (``class-weights = "balanced"``), and measured as the app measures: ROC area, average
precision and the challenge's utility of the more probable class, on the test people; of both halves together,
and of each half alone, which is what neither party could exceed without the other.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from hedgerow.sim.runs.hooks import data_sets
from hedgerow.tasks import load_vertical, logit_metrics, normalised_utility

MODELS = {
    "logistic regression": lambda seed: LogisticRegression(C=1e-3, class_weight="balanced", max_iter=500),
    "gradient boosting": lambda seed: HistGradientBoostingClassifier(
        max_leaf_nodes=15, l2_regularization=1.0, class_weight="balanced", random_state=seed
    ),
}


def main() -> None:
    """Fit and print, a row a model and half."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--dataset", default="sepsis2019-windows")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    data = load_vertical(asked.dataset, asked.data_dir, more=data_sets())
    if data.num_classes != 2:
        parser.error(f"--dataset must have two classes, got {asked.dataset} of {data.num_classes}")
    train, test = (
        {
            "both halves": np.concatenate([hospital.reshape(n, -1), device.reshape(n, -1)], axis=1),
            "the hospital's half": hospital.reshape(n, -1),
            "the devices' half": device.reshape(n, -1),
        }
        for hospital, device, n in (
            (data.hospital_train, data.device_train, len(data.y_train)),
            (data.hospital_test, data.device_test, len(data.y_test)),
        )
    )
    count = f"{len(data.y_train)} train, {len(data.y_test)} test, {data.y_test.mean():.4f} of them positive"
    print(count, file=sys.stderr)
    print("| model | trained on | AUC | AUPRC | utility |\n|---|---|---:|---:|---:|", flush=True)
    for name, build in MODELS.items():
        for half in train:
            model = build(asked.seed).fit(train[half], data.y_train)
            p = np.clip(model.predict_proba(test[half])[:, 1], 1e-12, 1 - 1e-12)
            told = logit_metrics(
                torch.from_numpy(np.log(p / (1 - p)))[:, None], torch.from_numpy(data.y_test)
            )
            worth = (
                ""
                if data.payoffs_test is None
                else f"{normalised_utility(data.payoffs_test, 1 * (p > 0.5)):.3f}"
            )
            print(f"| {name} | {half} | {told.auc:.3f} | {told.auprc:.3f} | {worth} |", flush=True)


if __name__ == "__main__":
    main()
