"""The one list of the suite's methods: a line each. Data alone: nothing of the suite is imported.

An app's folder below ``flower_apps/`` is what packaging, commands and the documentation find by themselves.
Its line here gives it the common tests, the contracts that every method must satisfy, and rows of the table
by which two commits are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["REGISTRY", "Registered"]


@dataclass(frozen=True)
class Registered:
    """One app.

    Parameters
    ----------
    app : str
        Folder below ``flower_apps``.
    small : dict
        Settings of a run of a second or two.
    method : str (default: "method")
        The setting that names one of the app's methods; empty where the app has one.
    rounds : int or dict of str to int or None (default: None)
        How many rounds the small run has, of each method or of some; None where that is not known before, or
        no server averages a model.
    others : tuple of str (default: none)
        Further values of that setting, for which it lists no name.
    learnt : str (default: "mnist-5k")
        What the title of a run says is learnt.
    repeats : bool (default: True)
        Whether a round that fails is made again.
    suite : bool (default: False)
        Whether it is one of the suite's five, which follow rules of style beside those of every app.
    """

    app: str
    small: Mapping[str, Any]
    method: str = "method"
    rounds: int | Mapping[str, int] | None = None
    learnt: str = "mnist-5k"
    others: tuple[str, ...] = field(default=(), kw_only=True)
    repeats: bool = field(default=True, kw_only=True)
    suite: bool = field(default=False, kw_only=True)


REGISTRY = (
    Registered(
        "sd-feel",
        {
            "num-clients": 6, "num-servers": 3, "clients-per-round": 4, "tau1": 2, "tau2": 2, "iterations": 8,
            "model": "logistic", "evaluate-every": 1,
        },
        rounds={"sd-feel": 4, "hierfavg": 4, "feel": 4, "fedavg": 2, "flwr:FedYogi(eta=0.01)": 2},
        others=("flwr:FedYogi(eta=0.01)",),
        suite=True,
    ),
    Registered(
        "similarity-free",
        {
            "num-clients": 5, "num-rounds": 3, "local-iters": 3, "inner-steps": 5, "model": "logistic",
            "partition": "iid", "evaluate-every": 1,
        },
        method="algorithm",
        rounds=3,
        others=("flwr:FedYogi(eta=0.01)", "flwr:FedProx(proximal_mu=2.0)"),
        suite=True,
    ),
    Registered(
        "fedmud",
        {
            "num-clients": 4, "clients-per-round": 2, "num-rounds": 3, "batch-size": 250, "local-epochs": 1,
            "training-mode": "loop", "model": "mlp", "skip-front": 0, "ratio": 0.25, "evaluate-every": 1,
            "partition": "iid", "train-loss-samples": 200,
        },
        rounds=3,
        others=("flwr:FedYogi(eta=0.01)", "flwr:FedAvgM(server_momentum=0.5)"),
        suite=True,
    ),
    Registered(
        "ceps",
        {
            "num-clients": 5, "iterations": 12, "topology": "complete", "features": 60, "sparsity": 3,
            "measurements": 90, "samples-low": 30, "samples-high": 60, "interval-low": 2, "interval-high": 4,
            "local-steps": 3, "learning-rate": 0.02,
        },
        learnt="linear",
        repeats=False,
        suite=True,
    ),
    Registered(
        "hsgd",
        # Groups of TDCD that stay apart need as many nodes as every other method.
        {
            "num-groups": 2, "num-clients": 4, "tdcd": "isolated", "patients-per-group": 10,
            "participation": 0.4, "iterations": 8, "global-interval": 4, "local-interval": 2,
            "evaluate-every": 1,
        },
        learnt="breast-cancer",
        suite=True,
    ),
    Registered("scaffold", {"num-clients": 4, "num-rounds": 3, "model": "logistic"}, "", rounds=3),
)  # fmt: skip
