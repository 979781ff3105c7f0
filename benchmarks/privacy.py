"""What protection costs: the same run with it and without, in turn, in one process.

    python benchmarks/privacy.py sealed     # CEPS with sealed links

Prints medians over repetitions of the CPU time of a run, which is that of all nodes and of the relay, and
bytes. Set OMP_NUM_THREADS=1.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from typing import Annotated

import numpy as np
import typer
from flwr.app import ArrayRecord

from hedgerow.clients.ceps.client import ceps_client
from hedgerow.clients.ceps.problems import LinearRegression
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.strategies.ceps.strategy import CEPS
from hedgerow.strategies.router import NODE_TO_NODE
from hedgerow.wire.sealed import SEAL_BYTES, Identity, Link, SealingKey

app = typer.Typer(add_completion=False)
Repeats = Annotated[int, typer.Option(min=1)]
DIM = 1_000


@app.callback()
def quiet() -> None:
    """What protection costs."""
    logging.getLogger("flwr").setLevel(logging.ERROR)


@app.command()
def sealed(repeats: Repeats = 5) -> None:
    """Microseconds of a seal, and a run of CEPS on the paper's 32 nodes, plain and sealed."""
    a, b = (Identity(SealingKey.drawn(), SealingKey.drawn()) for _ in range(2))
    link = Link(a.secret_with(b.introduction), "1", "a", "b")
    for size in (71, 8_000, 1_000_000):
        contents = bytes(size)
        each = 1e6 * seconds_each(partial(link.seal, contents, 1, "payload"))
        print(f"sealing {size:,} bytes: {each:.1f} us, {SEAL_BYTES} bytes longer")
    others = (Identity(SealingKey.drawn(), SealingKey.drawn()).introduction for _ in count())
    print(
        f"agreeing with a neighbour, once: {1e6 * seconds_each(lambda: a.secret_with(next(others))):.0f} us"
    )
    problems = linear_problems(32, DIM)
    for codec in ("1bcs", "sparse32", "dense64"):
        runs: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        for _ in range(repeats):
            for is_sealed, made in runs.items():
                made.append(ceps_run(problems, codec, is_sealed))
        plain, protected = (median(seconds for seconds, _ in made) for made in runs.values())
        before, after = (made[0][1] for made in runs.values())
        print(
            f"CEPS, 32 nodes, n = {DIM}, {codec}: {plain:.2f} s of CPU, {protected:.2f} sealed, ratio "
            f"{protected / plain:.3f}; {before:,} and {after:,} bytes between nodes",
            flush=True,
        )


def seconds_each(work: Callable[[], object], least: float = 0.2) -> float:
    calls, began = 0, time.process_time()
    while (passed := time.process_time() - began) < least:
        work()
        calls += 1
    return passed / calls


def linear_problems(nodes: int, dim: int, records: int = 100, sparsity: int = 10) -> list[LinearRegression]:
    rng = np.random.default_rng(0)
    truth = np.zeros(dim)
    truth[rng.choice(dim, sparsity, replace=False)] = rng.choice([-1.0, 1.0], sparsity)
    matrices = [rng.standard_normal((records, dim)) for _ in range(nodes)]
    return [LinearRegression(A, A @ truth + 0.1 * rng.standard_normal(records)) for A in matrices]


def ceps_run(
    problems: list[LinearRegression], codec: str, is_sealed: bool, iterations: int = 201
) -> tuple[float, int]:
    """Return the CPU seconds of a run, and the bytes that nodes sent each other."""
    client = ceps_client(lambda context: problems[int(context.node_config["partition-id"])])
    strategy = CEPS(
        dim=DIM, sparsity=10, codec=codec, participation=0.5, interval=(10, 15), num_iterations=iterations,
        min_available_nodes=len(problems), sealed=is_sealed,
    )  # fmt: skip
    with InProcessGrid(client, len(problems)) as grid:
        began = time.process_time()
        strategy.start(grid, ArrayRecord(), num_rounds=iterations, timeout=600.0)
        seconds = time.process_time() - began
    return seconds, strategy.ledger.total(NODE_TO_NODE).payload_bytes


if __name__ == "__main__":
    app()
