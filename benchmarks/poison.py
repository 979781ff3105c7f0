"""What lying nodes do to a run, under each rule of aggregation: final test accuracies, and what rules cost.

    python benchmarks/poison.py                     # 20 % of liars, five attacks, IID, one seed
    python benchmarks/poison.py --seeds 0,1,2 --attacks all --distributions all --cache poison.jsonl
    python benchmarks/poison.py --seeds 0,1,2 --shares 0.1,0.2,0.3 --attacks all --distributions all
    python benchmarks/poison.py --apps sd-feel --attacks sign-flip,alie --cache poison.jsonl
    python benchmarks/poison.py --cost-only

What was run is kept in the file of ``--cache``: a sweep that was stopped goes on, and another one adds to it.

20 nodes learn a perceptron of 25,450 parameters on real MNIST images (mnist-5k), dealt IID and skewed
(dirichlet(0.3)), with the apps' own settings and bounds. Liars are spread evenly over partitions, hence over
SD-FEEL's two clusters; on CEPS's graph, drawn by the seed, each node has ten neighbours, and some have more
liars among them than others. Liars are wrappers of the honest client app; those that collude see all honest
updates of the round, as no rule's promise forbids. An update is what a node sends less what it was sent, in
CEPS less the mean of what honest nodes sent the last time:

- ``sign-flip``: 5 times the node's own update, backwards.
- ``scaling``: 20 times its own update, within the default bound of norms.
- ``label-flip``: the honest work on labels y turned into 9 - y.
- ``gaussian``: noise of 10 times the honest updates' median norm.
- ``alie``: "a little is enough" (G. Baruch, M. Baruch, Y. Goldberg, 2019): the honest mean less 1.5 honest
  deviations, entry by entry; all liars send the same.
- ``ipm``: inner-product manipulation (C. Xie, O. Koyejo, I. Gupta, 2020): the honest mean, backwards, by as
  much as turns the mean of all around and a tenth more.
- ``mimic`` (S. P. Karimireddy, L. He, M. Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via
  Bucketing", 2022): all liars send what one honest node sent, always the same one: the one that is furthest
  out along the direction in which the honest updates of the first round vary most.
- ``free-rider``: what the node was sent.
- ``lying-weight``: its own update, backwards, with 10^6 claimed examples.

A run that a bound ends with an error is *ended* in the tables; numbers are means over the seeds, with half of
their range. HSGD's ten groups, a hospital and an edge each, learn biopsies (455 people), and both nodes of a
group lie, or none; ``skewed`` are other shares of the classes. CEPS's is the accuracy of the mean of the
honest nodes' models; it knows no examples that nodes could claim, and each node takes its rule of itself and
its neighbours, of which there are four.

Rules without numbers get theirs from the size of the group that they work on (SD-FEEL: a cluster): up to 30 %
of liars are provided for, and ``clipped`` cuts at the median norm of an honest run's updates.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import pairwise, product
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

from hedgerow.clients import (
    Problem,
    TorchProblem,
    ceps_client,
    fedmud_client,
    local_task,
    sd_feel_client,
    similarity_free_client,
)
from hedgerow.clients.local_task import LocalTask
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.app import load_app
from hedgerow.sim.runs.launch import plan_run
from hedgerow.tasks import build_model, federated
from hedgerow.wire.calls import Batched, BatchHandler, Call
from hedgerow.wire.message_types import EXCHANGE, PUBLISH, UPDATE, WHOAMI
from hedgerow.wire.records import records_of, to_state_dict, view
from hedgerow.wire.robust_means import Aggregation, parse_aggregation

HERE = Path(__file__).resolve().parent
NODES = 20
ROUNDS = 20
# Of a node of CEPS.
NEIGHBOURS = 10
RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "clipped")
DISTRIBUTIONS = {"iid": "iid", "skewed": "dirichlet(0.3)"}
_COMMON = f"num-clients={NODES} model='{__name__}:perceptron'"
Vector = NDArray[np.float64]


def perceptron(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the model that is learnt: one hidden layer of 32."""
    inputs = int(np.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, num_classes))


