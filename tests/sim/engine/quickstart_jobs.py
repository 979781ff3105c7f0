"""Every strategy of Flower's that averages arrays over a quickstart ClientApp, in one ServerApp.

As a program it does so in Flower's own simulation, which is started once:
``python -m tests.sim.engine.quickstart_jobs out.npz FedAvg Krum``.
"""

import gc
import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from numpy.typing import NDArray
from tests.sim.runs import quickstarts as apps

# As many as Bulyan needs with one liar.
NODES, ROUNDS = 7, 2
# What the nodes' updates go through, by the name in a message's config.
MODS = {"fixed": fixedclipping_mod, "adaptive": adaptiveclipping_mod}


def plain(kind: Callable[..., Strategy], **options: Any) -> Strategy:
    return kind(min_available_nodes=NODES, min_train_nodes=NODES, **options)


def private(kind: Any, **options: Any) -> Strategy:
    made: Strategy = kind(plain(FedAvg), noise_multiplier=0.01, num_sampled_clients=NODES, **options)
    return made


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: plain(FedAvg),
    "FedAvgM": lambda: plain(FedAvgM, server_momentum=0.5),
    "FedProx": lambda: plain(FedProx, proximal_mu=0.1),
    "QFedAvg": lambda: plain(QFedAvg, client_learning_rate=0.1),
    "FedAdagrad": lambda: plain(FedAdagrad, eta=0.1, tau=0.01),
    "FedAdam": lambda: plain(FedAdam, eta=0.1, tau=0.01),
    "FedYogi": lambda: plain(FedYogi, eta=0.1, tau=0.01),
    "FedMedian": lambda: plain(FedMedian),
    "FedTrimmedAvg": lambda: plain(FedTrimmedAvg, beta=0.2),
    "Krum": lambda: plain(Krum, num_malicious_nodes=1),
    "MultiKrum": lambda: plain(MultiKrum, num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": lambda: plain(Bulyan, num_malicious_nodes=1),
    "DP-server-fixed": lambda: private(DifferentialPrivacyServerSideFixedClipping, clipping_norm=0.5),
    "DP-server-adaptive": lambda: private(
        DifferentialPrivacyServerSideAdaptiveClipping, initial_clipping_norm=0.5
    ),
    "DP-client-fixed": lambda: private(DifferentialPrivacyClientSideFixedClipping, clipping_norm=0.5),
    "DP-client-adaptive": lambda: private(
        DifferentialPrivacyClientSideAdaptiveClipping, initial_clipping_norm=0.5
    ),
}
# What a job came to: arrays, and the losses of training and evaluation by round, (2, ROUNDS).
Outcome = dict[str, NDArray[Any]]


def client_app() -> ClientApp:
    """Return one ClientApp for all jobs: a message's config says which mod it goes through."""

    def clipped(message: Message, context: Context, call_next: Any) -> Message:
        mod = MODS.get(str(message.content.config_records["config"].get("mod")))
        reply: Message = call_next(message, context) if mod is None else mod(message, context, call_next)
        return reply

    return apps.numpy_app([clipped])


def run_jobs(grid: Grid, jobs: Iterable[str] = STRATEGIES) -> dict[str, Outcome]:
    """Run one strategy after the other on the nodes of a grid."""
    outcomes: dict[str, Outcome] = {}
    for job in jobs:
        mod = job.removeprefix("DP-client-") if job.startswith("DP-client-") else ""
        # Noise comes from the global generator.
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        # Flower's robust strategies collect garbage once a reply: torch's objects need no look each time.
        gc.freeze()
        result = STRATEGIES[job]().start(
            grid, apps.numpy_arrays(), num_rounds=ROUNDS, train_config=ConfigRecord({"mod": mod})
        )
        told = (result.train_metrics_clientapp, "train_loss"), (result.evaluate_metrics_clientapp, "loss")
        losses = [[metrics[r + 1][key] for r in range(ROUNDS)] for metrics, key in told]
        outcomes[job] = {**{k: a.numpy() for k, a in result.arrays.items()}, "losses": np.array(losses)}
    return outcomes


def load(path: Path) -> dict[str, Outcome]:
    """Return what a run of this program wrote."""
    outcomes: dict[str, Outcome] = {}
    with np.load(path) as stored:
        for name in stored.files:
            job, key = json.loads(name)
            outcomes.setdefault(job, {})[key] = stored[name]
    return outcomes


def main(path: str, *jobs: str) -> None:
    """Run jobs in Flower's simulation and write what they came to."""
    from flwr.simulation import run_simulation

    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        outcomes = run_jobs(grid, jobs or STRATEGIES)
        np.savez(
            path, **{json.dumps([job, key]): a for job, one in outcomes.items() for key, a in one.items()}
        )

    run_simulation(server_app, client_app(), NODES)


if __name__ == "__main__":
    main(*sys.argv[1:])
