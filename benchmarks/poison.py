"""What lying nodes do to a run, under each rule of aggregation: final test accuracies, and what a rule costs.

    python benchmarks/poison.py                                  # every app, attack and rule, 20 % of liars
    python benchmarks/poison.py --shares 0.1,0.2,0.3 --seeds 0,1,2 --apps sd-feel --attacks sign-flip,alie
    python benchmarks/poison.py --cost-only

20 nodes learn a perceptron of 25,450 parameters on real MNIST images (mnist-5k), dealt IID and skewed
(dirichlet(0.3)), with the apps' own settings and bounds. Liars are spread evenly over partitions, hence over
SD-FEEL's two clusters. They are wrappers of the honest client app; those that collude see all honest updates
of the round, as no rule's promise forbids. An update is what a node sends less what it was sent:

- ``sign-flip``: 5 times the node's own update, backwards.
- ``scaling``: 20 times its own update, within the default bound of norms.
- ``label-flip``: the honest work on labels y turned into 9 - y.
- ``gaussian``: noise of 10 times the honest updates' median norm.
- ``alie``: "a little is enough" (G. Baruch, M. Baruch, Y. Goldberg, 2019): the honest mean less 1.5 honest
  deviations, entry by entry; all liars send the same.
- ``ipm``: inner-product manipulation (C. Xie, O. Koyejo, I. Gupta, 2020): the honest mean, backwards, by as
  much as turns the mean of all around and a tenth more.
- ``free-rider``: what the node was sent.
- ``lying-weight``: its own update, backwards, with 10^12 claimed examples.

A run that a bound ends with an error is *ended* in the tables.

Rules without numbers get theirs from the size of the group that they work on (SD-FEEL: a cluster): up to 30 %
of liars are provided for, and ``clipped`` cuts at the median norm of an honest run's updates.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from math import ceil, isfinite
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

from hedgerow.clients import fedmud_client, local_task, sd_feel_client, similarity_free_client
from hedgerow.clients.app import BatchClientApp
from hedgerow.clients.local_task import LocalTask
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.launch import load_app, plan_run
from hedgerow.strategies.robust import Aggregation, parse_aggregation
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.message_types import WHOAMI
from hedgerow.wire.records import records_of, to_state_dict, view

HERE = Path(__file__).resolve().parent
NODES = 20
ROUNDS = 20
DISTRIBUTIONS = {"iid": "iid", "skewed": "dirichlet(0.3)"}
_COMMON = f"num-clients={NODES} model='{__name__}:perceptron'"
Vector = NDArray[np.float64]


def perceptron(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the model that is learnt: one hidden layer of 32."""
    inputs = int(np.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, num_classes))


@dataclass(frozen=True)
class Case:
    """An app, its settings, its client on a task, and the nodes that a rule works on at once."""

    folder: str
    settings: str
    client: Callable[..., BatchClientApp]
    group: int = NODES


APPS = {
    "sd-feel": Case(
        "sd-feel",
        f"num-servers=2 topology='complete' tau1=8 tau2=1 alpha=1 iterations={8 * ROUNDS} "
        "batch-size=20 learning-rate=0.1",
        sd_feel_client,
        NODES // 2,
    ),
    "similarity-free": Case(
        "similarity-free",
        f"algorithm='fedavg' num-rounds={ROUNDS} local-iters=8 schedule='fixed' fixed-c=0.46 batch-size=20",
        similarity_free_client,
    ),
    "fedmud": Case(
        "fedmud",
        f"method='fedmud+bkd+aad' num-rounds={ROUNDS} clients-per-round={NODES} skip-front=0 ratio=0.125 "
        "init-a=0.5 batch-size=40 learning-rate=0.2 sync='dense'",
        fedmud_client,
    ),
}


# Attacks


@dataclass(frozen=True)
class Seen:
    """What liars know in a round: a liar's own update (d,), and all honest ones (nodes, d)."""

    own: Vector
    honest: NDArray[np.float64]
    liars: int
    stream: np.random.Generator


def _gaussian(seen: Seen) -> Vector:
    norm = 10 * float(np.median(np.linalg.norm(seen.honest, axis=1)))
    return seen.stream.normal(0.0, norm / np.sqrt(seen.own.size), seen.own.size)


def _inner_product(seen: Seen) -> Vector:
    return np.asarray(-1.1 * len(seen.honest) / seen.liars * seen.honest.mean(axis=0))