def _flipped_task(liars: frozenset[int], context: Context) -> LocalTask:
    task = local_task(context)
    return replace(task, y=_flipped(task.y)) if _partition(context) in liars else task


def _flipped_problem(liars: frozenset[int], context: Context) -> Problem:
    problems = import_module("ceps.problems")
    honest: Problem = problems.node_problem(context)
    if _partition(context) not in liars:
        return honest
    values = dict(context.run_config)
    data = federated(values["dataset"], values["partition"], values["num-clients"], values["seed"])
    part = torch.from_numpy(data.parts[_partition(context)])
    model = build_model(values["model"], data.dataset.input_shape, 10, values["seed"])
    lie: Problem = problems.FromInitial(
        TorchProblem(model, data.x[part], _flipped(data.y)[part]),
        problems.problem(problems.key_of(values), 0).start,
    )
    return lie


def _partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


@cache
def _flipped(y: torch.Tensor) -> torch.Tensor:
    return 9 - y


@dataclass(frozen=True)
class Case:
    """An app, its settings, its client where some nodes flip labels, and what a rule works on at once."""

    folder: str
    settings: str
    client: Callable[[frozenset[int]], ClientApp]
    group: int = NODES
    # Those that the app has.
    rules: tuple[str, ...] = RULES
    # What it knows nothing of.
    immune: tuple[str, ...] = ()
    # What all have in common; HSGD's parties have halves of tables instead of images.
    common: str = _COMMON
    skewed: str = DISTRIBUTIONS["skewed"]

    def dealt(self, distribution: str) -> str:
        """Return the partition scheme of a distribution."""
        return self.skewed if distribution == "skewed" else DISTRIBUTIONS[distribution]


APPS = {
    "sd-feel": Case(
        "sd-feel",
        f"num-servers=2 topology='complete' tau1=8 tau2=1 alpha=1 iterations={8 * ROUNDS} "
        "batch-size=20 learning-rate=0.1",
        lambda liars: sd_feel_client(task=partial(_flipped_task, liars)),
        NODES // 2,
    ),
    "similarity-free": Case(
        "similarity-free",
        f"algorithm='fedavg' num-rounds={ROUNDS} local-iters=8 schedule='fixed' fixed-c=0.46 batch-size=20",
        lambda liars: similarity_free_client(task=partial(_flipped_task, liars)),
    ),
    "fedmud": Case(
        "fedmud",
        f"method='fedmud+bkd+aad' num-rounds={ROUNDS} clients-per-round={NODES} skip-front=0 ratio=0.125 "
        "init-a=0.5 batch-size=40 learning-rate=0.2 sync='dense'",
        lambda liars: fedmud_client(task=partial(_flipped_task, liars)),
    ),
    "ceps": Case(
        "ceps",
        f"problem='network' dataset='mnist-5k' topology='regular({NEIGHBOURS})' participation=1.0 "
        "codec='dense64' sealed=false monitor=false sparsity=25450 interval-low=1 interval-high=1 "
        "sigma-rule='fixed_c' c=12.0 mu=0.01",
        lambda liars: ceps_client(partial(_flipped_problem, liars)),
        NEIGHBOURS + 1,
        ("mean", "median", "trimmed-mean", "clipped"),
        ("lying-weight",),
    ),
    "hsgd": Case(
        "hsgd",
        f"num-groups={NODES // 2} dataset='breast-cancer' iterations={8 * ROUNDS} global-interval=8 "
        "local-interval=4 participation=0.5",
        lambda liars: import_module("hsgd.client_app").app,  # type: ignore[no-any-return]
        NODES // 2,
        RULES[:-1],
        ("label-flip", "lying-weight"),
        common=f"num-clients={NODES}",
        skewed="rates(1.0)",
    ),
}


# Attacks


@dataclass(frozen=True)
class Seen:
    """What liars know in a round: a liar's own update (d,), all honest ones (nodes, d), and their first."""

    own: Vector
    honest: NDArray[np.float64]
    first: NDArray[np.float64]
    liars: int
    stream: np.random.Generator


