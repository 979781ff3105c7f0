"""``hedgerow check``: which of the suite's strategies an app's ClientApp can serve, found by sending it what
they send.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hedgerow.sim.cli.options import AppPath, RunConfig, bad_options

if TYPE_CHECKING:
    import numpy as np
    from flwr.app import ArrayRecord, Message
    from numpy.typing import NDArray

    from hedgerow.sim.engine.grid import InProcessGrid
    from hedgerow.sim.runs.app import LoadedApp
    from hedgerow.sim.runs.first_train import FirstTrain
    from hedgerow.sim.runs.plan import Plan

__all__ = ["check"]

NODES = 2
_FEW, _MORE = 1, 4
# What Flower says of a handler that an app lacks.
_NO_HANDLER = "function registered"
_WIDTH = 160

Models = dict[int, list["NDArray[np.generic]"]]


def check(
    app_path: AppPath,
    run_config: RunConfig = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=NODES, help="Number of nodes that the app needs. Default: what it says, else 2."),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(
            help="'key=value key=value' of every node's config, beside partition-id and num-partitions."
        ),
    ] = None,
) -> None:
    """Say which of the suite's strategies an app's ClientApp can serve, and what it lacks for the others.

    The app's server runs until its first train message, which has the model. Then nodes, two of them where
    the method allows it, get what each strategy sends in its first rounds, and are judged by their replies.

    Exits with 0 if the app ran, 1 if it failed, 2 on bad options.
    """
    from hedgerow.sim.runs.app import find_app, load_app
    from hedgerow.sim.runs.first_train import NoTrainError, first_train
    from hedgerow.sim.runs.plan import parse_overrides, plan_run

    with bad_options():
        spec = find_app(app_path)
        plan = plan_run(spec, run_config or [], num_nodes=nodes)
        told = parse_overrides(node_config or [], {})
        if plan.num_nodes < NODES:
            raise ValueError(f"the app says {plan.num_nodes} node; a check needs {NODES}: --nodes {NODES}")
    with _silence():
        try:
            app = load_app(spec.folder)
            first = first_train(app, plan, told)
        except NoTrainError as error:
            _fail(str(error), error)
        except Exception as error:
            _fail(f"the app {spec.name} raised {type(error).__name__}: {error} ({_place(error)})", error)
        if reasons := _errors(first.replies, all_of_them=True):
            _fail(
                f"every node that its own server asked for {first.message.metadata.message_type!r} failed: "
                f"{reasons[0]}"
            )
        verdicts = [judge(_Nodes(app, plan, told, first)) for judge in _JUDGES]
    size = sum(array.numpy().size for array in first.arrays.values())
    typer.echo(
        f"{spec.name}: {plan.num_nodes} nodes, a model of {len(first.arrays)} arrays and {size:,} values, as "
        "its own server sends it\n"
    )
    typer.echo(_table(verdicts))


def _fail(text: str, error: Exception | None = None) -> None:
    typer.echo(f"Check failed: {text}", err=True)
    raise typer.Exit(1) from error


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}"


@dataclass(frozen=True)
class Verdict:
    """Whether a ClientApp serves a strategy: ``yes``, ``partly``, ``no``, or ``unknown``."""

    strategy: str
    serves: str
    lacks: str = ""
    mend: str = ""


def _table(verdicts: Iterable[Verdict]) -> str:
    rows = [
        ("Strategy", "Serves", "What it lacks", ""),
        *((v.strategy, v.serves, v.lacks, v.mend) for v in verdicts),
    ]
    first, second = (max(len(row[column]) for row in rows) + 2 for column in (0, 1))
    lines = []
    for strategy, serves, lacks, mend in rows:
        lines.append(f"{strategy:{first}}{serves:{second}}{lacks}".rstrip())
        if mend:
            lines.append(f"{'':{first + second}}-> {mend}")
    return "\n".join(lines)


# What is asked, and what comes back.


@dataclass
class _Outcome:
    """What came of a strategy's rounds."""

    strategy: Any
    replies: list[Message] = field(default_factory=list)
    error: Exception | None = None

    def of(self, kind: str) -> list[Message]:
        """Return the replies to messages of a type."""
        return [reply for reply in self.replies if reply.metadata.message_type == kind]

    @property
    def rejected(self) -> dict[str, int]:
        report = getattr(self.strategy, "report", None)
        return dict(report.rejected) if report is not None else {}

    @property
    def served(self) -> bool:
        """Whether the rounds were completed, and no reply was lost."""
        return self.error is None and not self.rejected

    @property
    def reason(self) -> str:
        """What went wrong, as a node put it, else the exchange, else the strategy."""
        if errors := _errors(self.replies):
            return f"nodes raise {errors[-1]}"
        if self.rejected:
            return f"replies are refused: {', '.join(self.rejected)}"
        return _short(str(self.error))

    @cached_property
    def models(self) -> Models:
        """What each node replied to ``train``, by node id."""
        return {
            reply.metadata.src_node_id: [
                array.numpy() for record in reply.content.array_records.values() for array in record.values()
            ]
            for reply in self.of("train")
            if reply.has_content()
        }