# What becomes of a liar's update; None where its work itself is the lie.
ATTACKS: Mapping[str, Callable[[Seen], Vector] | None] = {
    "sign-flip": lambda seen: -5 * seen.own,
    "scaling": lambda seen: 20 * seen.own,
    "label-flip": None,
    "gaussian": _gaussian,
    "alie": lambda seen: seen.honest.mean(axis=0) - 1.5 * seen.honest.std(axis=0),
    "ipm": _inner_product,
    "free-rider": lambda seen: np.zeros_like(seen.own),
    "lying-weight": lambda seen: -seen.own,
}
NO_ATTACK = "none"
_CLAIMED = 10**12


def liars_of(share: float) -> tuple[int, ...]:
    """Return the partitions of the liars, spread evenly."""
    count = round(share * NODES)
    return tuple(i * NODES // count for i in range(count))


class Poisoned(ClientApp):
    """An honest app of which some nodes lie."""

    def __init__(self, honest: Case, attack: str, liars: Sequence[int], seed: int) -> None:
        super().__init__()
        self.attack, self.liars, self.seed = attack, frozenset(liars), seed
        self.honest = honest.client(task=self._task if attack == "label-flip" else local_task)

    def batch_handler(self, message_type: str) -> BatchHandler | None:
        """Return the honest handler with the liars' answers in place of their own."""
        handler = self.honest.batch_handler(message_type)
        if handler is None or not self.liars or ATTACKS.get(self.attack) is None:
            return handler
        if message_type == "train":
            return lambda calls: self._trained(calls, handler(calls))
        if message_type == WHOAMI and self.attack == "lying-weight":
            return lambda calls: [
                self._claimed(call, answer) for call, answer in zip(calls, handler(calls), strict=True)
            ]
        return handler

    def _task(self, context: Context) -> LocalTask:
        task = local_task(context)
        lies = int(context.node_config["partition-id"]) in self.liars
        return replace(task, y=_flipped(task.y)) if lies else task

    def _claimed(self, call: Call, answer: RecordDict | Exception) -> RecordDict | Exception:
        if call.partition_id in self.liars and not isinstance(answer, Exception):
            for record in (
                *records_of(answer, ConfigRecord).values(),
                *records_of(answer, MetricRecord).values(),
            ):
                if "num-examples" in record:
                    record["num-examples"] = _CLAIMED
        return answer

    def _trained(
        self, calls: Sequence[Call], answers: Sequence[RecordDict | Exception]
    ) -> list[RecordDict | Exception]:
        lie, updates = ATTACKS[self.attack], dict[int, Vector]()
        assert lie is not None
        for position, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            if isinstance(answer, Exception):
                raise answer
            updates[position] = _flat(_arrays(answer)) - _flat(_sent(call, _arrays(answer)))
        honest = np.stack([u for at, u in updates.items() if calls[at].partition_id not in self.liars])
        told: list[RecordDict | Exception] = list(answers)
        for at, own in updates.items():
            call, answer = calls[at], answers[at]
            if call.partition_id not in self.liars:
                continue
            assert isinstance(answer, RecordDict)
            server_round = next(iter(records_of(call.content, ConfigRecord).values()))["server-round"]
            stream = np.random.default_rng([self.seed, int(str(server_round)), call.partition_id])
            update = lie(Seen(own, honest, len(self.liars), stream))
            told[at] = self._claimed(call, _with_update(call, answer, update))
        return told


@cache
def _flipped(y: torch.Tensor) -> torch.Tensor:
    return 9 - y


def _arrays(answer: RecordDict) -> dict[str, NDArray[Any]]:
    (record,) = records_of(answer, ArrayRecord).values()
    return {key: view(array) for key, array in record.items()}


def _sent(call: Call, like: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return what a node was sent of the arrays of its reply; fresh factors that it drew itself are zero."""
    records = records_of(call.content, ArrayRecord)
    known = {
        key: view(array) for name in ("arrays", "factors") for key, array in records.get(name, {}).items()
    }
    return {key: known.get(key, np.zeros_like(array)) for key, array in like.items()}


def _flat(arrays: Mapping[str, NDArray[Any]]) -> Vector:
    return np.concatenate([array.ravel().astype(np.float64) for array in arrays.values()])


def _with_update(call: Call, answer: RecordDict, update: Vector) -> RecordDict:
    arrays, start, lied = _arrays(answer), 0, ArrayRecord()
    sent = _sent(call, arrays)
    for key, array in arrays.items():
        values = sent[key] + update[start : start + array.size].reshape(array.shape)
        lied[key] = Array(values.astype(array.dtype))
        start += array.size
    (name,) = records_of(answer, ArrayRecord)
    return RecordDict({**answer, name: lied})


# Runs


class Watching:
    """The plain mean as a rule, that notes the updates' norms."""

    is_mean, least = False, 1

    def __init__(self) -> None:
        self.norms: list[float] = []

    def combined(self, updates: NDArray[np.float64], weights: Vector) -> Vector:
        """Return the mean."""
        self.norms += np.linalg.norm(updates, axis=1).tolist()
        return parse_aggregation("mean").combined(updates, weights)


@dataclass(frozen=True)
class Job:
    app: str
    distribution: str
    attack: str
    rule: str
    share: float
    seed: int


def accuracy(job: Job, watching: Watching | None = None, rounds: int = ROUNDS) -> float:
    """Return the test accuracy after so many rounds; NaN where the run ended with an error."""
    case = APPS[job.app]
    overrides = f"{_COMMON} {case.settings} partition='{DISTRIBUTIONS[job.distribution]}' seed={job.seed}"
    loaded = load_app(HERE.parent / "flower_apps" / case.folder)
    plan = plan_run(loaded.spec, [f"{overrides} aggregation='{job.rule}'"])
    package = import_module(f"{case.folder.replace('-', '_')}.server_app")
    values = package.settings.read(plan.run_config)
    made = package.experiment(values)
    strategy = made.strategy()
    if watching is not None:
        strategy.aggregation = watching
    liars = () if job.attack == NO_ATTACK else liars_of(job.share)
    client = Poisoned(case, job.attack, liars, job.seed)
    with InProcessGrid(client, NODES, run_config=dict(values), seed=job.seed) as grid:
        try:
            result = strategy.start(
                grid, made.initial_arrays, num_rounds=rounds, timeout=600.0,
                train_config=ConfigRecord(dict(made.train_config)),
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            print(f"{job}: {error}", file=sys.stderr, flush=True)
            return float("nan")
    return float(made.measure(to_state_dict(result.arrays))["accuracy"])


@cache
def usual_norm(app: str, distribution: str) -> float:
    """Return the median norm of the updates of an honest run."""
    watching = Watching()
    accuracy(Job(app, distribution, NO_ATTACK, "clipped(1)", 0.0, 0), watching)
    return median(watching.norms)


RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "clipped")


def with_numbers(rule: str, group: int, norm: float) -> str:
    """Return a rule with the numbers that provide for 30 % of liars in a group."""
    liars = ceil(0.3 * group)
    numbers = {
        "trimmed-mean": "0.3",
        "krum": f"{liars}",
        "multi-krum": f"{liars},{group - 2 * liars}",
        "clipped": f"{norm:.4g}",
    }
    return f"{rule}({numbers[rule]})" if rule in numbers else rule


def _begin() -> None:
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)


def _done(job: Job) -> tuple[Job, float]:
    norm = usual_norm(job.app, job.distribution) if job.rule == "clipped" else 0.0
    rule = with_numbers(job.rule, APPS[job.app].group, norm)
    return job, accuracy(replace(job, rule=rule))


# Tables


def table(app: str, distribution: str, share: float, found: Mapping[Job, float]) -> Iterator[str]:
    """Yield the lines of one table: a row an attack, a column a rule."""
    mine = {
        job: value for job, value in found.items()
        if (job.app, job.distribution) == (app, distribution) and job.share in (0.0, share)
    }  # fmt: skip
    rules = list(dict.fromkeys(job.rule for job in mine))
    yield f"\n**{app}, {distribution}, {share:.0%} of the nodes lie**\n"
    yield f"| attack | {' | '.join(rules)} | best rule against no attack |"
    yield f"|---|{'---:|' * (len(rules) + 1)}"
    values = {
        attack: {
            rule: 100 * mean(v for job, v in mine.items() if (job.attack, job.rule) == (attack, rule))
            for rule in rules
        }
        for attack in dict.fromkeys(job.attack for job in mine)
    }
    honest = values[NO_ATTACK].get("mean", max(values[NO_ATTACK].values()))
    worst = {rule: float(np.min([row[rule] for row in values.values()])) for rule in rules}
    for attack, row in (*values.items(), ("the worst", worst)):
        cells = " | ".join(f"{row[rule]:.1f}" if isfinite(row[rule]) else "ended" for rule in rules)
        yield f"| {attack} | {cells} | {np.nanmax(list(row.values())) - honest:+.1f} |"


def cost(rules: Iterable[str], nodes: int = 50, dim: int = 21_840, repeats: int = 5) -> Iterator[str]:
    """Yield what each rule costs beside the mean, all in turn in this process."""
    rng = np.random.default_rng(0)
    updates, weights = rng.normal(0.1, 1.0, (nodes, dim)), np.ones(nodes)
    made: dict[str, Aggregation] = {
        rule: parse_aggregation(with_numbers(rule, nodes, float(np.sqrt(dim)))) for rule in rules
    }
    seconds: dict[str, list[float]] = {rule: [] for rule in made}
    for _, (name, rule) in product(range(repeats + 1), made.items()):
        began = time.perf_counter()
        rule.combined(updates, weights)
        seconds[name].append(time.perf_counter() - began)
    base = median(seconds["mean"][1:])
    yield f"\n**Cost of one aggregation of {nodes} updates of {dim:,} parameters, medians of {repeats}**\n"
    yield "| rule | ms | times the mean |"
    yield "|---|---:|---:|"
    for name, taken in seconds.items():
        yield f"| {made[name]} | {1e3 * median(taken[1:]):.1f} | {median(taken[1:]) / base:.1f} |"


def chosen(names: str, known: Iterable[str], option: str) -> list[str]:
    """Return the names of a list with commas; all for an empty one."""
    known = list(known)
    asked = [name.strip() for name in names.split(",")] if names else known
    if unknown := sorted(set(asked) - set(known)):
        raise typer.BadParameter(f"{option} {', '.join(unknown)}; valid is any of {', '.join(known)}")
    return asked


def main(
    apps: Annotated[str, typer.Option(help="with commas; empty: all")] = "",
    attacks: Annotated[str, typer.Option(help="with commas; empty: all")] = "",
    rules: Annotated[str, typer.Option(help="with commas; empty: all")] = "",
    distributions: Annotated[str, typer.Option(help="iid, skewed; empty: both")] = "",
    shares: Annotated[str, typer.Option(help="of the nodes that lie, above 0 and below 0.5")] = "0.2",
    seeds: Annotated[str, typer.Option(help="with commas")] = "0",
    jobs: Annotated[int, typer.Option(min=1, help="processes, of one thread each")] = 2,
    cost_only: Annotated[bool, typer.Option(help="no runs, only what rules cost")] = False,
) -> None:
    """Print the tables."""
    _begin()
    names = chosen(rules, RULES, "--rules")
    asked = [NO_ATTACK, *chosen(attacks, ATTACKS, "--attacks")]
    try:
        parts, draws = [float(share) for share in shares.split(",")], [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"--shares {shares} --seeds {seeds}; valid are numbers with commas"
        ) from error
    if not all(0 < share < 0.5 and round(share * NODES) for share in parts) or min(draws) < 0:
        raise typer.BadParameter(f"--shares {shares}; valid is 0.05 to 0.45; --seeds {seeds}; valid is >= 0")
    if not cost_only:
        found = measured(
            (
                Job(app, distribution, attack, rule, share if attack != NO_ATTACK else 0.0, seed)
                for app in chosen(apps, APPS, "--apps")
                for distribution in chosen(distributions, DISTRIBUTIONS, "--distributions")
                for attack, rule, share, seed in product(asked, names, parts, draws)
            ),
            jobs,
        )
        pairs = dict.fromkeys((job.app, job.distribution) for job in found)
        for (app, distribution), share in product(pairs, parts):
            print("\n".join(table(app, distribution, share, found)))
    print("\n".join(cost(dict.fromkeys(["mean", *names]))))


def measured(asked: Iterable[Job], jobs: int) -> dict[Job, float]:
    """Return the accuracy of each job, worked on by some processes."""
    work = list(dict.fromkeys(asked))
    began = time.perf_counter()
    with get_context("spawn").Pool(jobs, _begin) as pool:
        results = dict(pool.imap_unordered(_done, work, chunksize=1))
    print(
        f"{len(work)} runs in {time.perf_counter() - began:.0f} s in {jobs} processes, load "
        f"{os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return {job: results[job] for job in work}


if __name__ == "__main__":
    typer.run(main)