def _gaussian(seen: Seen) -> Vector:
    norm = 10 * float(np.median(np.linalg.norm(seen.honest, axis=1)))
    return seen.stream.normal(0.0, norm / np.sqrt(seen.own.size), seen.own.size)


def _inner_product(seen: Seen) -> Vector:
    return np.asarray(-1.1 * len(seen.honest) / seen.liars * seen.honest.mean(axis=0))


def _mimic(seen: Seen) -> Vector:
    spread = seen.first - seen.first.mean(axis=0)
    # The nodes' places along the direction of most variance, up to a factor.
    along = np.linalg.eigh(spread @ spread.T).eigenvectors[:, -1]
    return np.asarray(seen.honest[int(np.abs(along).argmax())])


# What becomes of a liar's update; None where its work itself is the lie.
ATTACKS: Mapping[str, Callable[[Seen], Vector] | None] = {
    "sign-flip": lambda seen: -5 * seen.own,
    "scaling": lambda seen: 20 * seen.own,
    "label-flip": None,
    "gaussian": _gaussian,
    "alie": lambda seen: seen.honest.mean(axis=0) - 1.5 * seen.honest.std(axis=0),
    "ipm": _inner_product,
    "mimic": _mimic,
    "free-rider": lambda seen: np.zeros_like(seen.own),
    "lying-weight": lambda seen: -seen.own,
}
NO_ATTACK = "none"
# Those that cost most, in seconds that one waits for.
WORST = "sign-flip,alie,ipm,free-rider,lying-weight"
_CLAIMED = 10**6