def _errors(replies: Iterable[Message], *, all_of_them: bool = False) -> list[str]:
    """Return what the error replies say; nothing where all must be errors and one is not."""
    replies = list(replies)
    found = [_short(reply.error.reason) for reply in replies if reply.has_error()]
    return [] if all_of_them and len(found) < len(replies) else found


def _short(text: str | None) -> str:
    from hedgerow.wire.printable import shown

    return shown(" ".join((text or "").split()), _WIDTH)


class _Nodes:
    """The app's nodes, new for each question, and the model that they expect."""

    def __init__(self, app: LoadedApp, plan: Plan, node_config: Any, first: FirstTrain) -> None:
        from hedgerow.strategies import Compressed
        from hedgerow.strategies.strategy import FederatedStrategy

        self.app, self.plan, self.node_config = app, plan, node_config
        self.own = first.started.get("self")
        self.arrays = first.arrays
        # Another project's strategy may add to the config what its nodes need; ours, what only its own do.
        ours = isinstance(self.own, FederatedStrategy | Compressed)
        config = (first.started.get("train_config") or {}) if ours else first.config
        self.config = {key: value for key, value in config.items() if key != "server-round"}
        content = first.message.content
        self.options: dict[str, Any] = {
            "arrayrecord_key": next(iter(content.array_records), "arrays") if not ours else "arrays",
            "configrecord_key": next(iter(content.config_records), "config") if not ours else "config",
            "weighted_by_key": getattr(self.own, "weighted_by_key", "num-examples"),
            "min_available_nodes": NODES,
        }
        # An app that sends no model is asked as if it had the smallest.
        self.some_arrays: ArrayRecord = self.arrays or _zeros("0")

    @contextlib.contextmanager
    def grid(self) -> Iterator[tuple[InProcessGrid, list[Message]]]:
        """Give a grid of new nodes and what they will have replied, introductions aside."""
        from hedgerow.sim.engine.grid import InProcessGrid
        from hedgerow.wire.message_types import WHOAMI

        replies: list[Message] = []
        asked_who: set[str] = set()

        class Heard(InProcessGrid):
            def push_messages(self, messages: Iterable[Message]) -> list[str]:
                messages = list(messages)
                ids = super().push_messages(messages)
                for message, message_id in zip(messages, ids, strict=True):
                    if message.metadata.message_type == WHOAMI or "whoami" in message.content.config_records:
                        asked_who.add(message_id)
                return ids

            def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
                pulled = super().pull_messages(message_ids)
                replies.extend(r for r in pulled if r.metadata.reply_to_message_id not in asked_who)
                return pulled

        configs = [dict(self.node_config) for _ in range(self.plan.num_nodes)]
        with (
            _same_draws(),
            Heard(
                self.app.client_app,
                self.plan.num_nodes,
                run_config=self.plan.run_config,
                node_configs=configs,
            ) as grid,
        ):
            yield grid, replies

    def run(self, strategy: Any, arrays: ArrayRecord | None = None, rounds: int = 1) -> _Outcome:
        """Run a strategy's first rounds."""
        from flwr.app import ConfigRecord

        with self.grid() as (grid, replies):
            out = _Outcome(strategy, replies)
            try:
                strategy.start(
                    grid=grid,
                    initial_arrays=self.some_arrays if arrays is None else arrays,
                    num_rounds=rounds,
                    timeout=60.0,
                    train_config=ConfigRecord(dict(self.config)),
                )
            except Exception as error:
                out.error = error
        return out

    def honours(
        self, make: Callable[[Any], Any], low: Any, high: Any
    ) -> tuple[bool | None, _Outcome, _Outcome]:
        """Return whether what nodes train depends on an instruction, which ``make`` gets; None: unclear."""
        few, more = self.run(make(low)), self.run(make(high))
        start = [array.numpy() for array in self.some_arrays.values()]
        if all(_equal(model, start) for model in more.models.values()):
            return None, few, more
        if _same(few.models, more.models):
            return False, few, more
        return (True if _same(few.models, self.run(make(low)).models) else None), few, more


