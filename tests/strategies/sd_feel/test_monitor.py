"""Edge servers observed from outside: u as emulated servers have it, and no round that waits for it."""

import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from tests.strategies.peer_addresses import addresses
from tests.strategies.sd_feel.test_edge_server import CLUSTERS, PROBLEM, run

from hedgerow.sim import flower_identity
from hedgerow.strategies import EdgeMonitor, EdgeServerSDFeel, RoundEnd, SDFeel, as_graph
from hedgerow.strategies.peers import PeerChannel, Topic
from hedgerow.strategies.rounds import Progress
from hedgerow.strategies.sd_feel.monitor import _Report, layout_digest, run_digest
from hedgerow.wire import Layout, PayloadError, Traffic

SETTINGS: dict[str, Any] = {"topology": "path", "tau1": 2, "tau2": 2, "alpha": 2, "seed": 3}
INITIAL = ArrayRecord({"w": Array(np.random.default_rng(1).standard_normal(40).astype(np.float32))})


def measured(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
    return None if server_round % 2 else MetricRecord({"loss": float(np.square(arrays["w"].numpy()).sum())})


def servers(peers: list[str], monitor: str, **options: Any) -> list[EdgeServerSDFeel]:
    return [
        EdgeServerSDFeel(
            edge=d, peers=peers, min_available_nodes=CLUSTERS.count(d), fraction_evaluate=0.0,
            monitor=monitor, monitor_every=2, **{**SETTINGS, "peer_timeout": 20.0, **options},
        )
        for d in range(len(peers))
    ]  # fmt: skip


def observed(monitor: EdgeMonitor, num_rounds: int, timeout: float = 60.0) -> tuple[list[RoundEnd], Any]:
    """Return what a monitor tells, which is being filled, and its thread."""
    ends: list[RoundEnd] = []
    monitor.on_round_end = [ends.append]
    grid: Any = None
    thread = threading.Thread(
        target=lambda: monitor.start(grid, INITIAL, num_rounds, timeout, evaluate_fn=measured)
    )
    thread.start()
    return ends, thread


def test_the_monitor_sees_u_as_emulated_servers_have_it() -> None:
    expected: list[RoundEnd] = []
    emulated = SDFeel(
        num_servers=4, clusters=CLUSTERS, fraction_evaluate=0.0, on_round_end=[expected.append], **SETTINGS
    )
    with flower_identity(1):
        emulated.start(PROBLEM.grid(), INITIAL, num_rounds=6, timeout=60.0, evaluate_fn=measured)
    *peers, address = addresses(5)
    monitor = EdgeMonitor(peers=peers, address=address, every=2, patience=20.0, **SETTINGS)
    ends, thread = observed(monitor, 6)
    own = servers(peers, address)
    run(own, INITIAL, 6)
    thread.join(20.0)
    there = [end for end in expected if end.round % 2 == 0]
    assert [end.round for end in ends] == [0, 2, 4, 6]
    for end, one in zip(ends, there, strict=True):
        assert (end.central, end.iterations, end.bits) == (one.central, one.iterations, one.bits)
        assert end.sim_seconds == one.sim_seconds
        assert end.rejected == {}
    errors = [one.train["consensus-error"] for one in there[1:]]
    assert [end.train["consensus-error"] for end in ends[1:]] == errors
    assert all(end.train["servers"] == [0, 1, 2, 3] for end in ends[1:])
    # What was told the monitor is booked, and is none of the modelled system's traffic.
    assert all(one.ledger.total("peer->monitor").messages == 3 for one in own)
    assert ends[-1].payload_bytes == emulated.ledger.total().payload_bytes


def test_no_round_waits_for_a_monitor_that_is_not_there_and_what_it_lacks_is_counted() -> None:
    *peers, address = addresses(5)
    own = servers(peers, address, lost_after=1.0)
    ends: list[RoundEnd] = []
    own[0].on_round_end = [ends.append]
    found = run(own, INITIAL, 12)
    assert all(isinstance(model, ArrayRecord) for model in found.values()), found
    assert ends[-1].train["servers"] == [0, 1, 2, 3]
    # Twelve rounds take less than one report that nobody takes.
    assert sum(end.wall_seconds for end in ends) < 20.0
    reporter = own[0]._reporter
    assert reporter is not None
    assert reporter.lost >= 1


def test_a_server_that_is_gone_is_waited_for_once() -> None:
    *peers, address = addresses(4)
    monitor = EdgeMonitor(
        peers=peers, address=address, every=1, patience=1.0, topology="path", tau1=2, tau2=1, alpha=2, seed=3
    )
    ends, thread = observed(monitor, 6)
    layout = Layout.of(INITIAL)
    name = {"tau1": 2, "tau2": 1, "seed": 3, "aggregation": "mean", "alpha": 2, "exact_if_complete": False}
    run_name = run_digest(as_graph("path", 3), **name)
    began = time.monotonic()
    with ExitStack() as stack:
        first, second, stranger = (
            stack.enter_context(
                PeerChannel(
                    d, [*peers, address], [1 - d] if d < 2 else [1], run=name, layout=layout_digest(layout),
                    largest=1, listeners=[3],
                )
            )
            for d, name in enumerate((run_name, run_name, "other"))
        )  # fmt: skip
        for number in range(1, 7):
            report = _Report(np.full(40, number, np.float32), 1.0 + number, Progress(bits=number))
            assert not stranger.tell(3, Topic(number, 0), report.encoded(), 5.0)
            for channel in (first, second):
                assert channel.tell(3, Topic(number, 0), report.encoded(), 5.0)
        thread.join(20.0)
    assert [end.round for end in ends] == list(range(7))
    assert [end.train["servers"] for end in ends[1:]] == [[0, 1]] * 6
    assert all(end.rejected["no report"] == 1 for end in ends[1:])
    assert time.monotonic() - began < 6.0
    assert [end.bits for end in ends[1:]] == [2 * number for number in range(1, 7)]


def test_a_report_survives_its_way_and_lies_are_refused() -> None:
    layout = Layout.of(INITIAL)
    progress = Progress(
        iterations=4, bits=7, payload_bytes=9, by_link={"a->b": Traffic(1, 2, 3)}, sim_seconds=0.5
    )
    told = _Report(INITIAL["w"].numpy(), 3.0, progress).encoded()
    heard = _Report.decoded(told, layout)
    assert (heard.size, heard.progress) == (3.0, progress)
    assert np.array_equal(heard.model, INITIAL["w"].numpy())
    nan = _Report(np.full(40, np.nan, np.float32), 3.0, progress).encoded()
    lies = [b"", told[:-1], told + b"1", nan, b"\xff" * len(told), told.replace(b"3.0", b"-3 ")]
    lies += [
        told.replace(b'"bits": 7', b'"bits":-7'),
        told.replace(b'"sim-seconds": 0.5', b'"sim-seconds": NaN'),
    ]
    for lie in lies:
        with pytest.raises(PayloadError):
            _Report.decoded(lie, layout)
