"""Every method's ledger against the messages that passed: what is booked was sent, and the reverse.

A modelled link is the arrays (or payloads) that belong to it, where there are messages that do: what is only
emulated is held against the run in which it is sent, or against its closed form. What passes through the hub
is booked by the message; for the defaults of every app that is in tests/contracts/test_methods.py.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from tests.strategies.ceps.test_baselines import STRATEGIES as GOSSIP
from tests.strategies.ceps.test_baselines import fakes
from tests.strategies.ceps.test_baselines import make as gossip
from tests.strategies.ceps.test_strategy import ceps, nodes
from tests.strategies.fedmud.cases import FAMILY, fedmud, made
from tests.strategies.gossip.nodes import Nodes
from tests.strategies.gossip.nodes import run as run_gossip
from tests.strategies.hsgd.nodes import Parties
from tests.strategies.hsgd.nodes import run as run_hsgd
from tests.strategies.hsgd.test_strategy import LAYOUTS, hsgd, network_parties
from tests.strategies.linear_federation import LinearFederation
from tests.strategies.linear_federation import run as run_linear
from tests.strategies.recording_grid import RecordingGrid
from tests.strategies.sd_feel.edge_federation import EdgeFederation
from torch import nn

from hedgerow.clients import LocalTask, sd_feel_client, similarity_free_client
from hedgerow.sim import flower_identity
from hedgerow.strategies import (
    NODE_TO_NODE,
    Compressed,
    FedAvg,
    Feel,
    Fixed,
    HierFAvg,
    Monitor,
    OneBitCode,
    RoundEnd,
    SDFeel,
    SimilarityFree,
)
from hedgerow.strategies.fedmud import DOWN, SYNCS, UP
from hedgerow.strategies.gossip import SET_UP
from hedgerow.wire import HUB_TO_NODE, NODE_TO_HUB, Ledger, parse_compressor, payload_bytes, to_record

# (messages, bytes)
Count = tuple[int, int]
Contents = Sequence[tuple[str, int, RecordDict]]


# Introductions, looks of the monitor and evaluation by nodes are booked nowhere.
UNBOOKED = ("query.whoami", "query.pair", "query.monitor", "evaluate")


def assert_hub_is_booked(ledger: Ledger, grid: RecordingGrid) -> None:
    for link, contents in ((HUB_TO_NODE, grid.sent), (NODE_TO_HUB, grid.replies)):
        passed = [payload_bytes(content) for kind, _, content in contents if kind not in UNBOOKED]
        assert (link, *booked(ledger, link)) == (link, len(passed), sum(passed))


def booked(ledger: Ledger, link: str) -> Count:
    traffic = ledger.total(link)
    return traffic.messages, traffic.payload_bytes


def records(contents: Contents, kind: str, name: str = "arrays") -> Count:
    """Return how many messages of a type carry a record, and its bytes in all of them."""
    found = [
        payload_bytes(content[name]) for each, _, content in contents if each == kind and name in content
    ]
    return len(found), sum(found)


def modelled(ledger: Ledger) -> set[str]:
    return set(ledger.by_link()) - {HUB_TO_NODE, NODE_TO_HUB}


CLIENTS, SERVERS, ROUNDS = 6, 3, 4
CLUSTERED: dict[str, Any] = {"min_available_nodes": CLIENTS}


class Net(nn.Module):
    """Linear layers around running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.hidden(x)).relu())


STREAM = torch.Generator().manual_seed(1)
X, Y = torch.randn(60, 4, generator=STREAM), torch.randint(0, 3, (60,), generator=STREAM)
MODEL = payload_bytes(to_record(Net().state_dict()))
# Running statistics and counters are no parameters.
PARAMETERS = sum(parameter.numel() for parameter in Net().parameters())


def task(context: Context) -> LocalTask:
    return LocalTask(Net(), X, Y, np.arange(10) + 10 * int(context.node_config["partition-id"]))


def start(strategy: Any, grid: RecordingGrid) -> RecordingGrid:
    config = ConfigRecord({"learning-rate": 0.1, "batch-size": 5, "seed": 0})
    with flower_identity(1):
        strategy.start(grid, to_record(Net().state_dict()), num_rounds=ROUNDS, train_config=config)
    return grid


def trained(strategy: Any) -> RecordingGrid:
    return start(strategy, RecordingGrid(sd_feel_client(task), CLIENTS))


def sd_feel(edge_servers: str, alpha: int) -> SDFeel:
    return SDFeel(
        num_servers=SERVERS, tau1=2, tau2=2, alpha=alpha, topology="ring", edge_servers=edge_servers,
        **CLUSTERED,
    )  # fmt: skip


