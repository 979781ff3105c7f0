"""Edge servers as nodes: the bits of emulated ones, the traffic of the relay, and what is lost in it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from tests.strategies.quadratic import Quadratics, initial, run, servers
from tests.strategies.sd_feel.edge_federation import EdgeFederation, Spoil

from hedgerow.clients import sd_feel_client
from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import RosterError, SDFeel, TooFewRepliesError
from hedgerow.strategies.sd_feel import preset
from hedgerow.wire import HUB_TO_NODE, NODE_TO_HUB, payload_bytes

C, D = 7, 4
CLUSTERS = (0, 0, 1, 2, 2, 2, 3)
SIZES = (30, 20, 10, 20, 15, 5, 8)
PROBLEM = Quadratics(SIZES, centres=range(1, C + 1), curvatures=[1, 0.5, 2, 1, 0.25, 4, 0.7])
PATH4 = [(0, 1), (1, 2), (2, 3)]
STATE = "edge-model"


def sd_feel(edge_servers: str = "nodes", **options: Any) -> SDFeel:
    defaults = {"tau1": 2, "tau2": 2, "alpha": 1, "topology": "ring", "fraction_evaluate": 0.0}
    return SDFeel(num_servers=D, clusters=CLUSTERS, edge_servers=edge_servers, **{**defaults, **options})


def federation(spoil: Spoil | None = None) -> EdgeFederation:
    return EdgeFederation(PROBLEM, D, spoil)


def relayed(strategy: SDFeel, num_rounds: int, *, spoil: Spoil | None = None, **options: Any) -> Any:
    timeout = options.pop("timeout", 60.0)
    grid = options.pop("grid", None) or federation(spoil).grid(**options)
    return run(strategy, PROBLEM, num_rounds, grid=grid, timeout=timeout)


def start(strategy: SDFeel, grid: InProcessGrid, arrays: ArrayRecord, num_rounds: int) -> dict[str, Any]:
    with flower_identity(1):
        result = strategy.start(grid, arrays, num_rounds=num_rounds)
    return {key: array.numpy() for key, array in result.arrays.items()}


def assert_same_models(one: SDFeel, other: SDFeel) -> None:
    for a, b in zip(one.server_models(), other.server_models(), strict=True):
        assert {key: array.numpy().tobytes() for key, array in a.items()} == {
            key: array.numpy().tobytes() for key, array in b.items()
        }


# The same numbers


@pytest.mark.parametrize("alpha", [0, 1, 2, 5])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_edge_servers_that_are_nodes_end_with_the_bits_of_emulated_ones(
    alpha: int, participation: float, dtype: str
) -> None:
    options = {"alpha": alpha, "participation": participation, "seed": 3}
    # More columns than are mixed at a time, each with a start of its own.
    start_ = np.random.default_rng(1).standard_normal(20_000).astype(dtype)
    arrays = ArrayRecord({"w": Array(start_)})
    emulated, nodes = sd_feel("emulated", **options), sd_feel("nodes", **options)
    u = start(emulated, PROBLEM.grid(), arrays, 6)
    assert u["w"].dtype == dtype
    assert start(nodes, federation().grid(), arrays, 6)["w"].tobytes() == u["w"].tobytes()
    assert_same_models(emulated, nodes)


@pytest.mark.parametrize("exact", [False, True])
def test_any_graph_gives_the_same_bits(exact: bool) -> None:
    for topology in ("star", "path", "complete"):
        options = {"topology": topology, "alpha": 3, "exact_if_complete": exact}
        emulated, nodes = sd_feel("emulated", **options), sd_feel("nodes", **options)
        assert np.array_equal(run(emulated, PROBLEM, 4)[0], relayed(nodes, 4)[0])
        assert_same_models(emulated, nodes)


def test_one_edge_server_gives_the_same_bits() -> None:
    def one(edge_servers: str) -> SDFeel:
        return SDFeel(
            num_servers=1, clusters=[0] * C, topology="complete", alpha=2, edge_servers=edge_servers,
            fraction_evaluate=0.0,
        )  # fmt: skip

    u, _ = run(one("emulated"), PROBLEM, 3)
    assert np.array_equal(run(one("nodes"), PROBLEM, 3, grid=EdgeFederation(PROBLEM, 1).grid())[0], u)


class WithStatistics(Quadratics):
    """Replies carry a running variance and a counter beside the model."""

    def client_app(self) -> Any:
        plain = super().client_app()

        def app(message: Any, context: Any) -> Any:
            reply = plain(message, context)
            if message.metadata.message_type == "train":
                client = int(context.node_config["partition-id"])
                sent, model = message.content["arrays"], reply.content["arrays"]
                seen = sent["n"].numpy() + 1 + client % 2
                variance = 0.9 * sent["bn.running_var"].numpy() + 0.01 * client
                arrays = {"bn.running_var": Array(variance), "n": Array(seen), "w": model["w"]}
                reply.content["arrays"] = ArrayRecord(arrays)
            return reply

        return app


def test_running_statistics_and_counters_keep_the_same_bits_too() -> None:
    problem = WithStatistics(SIZES, PROBLEM.centres, PROBLEM.curvatures)
    arrays = ArrayRecord(
        {"bn.running_var": Array(np.ones(2)), "n": Array(np.zeros(1, np.int64)), "w": Array(np.zeros(3))}
    )
    emulated, nodes = sd_feel("emulated", alpha=3), sd_feel("nodes", alpha=3)
    u = start(emulated, InProcessGrid(problem.client_app(), C), arrays, 4)
    again = start(nodes, EdgeFederation(problem, D).grid(), arrays, 4)
    assert all(np.array_equal(u[key], again[key]) for key in u)
    assert_same_models(emulated, nodes)


def test_lost_clients_are_lost_alike_on_both_levels() -> None:
    def fail(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        # Cluster 1, a single client, is lost as a whole in round 2.
        if (client + server_round) % 4 == 0:
            raise RuntimeError("out of battery")
        return reply

    flaky = Quadratics(SIZES, PROBLEM.centres, PROBLEM.curvatures, sabotage=fail)
    emulated, nodes = sd_feel("emulated", alpha=2), sd_feel("nodes", alpha=2)
    u, ends = run(emulated, flaky, 6)
    again, more = run(nodes, flaky, 6, grid=EdgeFederation(flaky, D).grid())
    assert all(end.rejected for end in ends[1:])
    assert [end.rejected for end in more] == [end.rejected for end in ends]
    assert np.array_equal(again, u)
    assert_same_models(emulated, nodes)


def test_flowers_own_start_drives_the_relay_to_the_same_models() -> None:
    strategy = sd_feel(alpha=2)
    with flower_identity(1):
        result = Strategy.start(strategy, federation().grid(), initial(), num_rounds=4)
    assert np.array_equal(result.arrays["w"].numpy(), run(sd_feel("emulated", alpha=2), PROBLEM, 4)[0])


def test_federated_evaluation_asks_the_same_clients_and_no_edge_server() -> None:
    options = {"fraction_evaluate": 0.5, "seed": 2}
    _, ends = run(sd_feel("emulated", **options), PROBLEM, 2)
    grid = federation().recording()
    _, more = relayed(sd_feel(**options), 2, grid=grid)
    assert [end.evaluate for end in more] == [end.evaluate for end in ends]
    assert {partition for kind, partition, _ in grid.sent if kind == "evaluate"} <= set(range(C))


# Ledgers and clock


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_logical_ledger_and_the_clock_are_those_of_the_emulation(participation: float) -> None:
    def results(edge_servers: str, run_it: Callable[..., Any]) -> Any:
        strategy = sd_feel(edge_servers, alpha=3, participation=participation, system=preset("paper-text"))
        _, ends = run_it(strategy)
        modelled = {
            link: traffic
            for link, traffic in strategy.ledger.by_link().items()
            if link not in (HUB_TO_NODE, NODE_TO_HUB)
        }
        return modelled, [(end.bits, end.payload_bytes, end.sim_seconds, end.iterations) for end in ends]

    emulated = results("emulated", lambda strategy: run(strategy, PROBLEM, 8))
    assert results("nodes", lambda strategy: relayed(strategy, 8)) == emulated
    assert emulated[0]["edge->edge"].messages == 4 * 3 * 2 * 4


def test_the_physical_ledger_has_the_closed_forms_of_a_relay() -> None:
    # A round: C models out and back, C bundled out to D edge servers, D back. A gossip step on E edges:
    # 2 E models out to D edge servers, D back.
    rounds, tau2, alpha, E = 6, 2, 3, 4
    strategy = sd_feel(alpha=alpha, tau2=tau2)
    relayed(strategy, rounds)
    steps = rounds // tau2 * alpha
    out, back = strategy.ledger.total(HUB_TO_NODE), strategy.ledger.total(NODE_TO_HUB)
    assert out.messages == rounds * (C + D) + steps * D
    assert back.messages == rounds * (C + D) + steps * D
    assert out.nominal_bits == 32 * (rounds * 2 * C + steps * 2 * E)
    assert back.nominal_bits == 32 * (rounds * (C + D) + steps * D)


def test_the_relay_books_what_it_sends() -> None:
    grid, strategy = federation().recording(), sd_feel(alpha=2)
    relayed(strategy, 2, grid=grid)
    sent = Counter(kind for kind, partition, _ in grid.sent if kind.startswith("train"))
    assert sent == {"train": 2 * C, "train.intra": 2 * D, "train.gossip": 2 * D}
    models = [len(content["models"]) for kind, _, content in grid.sent if kind == "train.gossip"]
    assert models == [2] * (2 * D)  # each has two neighbours on the ring, and its own model at hand
    assert all("own" not in content for _, _, content in grid.sent)
    trained = [content for kind, _, content in grid.sent if kind.startswith("train")]
    replies = [content for kind, _, content in grid.replies if kind.startswith("train")]
    for contents, link in ((trained, HUB_TO_NODE), (replies, NODE_TO_HUB)):
        assert strategy.ledger.total(link).payload_bytes == sum(map(payload_bytes, contents))


def test_an_edge_server_is_sent_its_clients_and_its_neighbours_models_and_no_others() -> None:
    grid = federation().recording()
    relayed(sd_feel(tau2=1, topology=PATH4), 1, grid=grid)
    replies = {
        partition: content["arrays"]["w"].numpy()
        for kind, partition, content in grid.replies
        if kind == "train"
    }
    means = {
        partition - C: content["arrays"]["model"].numpy()
        for kind, partition, content in grid.replies
        if kind == "train.intra"
    }
    for kind, partition, content in grid.sent:
        d = partition - C
        if kind == "train.intra":
            members = [i for i in range(C) if CLUSTERS[i] == d]
            got = [array.numpy() for array in content["models"].values()]
            assert [float(w[0]) for w in got] == [float(replies[i][0]) for i in members]
            assert list(content["weights"].values()) == [SIZES[i] for i in members]
        if kind == "train.gossip":
            got = {int(j): array.numpy() for j, array in content["models"].items()}
            assert got == {j: means[j] for j in (d - 1, d + 1) if 0 <= j < D}


def test_a_round_with_gossip_is_two_exchanges_and_one_a_step() -> None:
    exchanges: list[str] = []

    class Counting(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            exchanges.extend({message.metadata.message_type for message in messages})
            return super().push_messages(messages)

    relayed(sd_feel(tau2=2, alpha=3), 2, grid=federation().grid(Counting))
    trained = [kind for kind in exchanges if kind.startswith("train")]
    assert trained == ["train", "train.intra", "train", "train.intra", *["train.gossip"] * 3]


# Losses


def lose(server: int, kind: str, times: int = 10**9) -> Spoil:
    """Let one edge server raise at messages of a kind."""
    left = [times]

    def spoil(d: int, message_type: str, state: RecordDict, reply: RecordDict) -> RecordDict:
        if (d, message_type) == (server, kind) and left[0]:
            left[0] -= 1
            raise RuntimeError("power cut")
        return reply

    return spoil


def test_an_edge_server_lost_with_its_clients_models_keeps_its_model_and_the_weighted_mean_stays() -> None:
    strategy = sd_feel(tau2=1, alpha=3)
    relayed(strategy, 1)
    before = servers(strategy)
    hurt = sd_feel(tau2=1, alpha=3)
    hurt.load_state_dict(strategy.state_dict())
    grid = federation(lose(2, "train.intra", 1)).recording()
    _, ends = relayed(hurt, 2, grid=grid)
    assert ends[-1].rejected == {"edge error 2": 1}
    after = servers(hurt)
    assert after[2] == before[2]
    means = {
        p - C: float(content["arrays"]["model"].numpy()[0])
        for kind, p, content in grid.replies
        if kind == "train.intra"
    }
    intra = np.array([means.get(d, before[2]) for d in range(D)])
    assert strategy.server_weights @ after == pytest.approx(strategy.server_weights @ intra, rel=1e-12)
    # The ring of four without one server is a path of three: two edges, both ways, three steps.
    assert hurt.ledger.total("edge->edge").messages == 3 * 8 + 3 * 4


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_gossip_step_in_which_an_edge_server_is_lost_is_taken_again_without_it(step: int) -> None:
    calls = Counter[int]()

    def spoil(d: int, kind: str, state: RecordDict, reply: RecordDict) -> RecordDict:
        if kind == "train.gossip":
            calls[d] += 1
            if d == 1 and calls[d] == step:
                raise RuntimeError("power cut")
        return reply

    strategy = sd_feel(tau2=1, alpha=3)
    plain = sd_feel("emulated", tau2=1, alpha=0)
    run(plain, PROBLEM, 1)
    _, ends = relayed(strategy, 1, spoil=spoil)
    assert ends[-1].rejected == {"edge error 2": 1}
    assert ends[-1].sent == C + D + 3 * D + (3 - step + 1) * (D - 1) - (3 - step) * D
    mixing = strategy.mixing
    expected = mixing.gossip(servers(plain)[:, None], step - 1)
    for j in (0, 2):
        mixing = mixing.without_edge(1, j)
    expected = mixing.gossip(expected, 3 - step + 1)
    np.testing.assert_allclose(servers(strategy), expected[:, 0], rtol=1e-12)
    assert strategy.server_weights @ servers(strategy) == pytest.approx(
        float(strategy.server_weights @ servers(plain)), rel=1e-12
    )


@pytest.mark.parametrize("kind", ["train.intra", "train.gossip"])
def test_after_a_loss_a_run_goes_on_as_one_whose_models_were_emulated_from_there(kind: str) -> None:
    hurt = sd_feel(tau2=1, alpha=2)
    relayed(hurt, 1, spoil=lose(1, kind, 1))
    emulated, nodes = sd_feel("emulated", tau2=1, alpha=2), sd_feel(tau2=1, alpha=2)
    emulated.load_state_dict(hurt.state_dict())
    nodes.load_state_dict(hurt.state_dict())
    u, _ = run(emulated, PROBLEM, 4)
    again, ends = relayed(nodes, 4)
    assert np.array_equal(again, u)
    assert all(not end.rejected for end in ends)


# Arrays that do not fit are tests/wire/test_records.py's.
GARBAGE: dict[str, tuple[str, Callable[[RecordDict], RecordDict]]] = {
    "nan": ("non-finite", lambda r: _reply(np.array([np.nan]))),
    "shape": ("wrong shape", lambda r: _reply(np.zeros(2))),
    "nothing": ("bad arrays", lambda r: RecordDict()),
}


def _reply(values: Any) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord({"model": Array(values)})})


@pytest.mark.parametrize("kind", ["train.intra", "train.gossip"])
@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_of_an_edge_server_is_dropped_counted_and_corrupts_nothing(what: str, kind: str) -> None:
    reason, spoilt = GARBAGE[what]
    calls = Counter[str]()

    def spoil(d: int, message_type: str, state: RecordDict, reply: RecordDict) -> RecordDict:
        calls[message_type] += d == 1
        return spoilt(reply) if d == 1 and message_type == kind and calls[kind] == 1 else reply

    strategy, lost = sd_feel(tau2=1, alpha=2), sd_feel(tau2=1, alpha=2)
    u, ends = relayed(strategy, 3, spoil=spoil)
    assert ends[1].rejected == {f"edge {reason}": 1}
    assert [end.rejected for end in ends[2:]] == [{}, {}]
    # As if the reply had not come.
    assert np.array_equal(relayed(lost, 3, spoil=lose(1, kind, 1))[0], u)
    assert_same_models(strategy, lost)


def test_an_edge_server_that_dies_leaves_the_run_going() -> None:
    # An introduction, a round with gossip of one step, and then no more.
    dies = {C + 2: FaultModel(crash_at={C + 2: 4})}
    strategy = sd_feel(tau2=1)
    u, ends = relayed(strategy, 4, faults=dies)
    assert not ends[1].rejected
    assert [sum(end.rejected.values()) for end in ends[2:]] == [1, 1, 1]
    assert {reason for end in ends[2:] for reason in end.rejected} <= {"edge error 5", "edge offline"}
    assert np.isfinite(u).all()


def test_a_round_in_which_no_edge_server_answers_is_repeated_and_then_ends_the_run() -> None:
    def spoil(d: int, kind: str, state: RecordDict, reply: RecordDict) -> RecordDict:
        raise RuntimeError("power cut")

    strategy = sd_feel(max_repeats=1)
    words = r"Round 1: 7 valid replies of 11 after 2 tries \(4 x edge error 2\)"
    with pytest.raises(TooFewRepliesError, match=words):
        relayed(strategy, 2, spoil=spoil)
    assert strategy.completed_rounds == 0


def test_a_round_in_which_no_edge_server_answers_once_succeeds_when_repeated() -> None:
    failures = set(range(D))

    def spoil(d: int, kind: str, state: RecordDict, reply: RecordDict) -> RecordDict:
        if d in failures:
            failures.remove(d)
            raise RuntimeError("power cut")
        return reply

    u, _ = relayed(sd_feel(alpha=2), 4, spoil=spoil)
    assert np.array_equal(u, run(sd_feel("emulated", alpha=2), PROBLEM, 4)[0])


def forget(state: RecordDict) -> None:
    state.clear()


def of_another_round(state: RecordDict) -> None:
    state["edge"] = ConfigRecord({**state["edge"], "token": state["edge"]["token"] - 1})


def of_another_run(state: RecordDict) -> None:
    state["edge"] = ConfigRecord({**state["edge"], "run": "another"})


@pytest.mark.parametrize("damage", [forget, of_another_round, of_another_run])
@pytest.mark.parametrize("kind", ["train.intra", "train.gossip"])
def test_an_edge_server_that_has_not_its_model_is_sent_it_again_and_no_bit_moves(
    damage: Callable[[RecordDict], None], kind: str
) -> None:
    done: list[str] = []

    def spoil(d: int, message_type: str, state: RecordDict, reply: RecordDict) -> RecordDict:
        # After its first step of a kind, with another one to come.
        if (d, message_type) == (1, kind) and not done:
            state[STATE] = ArrayRecord({"model": Array(np.full(1, 1e9))})
            damage(state)
            done.append(message_type)
        return reply

    strategy = sd_feel(tau2=1, alpha=2)
    grid = federation(spoil).recording()
    u, ends = relayed(strategy, 3, grid=grid)
    assert done
    assert ends[1].rejected == {"edge no state": 1}
    assert all(not end.rejected for end in ends[2:])
    emulated = sd_feel("emulated", tau2=1, alpha=2)
    assert np.array_equal(u, run(emulated, PROBLEM, 3)[0])
    assert_same_models(strategy, emulated)
    assert sum("own" in content for kind, _, content in grid.sent if kind == "train.gossip") == 1


def test_an_edge_server_whose_clients_were_all_lost_gossips_with_its_model_of_before() -> None:
    def participants(self: Any, server_round: int) -> list[int]:
        return [i for i in range(C) if CLUSTERS[i] != 1 or server_round > 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SDFeel, "participants", participants)
        u, _ = run(sd_feel("emulated", tau2=1, alpha=2), PROBLEM, 3)
        grid = federation().recording()
        again, ends = relayed(sd_feel(tau2=1, alpha=2), 3, grid=grid)
    assert np.array_equal(again, u)
    assert all(not end.rejected for end in ends)
    intra = [partition - C for kind, partition, _ in grid.sent if kind == "train.intra"]
    assert intra == [0, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    # It is sent w_0, which it never had, once.
    own = [partition - C for _, partition, content in grid.sent if "own" in content]
    assert own == [1]


# Resume


def test_starting_again_starts_afresh() -> None:
    strategy, grid = sd_feel(alpha=2), federation().grid()
    first, _ = relayed(strategy, 4, grid=grid)
    again, ends = relayed(strategy, 4, grid=grid)
    assert np.array_equal(first, again)
    assert all(not end.rejected for end in ends)


# Who is who


def test_the_run_waits_for_the_edge_servers_too() -> None:
    grid = InProcessGrid(PROBLEM.client_app(), C)
    with pytest.raises(RosterError, match=f"{C} nodes after 0.1 s, but {C + D} are needed"):
        relayed(sd_feel(max_wait=0.1), 2, grid=grid)


def test_a_node_whose_role_is_not_that_of_its_partition_is_named() -> None:
    roles = [{"role": "client"}] * (C - 1) + [{"role": "edge"}] * (D + 1)
    clients, edges = PROBLEM.client_app(), sd_feel_client()

    def app(message: Message, context: Context) -> Message:
        return (edges if context.node_config["role"] == "edge" else clients)(message, context)

    words = rf"no node introduced itself as \[{C - 1}\] .*; left out: 1 x role is not client"
    with pytest.raises(RosterError, match=words):
        relayed(sd_feel(), 2, grid=InProcessGrid(app, C + D, node_configs=roles))


def test_roles_of_node_configs_need_no_run_config() -> None:
    roles = [{"role": "client"}] * C + [{"role": "edge"}] * D
    u, _ = relayed(sd_feel(), 2, grid=InProcessGrid(federation().app, C + D, node_configs=roles))
    assert np.array_equal(u, run(sd_feel("emulated"), PROBLEM, 2)[0])


def test_the_summary_says_where_edge_servers_are(caplog: pytest.LogCaptureFixture) -> None:
    sd_feel().summary()
    assert "Edge servers: nodes" in caplog.text
