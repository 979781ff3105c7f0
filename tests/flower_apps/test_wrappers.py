"""A wrapper of Flower's around a strategy: nodes are sent what it handed over, or it is refused."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import flwr.serverapp.strategy
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy
from tests.flower_apps.cases import CASES, SD_FEEL, SIMILARITY_FREE, AppCase
from tests.strategies.recording_grid import RecordingGrid
from tests.wire.links.addresses import addresses

from hedgerow.sim import plan_run
from hedgerow.strategies import EdgeServerSDFeel, FederatedStrategy
from hedgerow.wire import view

# Those that take a strategy: one that a later Flower adds is among them.
WRAPPERS: list[type[Strategy]] = [
    cls
    for name in sorted(flwr.serverapp.strategy.__all__)
    if inspect.isclass(cls := getattr(flwr.serverapp.strategy, name))
    and "strategy" in inspect.signature(cls).parameters
]


def named(one: Any) -> str:
    if isinstance(one, tuple):
        return " ".join([one[0].name, *(f"{key}={value}" for key, value in one[1].items())])
    return one.__name__  # type: ignore[no-any-return]


# The metric by which Flower's adaptiveclipping_mod tells.
_NORM_BIT = "norm_bit"
# What the small runs of the apps do not have: (app, settings).
MORE: list[tuple[AppCase, dict[str, Any]]] = [
    (SD_FEEL, {"num-servers": 1}),
    (SD_FEEL, {"num-servers": 1, "secure-sum": True}),
    (SIMILARITY_FREE, {"algorithm": "fedavg", "secure-sum": True}),
    (SIMILARITY_FREE, {"algorithm": "ef-fedavg", "compressor": "topk(0.1)", "weighting": "examples"}),
]
STRATEGIES = [(case, case.named(method)) for case in CASES for method in case.methods] + MORE
# Methods with one model go on from a wrapper's noise; the others refuse it.
GO_ON = [
    (SD_FEEL, {"method": "fedavg"}),
    (SD_FEEL, {"method": "feel"}),
    (SD_FEEL, {"num-servers": 1}),
    (SIMILARITY_FREE, {"algorithm": "fedavg"}),
    (SIMILARITY_FREE, {"algorithm": "fedprox"}),
]
FIXED = DifferentialPrivacyServerSideFixedClipping
# Every strategy within one wrapper, and every wrapper around one that goes on and one that does not.
PAIRS = [(one, FIXED) for one in STRATEGIES]
PAIRS += [
    (one, wrapper)
    for one in (GO_ON[0], (SD_FEEL, {"method": "sd-feel"}))
    for wrapper in WRAPPERS
    if wrapper is not FIXED
]


class Recording(RecordingGrid):
    """A grid whose nodes tell besides whether they clipped, as Flower's mod does."""

    def __init__(self, app: Any, nodes: int, **options: Any) -> None:
        super().__init__(app, nodes, pull=self._clipped, **options)
        self.nodes = nodes

    def _clipped(self, kind: str, partition: int, reply: Message) -> None:
        for record in reply.content.values() if reply.has_content() else ():
            if isinstance(record, MetricRecord):
                record[_NORM_BIT] = 0

    def models(self, server_round: int) -> list[ArrayRecord]:
        """What nodes were sent to train on in a round."""
        return [
            record
            for message in self._instructions.values()
            if message.metadata.message_type.startswith("train")
            and message.metadata.group_id == str(server_round)
            for record in message.content.values()
            if isinstance(record, ArrayRecord)
        ]


def wrapped(wrapper: type[Strategy], strategy: Strategy, nodes: int) -> Strategy:
    known = {
        "strategy": strategy, "noise_multiplier": 0.1, "clipping_norm": 5.0, "num_sampled_clients": nodes,
    }  # fmt: skip
    wants = [p for p in inspect.signature(wrapper).parameters.values() if p.name in known]
    missing = [
        p.name for p in inspect.signature(wrapper).parameters.values()
        if p.default is p.empty and p.name not in known
    ]  # fmt: skip
    assert not missing, f"{wrapper.__name__} has parameters that this test does not know: {missing}"
    return wrapper(**{p.name: known[p.name] for p in wants})