def assert_clients_are_booked(ledger: Ledger, grid: RecordingGrid, up: str, down: str) -> None:
    for link, contents in ((up, grid.replies), (down, grid.sent)):
        assert booked(ledger, link) == records(contents, "train")
        traffic = ledger.total(link)
        assert traffic.nominal_bits == 32 * PARAMETERS * traffic.messages


@pytest.mark.parametrize("alpha", [1, 3])
def test_sd_feel_with_edge_servers_that_are_nodes(alpha: int) -> None:
    strategy = sd_feel("nodes", alpha)
    clients: Any = SimpleNamespace(sizes=range(CLIENTS), client_app=lambda: sd_feel_client(task))
    grid = start(strategy, EdgeFederation(clients, SERVERS).recording())
    assert_clients_are_booked(strategy.ledger, grid, "client->edge", "edge->client")
    gossiped = [content["models"] for kind, _, content in grid.sent if kind == "train.gossip"]
    passed = strategy.ledger.total("edge->edge")
    assert (passed.messages, passed.payload_bytes) == (
        sum(map(len, gossiped)),
        sum(map(payload_bytes, gossiped)),
    )
    assert passed.nominal_bits == 32 * PARAMETERS * passed.messages
    dtypes = {array.dtype for record in gossiped for array in record.values()}
    assert dtypes == ({"float32"} if alpha == 1 else {"float32", "float64"})
    models = sum(
        len(record) for kind, _, c in grid.sent for record in c.array_records.values() if "intra" in kind
    )
    sent = models + passed.messages + strategy.ledger.total("edge->client").messages
    assert strategy.ledger.total(HUB_TO_NODE).nominal_bits == 32 * PARAMETERS * sent


def test_hierfavg() -> None:
    strategy = HierFAvg(num_servers=SERVERS, tau1=2, tau2=2, **CLUSTERED)
    grid = trained(strategy)
    assert_clients_are_booked(strategy.ledger, grid, "client->edge", "edge->client")
    for link in ("edge->cloud", "cloud->edge"):  # emulated: one model of each server, every second round
        exchanges = ROUNDS // 2 * SERVERS
        assert booked(strategy.ledger, link) == (exchanges, exchanges * MODEL)
        assert strategy.ledger.total(link).nominal_bits == 32 * PARAMETERS * exchanges


@pytest.mark.parametrize(
    ("strategy", "up", "down"),
    [
        (Feel(clients_per_round=4, tau1=2, **CLUSTERED), "client->edge", "edge->client"),
        (FedAvg(local_steps=2, **CLUSTERED), "client->cloud", "cloud->client"),
    ],
    ids=["feel", "fedavg"],
)
def test_methods_without_servers_between_book_their_clients_models(strategy: Any, up: str, down: str) -> None:
    grid = trained(strategy)
    assert_clients_are_booked(strategy.ledger, grid, up, down)


@pytest.mark.parametrize("compressor", ["topk(0.5)", "sign", "identity"])
def test_compressed_uplinks_of_another_method(compressor: str) -> None:
    strategy = Compressed(sd_feel("emulated", 1), compressor)
    grid = trained(strategy)
    assert_hub_is_booked(strategy.ledger, grid)
    assert booked(strategy.ledger, "edge->client") == records(grid.sent, "train")
    name = "arrays" if compressor == "identity" else "update"
    assert booked(strategy.ledger, "client->edge") == records(grid.replies, "train", name)
    bits = parse_compressor(compressor).bits(PARAMETERS)
    assert strategy.uplink_bits == strategy.ledger.total("client->edge").nominal_bits == 24 * bits
    assert strategy.dense_uplink_bits == 24 * 32 * PARAMETERS


def test_the_clock_sends_parameters_alone() -> None:
    strategy = FedAvg(local_steps=2, **CLUSTERED)
    trained(strategy)
    assert strategy.time.system(strategy.federation).num_params == PARAMETERS


# Similarity-free


@pytest.mark.parametrize("operator", ["gradient", "prox"])
@pytest.mark.parametrize("compressor", ["identity", "topk(0.2)", "sign", "ternary"])
def test_similarity_free(operator: Any, compressor: str) -> None:
    strategy = SimilarityFree(
        schedule=Fixed(c=0.1, num_rounds=ROUNDS), operator=operator, compressor=compressor, local_iters=2,
        batch_size=5, min_available_nodes=4,
    )  # fmt: skip
    grid = start(strategy, RecordingGrid(similarity_free_client(task), 4))
    assert booked(strategy.ledger, "server->worker") == records(grid.sent, "train")
    name = "arrays" if compressor == "identity" else "update"
    assert booked(strategy.ledger, "worker->server") == records(grid.replies, "train", name)
    assert strategy.ledger.total("server->worker").nominal_bits == 4 * ROUNDS * 32 * PARAMETERS
    if compressor != "ternary":  # whose bits depend on what it sends
        bits = parse_compressor(compressor).bits(PARAMETERS)
        assert strategy.ledger.total("worker->server").nominal_bits == 4 * ROUNDS * bits


