"""What nodes are sent: the updates they missed, or the base; and what each way of it costs."""

from typing import Any

import numpy as np
import pytest
from tests.strategies.fedmud.cases import fedmud
from tests.strategies.linear_federation import E_UNC, D, LinearFederation, run

from hedgerow.strategies import FedMUD
from hedgerow.strategies.fedmud import DOWN, SYNCS, UP
from hedgerow.wire import Transfer, view

HEADER = 128  # of a serialised array
BUFFER = 8  # one int64
REST_KEYS = ("first.weight", "last.weight", "last.bias", "norm.num_batches_tracked")


def transfers(strategy: FedMUD, rounds: int, federation: LinearFederation) -> list[list[Transfer]]:
    """Run, and return the transfers of each round."""
    booked: list[list[Transfer]] = []
    strategy.on_round_end = [lambda end: booked.append(list(strategy.ledger.transfers))]
    run(strategy, federation, rounds)
    return booked[1:]


# Bytes, through real messages


def expected_payload(keys: dict[str, int]) -> int:
    """Return the bytes of float32 arrays of these sizes under these keys."""
    return sum(4 * size + HEADER + len(key) for key, size in keys.items())


def factor_sizes(strategy: FedMUD, prefix: str = "") -> dict[str, int]:
    return {prefix + key: int(np.prod(shape)) for key, shape in strategy.plan.shapes.items()}


REST_BYTES = 4 * E_UNC + BUFFER + sum(HEADER + len(key) for key in REST_KEYS)
BASE_BYTES = 4 * D + sum(HEADER + len(key) for key in ("a.weight", "b.weight"))


@pytest.mark.parametrize("sync", SYNCS)
def test_downlink_bytes_are_the_formulas(sync: Any) -> None:
    strategy = fedmud(sync=sync)
    rounds = transfers(strategy, 4, LinearFederation())
    for version, booked in enumerate(rounds):
        down = [transfer.payload_bytes for transfer in booked if transfer.link == DOWN]
        merged = expected_payload(factor_sizes(strategy, f"{version - 1}/"))  # C floats of one reset
        first_or_dense = sync == "dense" or version == 0
        assert down == [REST_BYTES + (BASE_BYTES if first_or_dense else merged)] * 5


def test_factors_are_sent_between_resets_and_neither_factors_nor_merges_right_after_one() -> None:
    strategy, federation = fedmud(reset_interval=2), LinearFederation()
    rounds = transfers(strategy, 5, federation)
    factors = expected_payload(factor_sizes(strategy))
    merged = expected_payload(factor_sizes(strategy, "0/"))
    down = [next(t.payload_bytes for t in booked if t.link == DOWN) - REST_BYTES for booked in rounds]
    assert down == [BASE_BYTES, factors, merged, factors, merged]


@pytest.mark.parametrize("sync", SYNCS)
def test_nominal_bits_are_the_papers_whatever_is_sent(sync: Any) -> None:
    strategy = fedmud(sync=sync, num_clients_per_round=2)
    run(strategy, LinearFederation(), 6)
    nominal = 6 * 2 * 32 * (strategy.plan.count + E_UNC)
    assert strategy.ledger.total(DOWN).nominal_bits == strategy.ledger.total(UP).nominal_bits == nominal


def test_a_node_that_was_away_is_sent_every_merge_it_missed_or_the_base_when_that_is_cheaper() -> None:
    strategy, federation = fedmud(num_clients_per_round=2, ratio=7 / 24), LinearFederation()
    run(strategy, federation, 20)
    reach = D / strategy.plan.count
    last: dict[int, int] = {}
    missed: list[int] = []
    for server_round, client, _, content in federation.seen:
        version = server_round - 1
        gap = version - last[client] if client in last else None
        last[client] = version
        if gap is None or gap >= reach:
            assert "base" in content
            assert "merges" not in content
        else:
            missed.append(gap)
            merges = content.array_records.get("merges", {})
            assert sum(view(array).size for array in merges.values()) == gap * strategy.plan.count
            assert content["config"]["from-version"] == version - gap
    assert {1, 2, 3} <= set(missed)
    assert max(missed) < reach


def test_broadcast_is_heard_by_everybody_once() -> None:
    strategy, federation = fedmud(sync="broadcast", num_clients_per_round=2), LinearFederation()
    rounds = transfers(strategy, 6, federation)
    for server_round, booked in enumerate(rounds, start=1):
        heard = [(kind, content) for r, _, kind, content in federation.seen if r == server_round]
        assert sorted(kind for kind, _ in heard) == ["query.merge"] * 3 + ["train"] * 2
        assert len([transfer for transfer in booked if transfer.link == DOWN]) == 5
        name = "base" if server_round == 1 else "merges"
        assert all(name in content for _, content in heard)
        assert strategy.ledger.total(UP).messages == 12


def test_between_resets_nobody_has_to_listen() -> None:
    federation = LinearFederation()
    run(fedmud(sync="broadcast", num_clients_per_round=2, reset_interval=3), federation, 6)
    listening = {r for r, _, kind, _ in federation.seen if kind == "query.merge"}
    assert listening == {1, 4}


def test_listening_nodes_are_no_participants() -> None:
    strategy = fedmud(sync="broadcast", num_clients_per_round=2)
    _, ends = run(strategy, LinearFederation(), 3)
    assert [(end.sent, end.accepted) for end in ends[1:]] == [(2, 2)] * 3


@pytest.mark.parametrize("reset_interval", [1, 3])
def test_traffic_of_the_ways_not_taken_is_what_they_cost_when_they_are(reset_interval: int) -> None:
    runs = {}
    for sync in SYNCS:
        strategy = fedmud(sync=sync, num_clients_per_round=2, reset_interval=reset_interval)
        run(strategy, LinearFederation(), 9)
        runs[sync] = strategy
    for sync, strategy in runs.items():
        assert strategy.traffic() == runs["catchup"].traffic()
        booked = strategy.ledger.total(DOWN)
        own = strategy.traffic()[sync]
        assert (own.messages, own.payload_bytes) == (booked.messages, booked.payload_bytes)
    plan, traffic = runs["dense"].plan, runs["dense"].traffic()
    rest = E_UNC + BUFFER / 4
    factors = 0 if reset_interval == 1 else 9 - 3  # rounds that did not follow a reset
    assert traffic["dense"].parameters == 2 * (9 * (D + rest) + factors * plan.count)


def test_a_lost_listener_is_sent_what_it_missed_later() -> None:
    def deaf(client: int, server_round: int, reply: Any) -> Any:
        if server_round == 3 and len(reply.array_records) == 0:
            raise RuntimeError("deaf")
        return reply

    strategy = fedmud(sync="broadcast", num_clients_per_round=2)
    federation = LinearFederation(sabotage=deaf)
    run(strategy, federation, 4)
    deafened = {client for r, client, kind, _ in federation.seen if (r, kind) == (3, "query.merge")}
    for r, client, _, content in federation.seen:
        if r == 4:
            steps = {key.split("/")[0] for key in content["merges"]}
            assert steps == ({"1", "2"} if client in deafened else {"2"})