def _zeros(*keys: str) -> ArrayRecord:
    import numpy as np
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({key: Array(np.zeros(1, np.float32)) for key in keys})


def _equal(one: list[NDArray[np.generic]], other: list[NDArray[np.generic]]) -> bool:
    import numpy as np

    return len(one) == len(other) and all(map(np.array_equal, one, other))


def _same(one: Models, other: Models) -> bool:
    return one.keys() == other.keys() and all(_equal(one[node], other[node]) for node in one)


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Let an app that draws from the process's generators draw the same in every question."""
    import numpy as np
    import torch

    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep back what the app prints and Flower logs: a refusal is an answer here, not an event."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


# Strategy by strategy.


def _introductions(nodes: _Nodes) -> Verdict:
    from hedgerow.strategies import Roster

    name = "(who a node is)"
    with nodes.grid() as (grid, _):
        try:
            roster = Roster.gather(grid, NODES, 60.0)
        except Exception as error:
            return Verdict(
                name, "no", _short(str(error)), "hedgerow run --nodes N, or partition-id in --node-config"
            )
    if roster.introduced:
        return Verdict(name, "yes")
    return Verdict(
        name,
        "no",
        "partition ids are ranks of random node ids, other ones in every run; clusters= is refused",
        "app = ClientApp(mods=[introduce])  # from hedgerow.clients import introduce",
    )


def _sd_feel(nodes: _Nodes) -> Verdict:
    from hedgerow.strategies import SDFeel

    name = "SDFeel, HierFAvg, Feel, FedAvg"

    def strategy(steps: int) -> SDFeel:
        return SDFeel(
            num_servers=NODES, topology="complete", tau1=steps, tau2=1, max_repeats=0, min_train_nodes=NODES,
            **nodes.options,
        )  # fmt: skip

    honours, few, more = nodes.honours(strategy, _FEW, _MORE)
    take = "for step in range(config['local-steps']):  # in the ClientApp's train, one mini-batch step each"
    tell = "metrics['num-steps'] = steps  # how many mini-batch steps the ClientApp's train took"
    wrong = "num-steps is not local-steps"
    if wrong in few.rejected or wrong in more.rejected:
        return Verdict(name, "no", "replies tell another num-steps than config['local-steps']", take)
    if not (few.served and more.served):
        bad = more if few.served else few
        return Verdict(
            name, "no", bad.reason, _mend_train(bad, "app = sd_feel_client()  # from hedgerow.clients")
        )
    told = all("num-steps" in _metrics(reply) for reply in few.of("train"))
    if honours is False:
        told_too = ", though they tell num-steps" if told else ""
        return Verdict(
            name, "no", f"nodes train the same model for {_FEW} and {_MORE} local-steps{told_too}", take
        )
    if honours is None:
        lacks = "two equal instructions gave two models, or training changes nothing: local-steps is not seen"
        return Verdict(name, "unknown", lacks, "" if told else tell)
    if not told:
        lacks = "replies do not tell num-steps: iterations and simulated seconds are unknown"
        return Verdict(name, "partly", lacks, tell)
    return Verdict(name, "yes")