# FedMUD and its baselines


def assert_layers_are_booked(strategy: Any) -> None:
    federation = LinearFederation()
    grid = RecordingGrid(federation.client_app(), federation.num_clients)
    run_linear(strategy, federation, 6, grid=grid)
    assert_hub_is_booked(strategy.ledger, grid)

    def arrays(contents: Contents) -> list[int]:
        kinds = ("train", "query.merge")
        return [
            sum(map(payload_bytes, content.array_records.values()))
            for kind, _, content in contents
            if kind in kinds
        ]

    sent, told = arrays(grid.sent), [size for size in arrays(grid.replies) if size]
    assert booked(strategy.ledger, DOWN) == (len(sent), sum(sent))
    assert booked(strategy.ledger, UP) == (len(told), sum(told))
    assert strategy.ledger.total(UP).nominal_bits == strategy.uplink_bits * len(told)
    assert modelled(strategy.ledger) == {DOWN, UP}


METHODS: dict[str, Callable[..., Any]] = {
    **{
        variant: partial(fedmud, variant=variant, ratio=0.4)
        for variant in ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+aad", "dense")
    },
    "mud, merged every two rounds": partial(fedmud, reset_interval=2),
    **{kind.__name__: partial(made, kind, learning_rate=0.02) for kind in FAMILY[1:]},
}


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", METHODS)
def test_fedmud_and_its_baselines(name: str, sync: str) -> None:
    assert_layers_are_booked(METHODS[name](sync=sync, num_clients_per_round=2))


# CEPS and the gossip baselines


def assert_gossip_is_booked(strategy: Any, fake: Nodes, num_rounds: int = 8) -> None:
    _, _, grid = run_gossip(strategy, fake, num_rounds)
    assert_hub_is_booked(strategy.ledger, grid)
    bundles = [content["bundle"] for kind, _, content in grid.sent if kind == "train.update"]
    payloads = [payload for bundle in bundles for payload in bundle.values()]
    assert payloads
    assert booked(strategy.ledger, NODE_TO_NODE) == (len(payloads), sum(map(len, payloads)))
    bits = strategy.method.sizes.message_bits
    assert strategy.ledger.total(NODE_TO_NODE).nominal_bits == bits * len(payloads)
    # Seeds that neighbours tell each other before their first message are modelled: no message holds them.
    assert modelled(strategy.ledger) - {SET_UP} == {NODE_TO_NODE}


@pytest.mark.parametrize("monitor", [False, True], ids=["alone", "monitored"])
@pytest.mark.parametrize("codec", ["1bcs", "sparse64", "dense64"])
def test_ceps(codec: str, monitor: bool) -> None:
    seen = {"monitor": Monitor(3)} if monitor else {}
    assert_gossip_is_booked(ceps(codec=codec, **seen), nodes())


def test_ceps_that_encodes_for_each_receiver() -> None:
    # These payloads also say for whom they are.
    assert_gossip_is_booked(ceps(code=OneBitCode(phi_owner="receiver"), measurements=96), nodes())


@pytest.mark.parametrize("name", GOSSIP)
def test_gossip_baselines(name: str) -> None:
    fake = fakes(want=lambda i, k: [(i + 1) % 8, (i - 1) % 8])
    local = {"local_steps": 1} if name.startswith(("d-psgd", "dfed")) else {}
    assert_gossip_is_booked(gossip(name, dim=60, **local), fake)


# HSGD: vectors and bytes are booked as they are, without keys and headers.

HOSPITAL = {
    ("query", "train.exchange", "head"): "cloud->hospital",
    ("query", "train.exchange", "hospital"): "cloud->hospital",
    ("reply", "train.exchange", "head"): "hospital->edge",
    ("reply", "train.exchange", "zeta1"): "hospital->edge",
    ("query", "train.update", "zeta2"): "edge->hospital",
    ("reply", "train.update", "head"): "hospital->cloud",
    ("reply", "train.update", "hospital"): "hospital->cloud",
}
DEVICE = {
    ("query", "train.exchange", "device"): "edge->device",
    ("reply", "train.exchange", "zeta2"): "device->edge",
    ("query", "train.update", "head"): "edge->device",
    ("query", "train.update", "zeta1"): "edge->device",
    ("reply", "train.update", "device"): "device->edge",
}
# Hosted devices are emulated: only encodings, of which an edge sends on all that it got, have messages.
EDGE = {
    ("query", "train.exchange", "device"): "cloud->edge",
    ("reply", "train.update", "device"): "edge->cloud",
}
CLOUD = {"cloud->hospital", "hospital->cloud", "cloud->edge", "edge->cloud"}