def made(case: AppCase, settings: Mapping[str, Any]) -> tuple[Any, Recording]:
    """Return an app's experiment, and a grid of its nodes."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**case.small, **settings}.items()]
    values = import_module(f"{case.name}.server_app").settings.read(plan_run(case.spec, overrides).run_config)
    client = import_module(f"{case.name}.client_app").app
    grid = Recording(client, values.num_clients, run_config=values.run_config, seed=0)
    return import_module(f"{case.name}.server_app").experiment(values), grid


def same(one: ArrayRecord, other: ArrayRecord) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(view(one[key]), view(other[key]), equal_nan=True) for key in one
    )


def two_rounds(strategy: Strategy, app: Any, grid: Recording) -> dict[int, ArrayRecord]:
    """Run two rounds; return the arrays that the strategy is handed after each."""
    handed: dict[int, ArrayRecord] = {}

    def look(server_round: int, arrays: ArrayRecord) -> None:
        handed[server_round] = arrays

    strategy.start(
        grid, app.initial_arrays, num_rounds=2, timeout=60.0, evaluate_fn=look,
        train_config=ConfigRecord(dict(app.train_config)),
    )  # fmt: skip
    return handed


@pytest.mark.parametrize(("one", "wrapper"), PAIRS, ids=named)
def test_nodes_are_sent_what_a_wrapper_hands_over_or_it_is_refused(
    one: tuple[AppCase, dict[str, Any]], wrapper: type[Strategy]
) -> None:
    app, grid = made(*one)
    strategy = app.strategy()
    handed, refusal = dict[int, ArrayRecord](), ""
    with grid:
        try:
            handed = two_rounds(wrapped(wrapper, strategy, grid.nodes), app, grid)
        except ValueError as error:
            refusal = str(error)
    assert not (refusal and one in GO_ON)
    if refusal:
        assert refusal.startswith(f"strategy of {wrapper.__name__} ")
        assert type(strategy).__name__ in refusal
        assert not grid.models(1), "nodes have trained before the refusal"
        return
    sent = grid.models(2)
    assert sent
    assert all(same(arrays, handed[1]) for arrays in sent)
    assert not same(handed[1], strategy.current_arrays()), "the wrapper has added no noise"


def test_wrappers_of_flowers_are_found() -> None:
    assert FIXED in WRAPPERS
    assert len(WRAPPERS) >= 4


def test_every_strategy_of_the_suite_is_wrapped_above() -> None:
    tried = {type(made(*one)[0].strategy()) for one in STRATEGIES}
    bases = {base for cls in tried for base in cls.__mro__}
    # An edge server's own strategy needs its neighbours, see below.
    assert set(_below(FederatedStrategy)) - bases == {EdgeServerSDFeel}


def _below(cls: type) -> Iterator[type]:
    for one in cls.__subclasses__():
        if one.__module__.startswith("hedgerow."):
            yield one
        yield from _below(one)


@pytest.mark.parametrize("one", [MORE[1], MORE[2]], ids=named)
def test_a_wrapper_around_secure_sums_is_told_of_the_noise_that_sums_have(
    one: tuple[AppCase, dict[str, Any]],
) -> None:
    app, grid = made(*one)
    with (
        grid,
        pytest.raises(ValueError, match=r"masked words.*use SecureSum\(noise=SumNoise\(\.\.\.\)\)"),
    ):
        two_rounds(wrapped(FIXED, app.strategy(), grid.nodes), app, grid)


def test_an_edge_server_is_not_run_by_another_start() -> None:
    app, grid = made(SD_FEEL, {})
    strategy = EdgeServerSDFeel(edge=0, peers=addresses(2), topology="complete", min_available_nodes=6)
    with grid, pytest.raises(ValueError, match="must have no start of its own, got EdgeServerSDFeel"):
        two_rounds(wrapped(FIXED, strategy, grid.nodes), app, grid)


class Shifted(Strategy):
    """A wrapper of somebody's own, which changes the model on its way to the next round."""

    def __init__(self, strategy: Strategy, shift: float, in_place: bool = False) -> None:
        self.strategy, self.shift, self.in_place = strategy, shift, in_place

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        assert arrays is not None
        changed = arrays if self.in_place else ArrayRecord()
        for key in list(arrays):
            changed[key] = Array(view(arrays[key]) + np.float32(self.shift))
        return changed, metrics

    def configure_evaluate(self, *args: Any) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, *args: Any) -> None:
        return None

    def summary(self) -> None:
        pass


@pytest.mark.parametrize("in_place", [False, True])
def test_a_wrapper_of_ones_own_is_not_ignored_either(in_place: bool) -> None:
    app, grid = made(SIMILARITY_FREE, {"algorithm": "ef-fedavg"})
    with grid:
        handed = two_rounds(Shifted(app.strategy(), 1e-3, in_place), app, grid)
    assert all(same(arrays, handed[1]) for arrays in grid.models(2))


@pytest.mark.parametrize(
    ("case", "why"),
    [(SD_FEEL, "3 edge servers has a model of its own"), (CASES[2], "no model")],
    ids=("sd-feel", "fedmud"),
)
def test_a_method_that_cannot_go_on_from_other_arrays_says_so(case: AppCase, why: str) -> None:
    app, grid = made(case, {})
    with grid, pytest.raises(ValueError, match=f"arrays of configure_train are not those.*{why}"):
        two_rounds(Shifted(app.strategy(), 1e-3), app, grid)


@pytest.mark.parametrize("case", [SD_FEEL, SIMILARITY_FREE, CASES[2]], ids=lambda case: case.name)
def test_a_wrapper_that_changes_nothing_changes_no_bits(case: AppCase) -> None:
    results = []
    for wrap in (False, True):
        app, grid = made(case, {})
        strategy = app.strategy()
        with grid:
            results.append(two_rounds(Shifted(strategy, 0.0) if wrap else strategy, app, grid)[2])
    assert same(*results)
