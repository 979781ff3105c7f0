"""What protection costs: the same run with it and without, in turn, in one process.

    python benchmarks/privacy.py sealed     # CEPS with sealed links
    python benchmarks/privacy.py sums       # FedAvg by secure sums
    python benchmarks/privacy.py sums --method similarity-free    # or fedmud: the other apps' clients
    python benchmarks/privacy.py sums --noise                     # secure sums with noise beside plain

Prints medians over repetitions: ``sealed`` of the CPU time of a run, which is that of all nodes and of the
relay, and what of it is cryptography, ``sums`` of a round's seconds by the clock; and bytes. Set
OMP_NUM_THREADS=1.
"""

import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from flwr.app import ArrayRecord, ConfigRecord
from reports import report
from torch import nn

from hedgerow.clients import LinearRegression
from hedgerow.clients.ceps.client import ceps_client
from hedgerow.clients.fedmud.client import fedmud_client
from hedgerow.clients.local_task import LocalTask
from hedgerow.clients.sd_feel.client import sd_feel_client
from hedgerow.clients.similarity_free.client import similarity_free_client
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.strategies import FedAvg, FedMUD, SecureSum, SimilarityFree
from hedgerow.strategies.aggregate.sum_noise import SumNoise
from hedgerow.strategies.ceps.strategy import CEPS
from hedgerow.strategies.round_end import RoundEnd
from hedgerow.strategies.router import NODE_TO_NODE
from hedgerow.strategies.schedules import Fixed
from hedgerow.tasks import build_model
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import to_record
from hedgerow.wire.sealed import SEAL_BYTES, Link, NodeIdentity, SealingKey, _agreed

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
    a, b = (NodeIdentity(SealingKey.drawn(), SealingKey.drawn()) for _ in range(2))
    link = Link(a.secret_with(b.introduction), "1", "a", "b")
    there = Link(link.secret, "1", "b", "a")
    for size in (71, 8_000, 1_000_000):
        contents = bytes(size)
        each = 1e6 * seconds_each(partial(link.seal, contents, 1, "payload"))
        opened = 1e6 * seconds_each(partial(there.open, link.seal(contents, 1, "payload"), 1, "payload"))
        print(f"{size:,} bytes: {each:.1f} us to seal, {opened:.1f} to open, {SEAL_BYTES} bytes longer")
    others = (NodeIdentity(SealingKey.drawn(), SealingKey.drawn()).introduction for _ in count())
    agreement = seconds_each(lambda: a.secret_with(next(others)))
    print(
        f"agreeing with a neighbour, once: {1e6 * agreement:.0f} us, half of it to make the neighbour's keys"
    )
    problems = linear_problems(32, DIM)
    ceps_run(problems, "1bcs", True, 60)  # What is made once in a process, matrices above all.
    for codec in ("1bcs", "sparse32", "dense64"):
        runs: dict[bool, list[tuple[float, int, int]]] = {False: [], True: []}
        for _ in range(repeats):
            for is_sealed, made in runs.items():
                made.append(ceps_run(problems, codec, is_sealed))
        plain, protected = (median(seconds for seconds, _, _ in made) for made in runs.values())
        (_, before, _), (_, after, payloads) = (made[0] for made in runs.values())
        print(
            f"CEPS, 32 nodes, n = {DIM}, {codec}: {plain:.2f} s of CPU, {protected:.2f} sealed, ratio "
            f"{protected / plain:.3f}; {before:,} and {after:,} bytes between nodes",
            flush=True,
        )
        pairs = _agreed.cache_info().misses  # Of the last run, which was a sealed one.
        contents = bytes(before // payloads)
        box = link.seal(contents, 1, "payload")
        seals = payloads * seconds_each(partial(link.seal, contents, 1, "payload"))
        opens = payloads * seconds_each(partial(there.open, box, 1, "payload"))
        print(
            f"  of {protected - plain:.3f} s more: {seals:.3f} to seal {payloads:,} payloads, {opens:.3f} to "
            f"open them, {pairs * agreement:.3f} at most for the keys of {pairs} pairs; the rest keeps books"
        )
        report(f"CEPS, {codec}, sealed links", protected, "s", plain / protected, "plain links")


@app.command()
def sums(
    repeats: Repeats = 3,
    nodes: int = 50,
    local_steps: int = 5,
    rounds: int = 6,
    method: Annotated[str, typer.Option(help="fedavg, similarity-free or fedmud")] = "fedavg",
    noise: bool = False,
) -> None:
    """A round of LeNet's 21,840 parameters, plain and by secure sums."""
    if method not in METHODS:
        raise typer.BadParameter(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    made: dict[bool, list[list[float]]] = {False: [], True: []}
    carried: dict[bool, tuple[int, int]] = {}
    for _ in range(repeats):
        for is_summed, runs in made.items():
            secure = is_summed and SecureSum(noise=SumNoise(1.0, 1.0) if noise else None)
            seconds, carried[is_summed] = summed_run(method, nodes, local_steps, rounds, secure)
            runs.append(seconds)
    plain, protected = (median(s for run in runs for s in run[1:]) for runs in made.values())
    first, first_protected = (median(run[0] for run in runs) for runs in made.values())
    print(
        f"{method}, {nodes} nodes, {local_steps} local steps of batch 10: {plain:.3f} s a round, "
        f"{protected:.3f} by secure sums{' with noise' if noise else ''}, ratio {protected / plain:.2f}; "
        f"the first round {first:.2f} and {first_protected:.2f}"
    )
    report(f"a round of {method}, secure sums", protected, "s", plain / protected, "plain replies")
    for leg, before, after in zip(("up", "down"), carried[False], carried[True], strict=True):
        print(f"{leg}: {before / nodes:,.0f} bytes a node and round, {after / nodes:,.0f} by secure sums")


METHODS = {"fedavg": sd_feel_client, "similarity-free": similarity_free_client, "fedmud": fedmud_client}


def strategy_of(method: str, model: nn.Module, nodes: int, local_steps: int, options: Any) -> Any:
    """Return a strategy whose nodes take so many steps of batch 10, of their 100 examples."""
    if method == "fedavg":
        return FedAvg(local_steps=local_steps, **options)
    if method == "similarity-free":
        return SimilarityFree(
            schedule=Fixed(c=0.05, num_rounds=1), local_iters=local_steps, batch_size=10, **options
        )
    # An epoch, whatever the steps: ten of them.
    return FedMUD.for_model(
        model, local_epochs=1, batch_size=10, learning_rate=0.05, ratio=0.0625, sync="dense", **options
    )


def summed_run(
    method: str, nodes: int, local_steps: int, rounds: int, secure_sum: bool | SecureSum
) -> tuple[list[float], tuple[int, int]]:
    """Return the seconds of each round, and the bytes of the last one from and to the nodes."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((100 * nodes, 1, 28, 28)), dtype=torch.float32)
    y = torch.tensor(rng.integers(0, 10, 100 * nodes))
    model = build_model("lenet", (1, 28, 28), 10, 0)
    parts = [np.arange(100 * i, 100 * (i + 1)) for i in range(nodes)]
    client = METHODS[method](
        lambda context: LocalTask(model, x, y, parts[int(context.node_config["partition-id"])])
    )
    ends: list[RoundEnd] = []
    options = {
        "min_available_nodes": nodes, "fraction_evaluate": 0.0, "secure_sum": secure_sum,
        "on_round_end": [ends.append],
    }  # fmt: skip
    strategy = strategy_of(method, model, nodes, local_steps, options)
    config = ConfigRecord({"learning-rate": 0.05, "batch-size": 10, "seed": 0})
    with InProcessGrid(client, nodes) as grid:
        strategy.start(grid, to_record(model.state_dict()), rounds, 600.0, config)
    legs = [
        ends[-1].by_link[leg].payload_bytes - ends[-2].by_link[leg].payload_bytes
        for leg in (NODE_TO_HUB, HUB_TO_NODE)
    ]
    return [end.wall_seconds for end in ends[1:]], (legs[0], legs[1])


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
) -> tuple[float, int, int]:
    """Return the CPU seconds of a run, and the bytes and payloads that nodes sent each other."""
    client = ceps_client(lambda context: problems[int(context.node_config["partition-id"])])
    strategy = CEPS(
        dim=DIM, sparsity=10, codec=codec, participation=0.5, interval=(10, 15), num_iterations=iterations,
        min_available_nodes=len(problems), sealed=is_sealed,
    )  # fmt: skip
    # A simulation's keys follow from its seed: without this a second run would find all of them agreed.
    _agreed.cache_clear()
    gc.collect()
    with InProcessGrid(client, len(problems)) as grid:
        began = time.process_time()
        strategy.start(grid, ArrayRecord(), num_rounds=iterations, timeout=600.0)
        seconds = time.process_time() - began
    sent = strategy.ledger.total(NODE_TO_NODE)
    return seconds, sent.payload_bytes, sent.messages


if __name__ == "__main__":
    app()