def vectors(content: RecordDict) -> dict[str, int]:
    """Return the bytes of what a content carries, by key."""
    found = {
        key: array.numpy().nbytes
        for record in content.array_records.values()
        for key, array in record.items()
    }
    for key, coded in content.config_records.get("payload", ConfigRecord()).items():
        found[key] = sum(map(len, coded)) if isinstance(coded, list) else len(coded)  # type: ignore[arg-type]
    return found


def passed_by_link(parties: Parties, grid: RecordingGrid) -> dict[str, int]:
    links: dict[str, int] = {}
    tables = {"hospital": HOSPITAL, "device": DEVICE, "edge": EDGE}
    for direction, contents in (("query", grid.sent), ("reply", grid.replies)):
        for kind, partition, content in contents:
            table = tables[parties.parties[partition].role]
            for key, size in vectors(content).items():
                if link := table.get((direction, kind, key)):
                    links[link] = links.get(link, 0) + size
    return links


@LAYOUTS
@pytest.mark.parametrize("method", ["hsgd", "c-hsgd", "jfl", "tdcd", "c-tdcd"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hsgd(method: str, edges: bool, dtype: str) -> None:
    parties, begin = network_parties(7, edges=edges, dtype=dtype)
    options: dict[str, Any] = {"aggregate": False} if "tdcd" in method else {}
    strategy = hsgd(parties, 4, 2, method=method, participation=0.5, **options)
    _, _, grid = run_hsgd(strategy, parties, begin, 2)
    assert_hub_is_booked(strategy.ledger, grid)
    passed = passed_by_link(parties, grid)
    assert not edges or {"cloud->edge", "edge->cloud"} <= passed.keys()
    if "tdcd" in method:
        # There is no cloud: between two rounds models pass through the server only because nodes keep none.
        passed = {link: size for link, size in passed.items() if link not in CLOUD}
        assert not modelled(strategy.ledger) & CLOUD
    if method == "jfl":
        # A pair's hospital tells the models of all its pairs, and starts from the one global model.
        assert passed["hospital->cloud"] > passed["cloud->hospital"]
    assert {link: strategy.ledger.total(link).payload_bytes for link in passed} == passed


def test_devices_of_pairs_get_back_the_models_that_they_do_not_keep() -> None:
    """In the layout of devices a pair's theta_2 passes every local interval; the paper counts the last."""
    parties, begin = network_parties(7, dtype="float32")
    strategy = hsgd(parties, 8, 2, method="jfl", participation=0.5)
    run_hsgd(strategy, parties, begin, 1)
    up = strategy.ledger.total("device->edge")
    hosted, _ = network_parties(7, edges=True, dtype="float32")
    keeps = hsgd(hosted, 8, 2, method="jfl", participation=0.5)
    run_hsgd(keeps, hosted, begin, 1)
    assert up.nominal_bits == keeps.ledger.total("device->edge").nominal_bits
    assert up.payload_bytes > keeps.ledger.total("device->edge").payload_bytes


# What a round tells of it


def test_a_round_tells_the_traffic_of_every_link_since_the_start() -> None:
    strategy, ends = sd_feel("emulated", 1), list[RoundEnd]()
    strategy.on_round_end = [ends.append]
    trained(strategy)
    assert [end.by_link for end in ends[:1]] == [{}]
    assert [sorted(end.by_link) for end in ends[1:3]] == [
        ["client->edge", "edge->client", HUB_TO_NODE, NODE_TO_HUB],
        ["client->edge", "edge->client", "edge->edge", HUB_TO_NODE, NODE_TO_HUB],
    ]
    assert ends[-1].by_link == strategy.ledger.by_link()
    for n, end in enumerate(ends[1:], start=1):
        assert end.by_link["client->edge"].messages == n * CLIENTS
        inside = [traffic for link, traffic in end.by_link.items() if link not in (HUB_TO_NODE, NODE_TO_HUB)]
        assert end.bits == sum(traffic.nominal_bits for traffic in inside)
        assert end.payload_bytes == sum(traffic.payload_bytes for traffic in inside)


def test_the_traffic_of_a_round_is_plain_numbers_in_a_record() -> None:
    strategy, ends = FedAvg(**CLUSTERED), list[RoundEnd]()
    strategy.on_round_end = [ends.append]
    trained(strategy)
    record = json.loads(json.dumps(asdict(ends[1])))
    models = {
        "messages": CLIENTS,
        "nominal_bits": CLIENTS * 32 * PARAMETERS,
        "payload_bytes": CLIENTS * MODEL,
    }
    assert record["by_link"]["client->cloud"] == record["by_link"]["cloud->client"] == models