def _metrics(reply: Message) -> Any:
    return next(iter(reply.content.metric_records.values()), {}) if reply.has_content() else {}


def _mend_train(outcome: _Outcome, client: str) -> str:
    """Return what mends an ordinary train: a handler, the config that it misses, or a reply."""
    if _NO_HANDLER in outcome.reason:
        return client
    if any(reply.has_error() for reply in outcome.of("train")):
        return "start(train_config=ConfigRecord({...}))  # what the ClientApp reads from its messages"
    return (
        "return Message(RecordDict({'arrays': ArrayRecord(model.state_dict()), "
        "'metrics': MetricRecord({'num-examples': n})}), reply_to=message)"
    )


def _similarity_free(nodes: _Nodes) -> Verdict:
    from hedgerow.strategies import SimilarityFree
    from hedgerow.strategies.schedules import Fixed

    name = "SimilarityFree"
    mend = (
        "app = similarity_free_client()  # from hedgerow.clients; "
        "dataset and model in the run config are your own"
    )

    def strategy(iters: int, step: float = 0.01, **more: Any) -> SimilarityFree:
        return SimilarityFree(
            schedule=Fixed(c=step, num_rounds=1), local_iters=iters, batch_size=8, max_repeats=0, **more,
            **nodes.options,
        )  # fmt: skip

    honours, few, more = nodes.honours(strategy, _FEW, _MORE)
    if not (few.served and more.served):
        return Verdict(name, "no", (more if few.served else few).reason, mend)
    if honours is False:
        return Verdict(name, "no", "nodes ignore config['local-iters']", mend)
    steps, *_ = nodes.honours(lambda step: strategy(_FEW, step), 0.01, 0.02)
    if steps is False:
        return Verdict(name, "no", "nodes ignore config['local-step'], the step size", mend)
    compressing = nodes.run(strategy(_FEW, compressor="topk(0.5)"), rounds=2)
    if not compressing.served:
        return Verdict(name, "partly", f"without a compressor only: {compressing.reason}", mend)
    if honours is None or steps is None:
        return Verdict(
            name, "unknown", "two equal instructions gave two models, or training changes nothing", mend
        )
    return Verdict(name, "yes")


def _fedmud(nodes: _Nodes) -> Verdict:
    from hedgerow.strategies import FedMUD
    from hedgerow.wire.compress import compressed_part
    from hedgerow.wire.layers import LayerShape
    from hedgerow.wire.records import Layout

    name = "FedMUD and its family"
    layout = Layout.of(nodes.some_arrays)
    layers = [
        LayerShape(key, shape)
        for key, shape in zip(layout.keys, layout.shapes, strict=True)
        if len(shape) in (2, 4) and min(shape) > 0
    ]
    strategy = FedMUD(
        # Without such a layer nothing is coded, and the messages are the same.
        variant="mud+bkd+aad" if layers else "dense",
        layers=layers, num_parameters=compressed_part(layout).size, ratio=0.5, skip_front=0, skip_back=0,
        local_epochs=1, max_repeats=0, min_train_nodes=NODES, **nodes.options,
    )  # fmt: skip
    outcome = nodes.run(strategy)
    mend = "app = fedmud_client()  # from hedgerow.clients; dataset and model in the run config are your own"
    if outcome.served and not layers:
        return Verdict(
            name, "partly", "the model has no Linear or Conv2d layer to code: only variant='dense'"
        )
    return _served(name, outcome, mend)