def liars_of(share: float) -> tuple[int, ...]:
    """Return the partitions of the liars, spread evenly."""
    count = round(share * NODES)
    return tuple(i * NODES // count for i in range(count))


class Poisoned(ClientApp):
    """An honest app of which some nodes lie.

    Attributes
    ----------
    published : list[NDArray]
        What honest nodes of CEPS told their neighbours the last time.
    started : dict[str, NDArray]
        What the hospitals of HSGD, and the edges, were sent at the start of the round.
    apart : list[float]
        How far each model that they told was from that of the node after.
    first : dict[int, NDArray]
        The honest updates (nodes, d) of the first round, by d.
    """

    def __init__(self, honest: Case, attack: str, liars: Sequence[int], seed: int) -> None:
        super().__init__()
        self.attack, self.liars, self.seed = attack, frozenset(liars), seed
        self.honest = honest.client(self.liars if attack == "label-flip" else frozenset())
        self.published: list[Vector] = []
        self.started: dict[str, Vector] = {}
        self.apart: list[float] = []
        self.first: dict[int, NDArray[np.float64]] = {}
        self._times = 0

    def batch_handler(self, message_type: str) -> BatchHandler | None:
        """Return the honest handler with the liars' answers in place of their own."""
        assert isinstance(self.honest, Batched)
        handler = self.honest.batch_handler(message_type)
        lies = {
            "train": self._trained,
            WHOAMI: self._introduced,
            EXCHANGE: self._begun,
            UPDATE: self._updated,
        }
        answer = self._told if message_type == PUBLISH else lies.get(message_type)
        harmless = not self.liars or ATTACKS.get(self.attack) is None
        if handler is None or answer is None or (harmless and message_type != PUBLISH):
            return handler
        return lambda calls: answer(calls, handler(calls))

    def _seen(
        self, own: Vector, honest: NDArray[np.float64], liars: int, stream: np.random.Generator
    ) -> Seen:
        return Seen(own, honest, self.first.setdefault(own.size, honest), liars, stream)

    def _told(
        self, calls: Sequence[Call], answers: Sequence[RecordDict | Exception]
    ) -> list[RecordDict | Exception]:
        """Return what nodes of CEPS publish, all of them at once: models, as bytes."""
        models: list[Vector] = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            (record,) = records_of(answer, ConfigRecord).values()
            models.append(np.frombuffer(record["bytes"], "<f8"))  # type: ignore[call-overload]
        before = np.mean(self.published, axis=0) if self.published else np.zeros_like(models[0])
        honest = [m for call, m in zip(calls, models, strict=True) if call.partition_id not in self.liars]
        self.published = honest
        self.apart += [float(np.linalg.norm(a - b)) for a, b in pairwise(honest)]
        self._times += 1
        lie, told = ATTACKS.get(self.attack), list(answers)
        if lie is None:
            return told
        updates = np.stack(honest) - before
        for at, call in enumerate(calls):
            if call.partition_id in self.liars:
                stream = np.random.default_rng([self.seed, self._times, call.partition_id])
                model = before + lie(self._seen(models[at] - before, updates, len(self.liars), stream))
                told[at] = RecordDict({"payload": ConfigRecord({"bytes": model.astype("<f8").tobytes()})})
        return told

    def _begun(
        self, calls: Sequence[Call], answers: Sequence[RecordDict | Exception]
    ) -> Sequence[RecordDict | Exception]:
        for call in calls:
            if records_of(call.content, ArrayRecord):
                sent = _arrays(call.content)
                self.started[" ".join(sent)] = _flat(sent)
        return answers

    def _updated(
        self, calls: Sequence[Call], answers: Sequence[RecordDict | Exception]
    ) -> list[RecordDict | Exception]:
        """Return what HSGD's hospitals and edges upload: liars of each kind know what its honest ones do."""
        told, self._times = list(answers), self._times + 1
        kinds: dict[str, list[int]] = {}
        for at, answer in enumerate(answers):
            if isinstance(answer, Exception):
                raise answer
            if records_of(answer, ArrayRecord):
                kinds.setdefault(" ".join(_arrays(answer)), []).append(at)
        for kind, places in kinds.items():
            models = {at: _flat(_arrays(answers[at])) for at in places}  # type: ignore[arg-type]
            honest = np.stack([m for at, m in models.items() if calls[at].partition_id not in self.liars])
            before = self.started[kind]
            for at, model in models.items():
                call, answer = calls[at], answers[at]
                if call.partition_id not in self.liars:
                    continue
                assert isinstance(answer, RecordDict)
                stream = np.random.default_rng([self.seed, self._times, call.partition_id])
                # A group is two nodes: so many of each kind lie.
                seen = self._seen(model - before, honest - before, len(self.liars) // 2, stream)
                lie = ATTACKS[self.attack]
                assert lie is not None
                told[at] = RecordDict({**answer, "arrays": _shaped(before + lie(seen), _arrays(answer))})
        return told

    def _introduced(
        self, calls: Sequence[Call], answers: Sequence[RecordDict | Exception]
    ) -> Sequence[RecordDict | Exception]:
        if self.attack != "lying-weight":
            return answers
        return [self._claimed(call, answer) for call, answer in zip(calls, answers, strict=True)]

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
            update = lie(self._seen(own, honest, len(self.liars), stream))
            told[at] = self._claimed(call, _with_update(call, answer, update))
        return told


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


def _shaped(vector: Vector, like: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return a vector as a record of the same arrays."""
    start, record = 0, ArrayRecord()
    for key, array in like.items():
        record[key] = Array(vector[start : start + array.size].reshape(array.shape).astype(array.dtype))
        start += array.size
    return record


def _with_update(call: Call, answer: RecordDict, update: Vector) -> RecordDict:
    arrays = _arrays(answer)
    (name,) = records_of(answer, ArrayRecord)
    return RecordDict({**answer, name: _shaped(_flat(_sent(call, arrays)) + update, arrays)})


# Runs


class Watching:
    """The plain mean as a rule, that notes the updates' norms."""

    is_mean, least = False, 1

    def for_count(self, updates: int) -> "Watching":
        """Return itself."""
        return self

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
    overrides = f"{case.common} {case.settings} partition='{case.dealt(job.distribution)}' seed={job.seed}"
    loaded = load_app(HERE.parent / "flower_apps" / case.folder)
    plan = plan_run(loaded.spec, [f"{overrides} aggregation='{job.rule}'"])
    package = import_module(f"{case.folder.replace('-', '_')}.server_app")
    values = package.settings.read(plan.run_config)
    made = package.experiment(values)
    strategy = made.strategy()
    if watching is not None and job.app != "ceps":
        strategy.aggregation = watching
    liars = () if job.attack == NO_ATTACK else liars_of(job.share)
    client = Poisoned(case, job.attack, liars, job.seed)
    with InProcessGrid(client, NODES, run_config=values.run_config, seed=job.seed) as grid:
        try:
            result = strategy.start(
                grid, made.initial_arrays, num_rounds=rounds + (job.app == "ceps"), timeout=600.0,
                train_config=ConfigRecord(dict(made.train_config)),
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            print(f"{job}: {error}", file=sys.stderr, flush=True)
            return float("nan")
    if client.published:  # What honest nodes told at the start of the last iteration.
        mean_model = np.mean(client.published, axis=0)
        if watching is not None:
            watching.norms += client.apart
        return float(import_module("ceps.problems").network_accuracy(values, mean_model))
    return float(made.measure(to_state_dict(result.arrays))["accuracy"])


@cache
def usual_norm(app: str, distribution: str) -> float:
    """Return the median norm of an honest run's updates; of CEPS's, of the differences of models."""
    watching = Watching()
    accuracy(Job(app, distribution, NO_ATTACK, "clipped(1)", 0.0, 0), watching)
    return median(watching.norms)


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
    rules = [rule for rule in RULES if any((job.rule, job.share) == (rule, share) for job in mine)]
    attacks = [one for one in (NO_ATTACK, *ATTACKS) if any(job.attack == one for job in mine)]
    cells = {
        (attack, rule): [100 * v for job, v in mine.items() if (job.attack, job.rule) == (attack, rule)]
        for attack, rule in product(attacks, rules)
    }
    honest = mean(cells[NO_ATTACK, "mean" if "mean" in rules else rules[0]])
    yield f"\n**{app}, {distribution}, {share:.0%} of the nodes lie**\n"
    yield f"| attack | {' | '.join(rules)} | best rule against no attack |"
    yield f"|---|{'---:|' * (len(rules) + 1)}"
    for attack in attacks:
        row = [cells[attack, rule] for rule in rules]
        best = max((mean(told) for told in row if told and all(map(isfinite, told))), default=float("nan"))
        yield f"| {attack} | {' | '.join(map(_cell, row))} | {best - honest:+.1f} |"
    # Of each rule, the attack that costs it most.
    worst = [
        min((cells[attack, rule] for attack in attacks if cells[attack, rule]), key=_least) for rule in rules
    ]
    best = max((_least(told) for told in worst), default=float("nan"))
    yield f"| the worst | {' | '.join(map(_cell, worst))} | {best - honest:+.1f} |"


def _least(told: Sequence[float]) -> float:
    return mean(told) if all(map(isfinite, told)) else 0.0


def _cell(told: Sequence[float]) -> str:
    """Return the mean over the seeds and half of their range."""
    here = [value for value in told if isfinite(value)]
    ended = len(told) - len(here)
    if not here:
        return "ended" if told else ""
    spread = f" ± {(max(here) - min(here)) / 2:.1f}" if len(here) > 1 else ""
    return f"{mean(here):.1f}{spread}{f' (ended: {ended})' if ended else ''}"


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
    from reports import report  # Beside this script, not where tests import it.

    base = median(seconds["mean"][1:])
    yield f"\n**Cost of one aggregation of {nodes} updates of {dim:,} parameters, medians of {repeats}**\n"
    yield "| rule | ms | times the mean |"
    yield "|---|---:|---:|"
    for name, taken in seconds.items():
        ms = 1e3 * median(taken[1:])
        report(f"{made[name]} of {nodes} updates", ms, "ms", base / median(taken[1:]), "the mean")
        yield f"| {made[name]} | {ms:.1f} | {median(taken[1:]) / base:.1f} |"


def chosen(names: str, known: Iterable[str], option: str) -> list[str]:
    """Return the names of a list with commas; all of them for ``all``."""
    known = list(known)
    asked = known if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := sorted(set(asked) - set(known)):
        raise typer.BadParameter(f"{option} must be all, or any of {known}, got {', '.join(unknown)}")
    return asked


def main(
    apps: Annotated[str, typer.Option(help="with commas, or all")] = "all",
    attacks: Annotated[str, typer.Option(help="with commas, or all")] = WORST,
    rules: Annotated[str, typer.Option(help="with commas, or all")] = "all",
    distributions: Annotated[str, typer.Option(help="iid, skewed, or all")] = "iid",
    shares: Annotated[str, typer.Option(help="of the nodes that lie, above 0 and below 0.5")] = "0.2",
    seeds: Annotated[str, typer.Option(help="with commas")] = "0",
    jobs: Annotated[int, typer.Option(min=1, help="processes, of one thread each")] = 2,
    cache: Annotated[
        Path | None, typer.Option(help="a file that keeps each run; those in it are not run")
    ] = None,
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
            f"--shares and --seeds must be numbers with commas, got {shares} and {seeds}"
        ) from error
    if not all(0 < share < 0.5 and round(share * NODES) for share in parts) or min(draws) < 0:
        raise typer.BadParameter(f"--shares must be 0.05 to 0.45 and --seeds >= 0, got {shares} and {seeds}")
    if not cost_only:
        # A seed after the other: a sweep that is stopped has tables of fewer seeds.
        work = [
            Job(app, distribution, attack, rule, share if attack != NO_ATTACK else 0.0, seed)
            for seed, app, distribution in product(
                draws, chosen(apps, APPS, "--apps"), chosen(distributions, DISTRIBUTIONS, "--distributions")
            )
            for attack, rule, share in product(asked, names, parts)
            if rule in APPS[app].rules and attack not in APPS[app].immune
        ]
        found = measured(list(dict.fromkeys(work)), jobs, cache)
        pairs = dict.fromkeys((job.app, job.distribution) for job in found)
        for (app, distribution), share in product(pairs, parts):
            print("\n".join(table(app, distribution, share, found)))
    print("\n".join(cost(dict.fromkeys(["mean", *names]))))


def kept(cache: Path | None) -> dict[tuple[Job, str], float]:
    """Return the runs of a file, with the settings that they had; a line that was cut off is none."""
    runs: dict[tuple[Job, str], float] = {}
    for line in cache.read_text().splitlines() if cache is not None and cache.exists() else ():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue
        value = float("nan") if told["accuracy"] is None else float(told["accuracy"])
        runs[Job(**told["job"]), told["settings"]] = value
    return runs


def measured(work: Sequence[Job], jobs: int, cache: Path | None = None) -> dict[Job, float]:
    """Return the accuracy of each job: those that a file has not are worked on by some processes."""
    before = kept(cache)
    results = {job: before[key] for job in work if (key := (job, _settings(job))) in before}
    if cache is not None and cache.exists() and not cache.read_text().endswith("\n"):
        with cache.open("a") as file:
            file.write("\n")
    missing, began = [job for job in work if job not in results], time.perf_counter()
    with get_context("spawn").Pool(jobs, _begin) as pool:
        for job, value in pool.imap_unordered(_done, missing, chunksize=1):
            results[job] = value
            if cache is not None:
                told = {
                    "job": asdict(job),
                    "settings": _settings(job),
                    "accuracy": value if isfinite(value) else None,
                }
                with cache.open("a") as file:
                    file.write(json.dumps(told) + "\n")
    print(
        f"{len(missing)} runs in {time.perf_counter() - began:.0f} s in {jobs} processes, load "
        f"{os.getloadavg()[0]:.1f}; {len(work) - len(missing)} were in the file",
        flush=True,
    )
    return {job: results[job] for job in work}


def _settings(job: Job) -> str:
    """Return what a run is, beside its job: a cached one is no other's."""
    case = APPS[job.app]
    return f"{case.common} {case.settings} {case.dealt(job.distribution)} rounds={ROUNDS}"


if __name__ == "__main__":
    typer.run(main)