def _compressed(nodes: _Nodes) -> Verdict:
    from hedgerow.strategies import Compressed, SDFeel

    # Its messages say all that those of a strategy on ordinary models say.
    wrapped = SDFeel(
        num_servers=NODES, topology="complete", tau1=_FEW, tau2=1, max_repeats=0, min_train_nodes=NODES,
        **nodes.options,
    )  # fmt: skip
    mend = "app = ClientApp(mods=[compress_reply])  # from hedgerow.clients; before mods that see arrays"
    return _served("Compressed", nodes.run(Compressed(wrapped, "topk(0.5)")), mend)


def _ceps(nodes: _Nodes) -> Verdict:
    return _served("CEPS", _ceps_events(nodes), "app = ceps_client(problem)  # from hedgerow.clients")


def _ceps_events(nodes: _Nodes) -> _Outcome:
    from flwr.app import ArrayRecord

    from hedgerow.strategies import CEPS, Gossip

    own = nodes.own
    dim = (
        own.method.dim if isinstance(own, Gossip) else sum(a.numpy().size for a in nodes.some_arrays.values())
    )
    options = {key: value for key, value in nodes.options.items() if key == "min_available_nodes"}
    strategy = CEPS(
        dim=dim, sparsity=max(1, dim // 10), codec="sparse32", topology="complete", interval=1,
        sigma_rule="fixed_c", c=10.0, num_iterations=2, max_repeats=0, **options,
    )  # fmt: skip
    return nodes.run(strategy, ArrayRecord(), rounds=2)


def _hsgd(nodes: _Nodes) -> Verdict:
    from hedgerow.strategies import HSGD

    blocks = ("head.", "hospital.", "device.")
    split = all(any(key.startswith(block) for key in nodes.arrays) for block in blocks)
    arrays = nodes.arrays if split else _zeros(*(f"{block}0" for block in blocks))
    options = {key: value for key, value in nodes.options.items() if key != "min_available_nodes"}
    strategy = HSGD(max_repeats=0, min_available_nodes=nodes.plan.num_nodes, **options)
    return _served("HSGD", nodes.run(strategy, arrays), "app = hsgd_client(load)  # from hedgerow.clients")


def _router(nodes: _Nodes) -> Verdict:
    import networkx as nx

    from hedgerow.strategies import Roster, Router
    from hedgerow.wire.ledger import Ledger
    from hedgerow.wire.message_types import PUBLISH

    name = "Router"
    with nodes.grid() as (grid, replies):
        router = Router(nx.complete_graph(NODES), _AnyBytes(), Ledger())
        out = _Outcome(router, replies)
        try:
            router.route(grid, Roster.gather(grid, NODES, 60.0), 1, 0, {0: [1], 1: [0]}, timeout=60.0)
        except Exception as error:
            out.error = error
    if out.error is None and router.report.deliveries == NODES:
        return Verdict(name, "yes")
    set_up = _ceps_events(nodes)
    if set_up.served and set_up.of(PUBLISH):
        return Verdict(name, "partly", f"only what a Gossip strategy has greeted publishes: {out.reason}")
    published = "RecordDict({'payload': ConfigRecord({'bytes': payload})})"
    lost = ", ".join(router.report.lost)
    reason = f"nodes raise {_errors(out.of(PUBLISH))[-1]}" if _errors(out.of(PUBLISH)) else lost
    return Verdict(
        name,
        "no",
        reason,
        f"@app.query('publish')  # the function returns Message({published}, reply_to=message)",
    )


class _AnyBytes:
    """Payloads of which nothing is known."""

    max_bytes = 1 << 30
    per_receiver = False

    def bits(self, payload: bytes) -> int:
        return 8 * len(payload)


def _served(name: str, outcome: _Outcome, mend: str) -> Verdict:
    return Verdict(name, "yes") if outcome.served else Verdict(name, "no", outcome.reason, mend)


_JUDGES: tuple[Callable[[_Nodes], Verdict], ...] = (
    _introductions,
    _sd_feel,
    _similarity_free,
    _fedmud,
    _compressed,
    _ceps,
    _hsgd,
    _router,
)
