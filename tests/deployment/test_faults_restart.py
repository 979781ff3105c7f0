"""A SuperNode that is killed in the middle of a round and started again, one app after the other.

The round in which it dies goes on until the SuperLink has missed its heartbeats, up to a minute. With
authentication the node is refused until then and comes back under its old id; without, it joins at once under
a new one. What it kept between rounds is gone in both cases.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.deployment.leftovers import left_running
from tests.deployment.trials import APPS, Ended, Lapse, different, engine, trial

pytestmark = pytest.mark.slow

# Replies of a node that died: an error in its name once its heartbeats are missed, or none in time.
DIED = ({"error 5": 1}, {"no reply": 1}, {"error 3": 1})
OFFLINE = {"offline": 1}
# Later than the missed heartbeats: what ends the round of the death is those.
PATIENCE = "round-timeout=90"


@dataclass(frozen=True)
class Restart:
    """A run one of whose nodes was killed in round 2 and started again."""

    run: Ended
    ids: tuple[int | None, int | None]
    refusals: int
    log: str


def restarted(app: str, config: str, out: Path, *, nodes: int = 2, victim: int = 1, tls: bool) -> Restart:
    with trial(APPS / app, nodes, f"{PATIENCE} {config}", out, tls=tls) as one:
        node = one.deployment.nodes[victim]
        before = node.node_id
        one.wait_for_round(1)
        one.wait_until_at_work(node)
        node.kill()
        assert left_running(one.deployment.home / f"node{victim}") == []
        with ThreadPoolExecutor(1) as pool:
            restart = pool.submit(node.restart)
            one.wait_for_round(3 if tls else 2)
            with one.server_held():
                restart.result()
        starts = node.log_file.read_text()
        run = one.end()
        return Restart(run, (before, node.node_id), starts.count("[code: 2004]"), one.log)


# Without authentication: a new id, the same partition.


def check_new_id(found: Restart, victim: int) -> None:
    before, after = found.ids
    assert None not in found.ids
    assert before != after
    assert found.refusals == 0
    assert f"Partition {victim} is back as node {after}." in found.log


def test_a_client_of_sd_feel_that_restarts_costs_its_reply_and_nothing_else(tmp_path: Path) -> None:
    config = (
        "num-servers=2 topology=path tau1=1 tau2=1 iterations=4 batch-size=5 model=logistic evaluate-every=1"
    )
    found = restarted("sd_feel", config, tmp_path / "there", tls=False)
    check_new_id(found, 1)
    assert found.run.lost[1] in DIED
    assert found.run.lost == [{}, found.run.lost[1], {}, {}]
    here = engine("sd_feel", 2, config, tmp_path / "here", Lapse(1, {3}))
    assert different(found.run.model, here.model) == []


def test_a_hospital_of_hsgd_that_restarts_is_paired_again_and_costs_its_group_one_round(
    tmp_path: Path,
) -> None:
    config = (
        "num-groups=2 patients-per-group=10 participation=0.4 iterations=8 global-interval=2 "
        "local-interval=2 evaluate-every=1"
    )
    found = restarted("hsgd", config, tmp_path / "there", nodes=4, victim=0, tls=False)
    check_new_id(found, 0)
    assert found.run.lost[1] in DIED
    assert found.run.lost == [{}, found.run.lost[1], {}, {}]
    assert [record["train"]["lost-groups"] for record in found.run.rounds[1:]] == [0, 1, 0, 0]
    # Who it is, whom it treats, two messages of round 1; then the first of round 2.
    here = engine("hsgd", 4, config, tmp_path / "here", Lapse(0, {5}))
    assert different(found.run.model, here.model) == []


# With authentication: refused at first, then the same id.


def check_same_id(found: Restart) -> None:
    before, after = found.ids
    assert before is not None
    assert before == after
    assert found.refusals >= 1
    assert found.run.lost[1] in DIED


def back(found: Restart) -> int:
    """Return the round from which on the node is there again; on a slow machine that is the third already."""
    return next(number for number, lost in enumerate(found.run.lost[2:], 3) if lost != OFFLINE)


def story(found: Restart) -> list[dict[str, int]]:
    """Return what the rounds lost before and after the node was away."""
    return [found.run.lost[0], *found.run.lost[back(found) - 1 :]]


def replayed(app: str, config: str, found: Restart, out: Path) -> Ended:
    """Replay the record in this process: a node died in round 2 and came back without its state."""
    lapse = Lapse(1, {3}, forgets_before=back(found), away=range(3, back(found)))
    return engine(app, 2, config, out / "here", lapse)


def test_a_restarted_worker_says_that_its_error_memory_is_gone(tmp_path: Path) -> None:
    config = (
        "algorithm=ef-fedavg num-rounds=6 local-iters=2 batch-size=20 partition=iid model=logistic "
        "fixed-c=0.3 evaluate-every=1 min-replies=1"
    )
    found = restarted("similarity_free", config, tmp_path / "there", tls=True)
    check_same_id(found)
    assert story(found) == [{}] * len(story(found))
    told = [record["train"]["memory-lost"] for record in found.run.rounds[1:]]
    assert told == [float(number == back(found)) for number in range(1, len(told) + 1)]
    assert different(found.run.model, replayed("similarity_free", config, found, tmp_path).model) == []


def test_a_restarted_client_of_fedmud_asks_for_the_base_and_gets_it_in_the_same_round(tmp_path: Path) -> None:
    config = (
        "num-rounds=7 clients-per-round=2 batch-size=64 model=mlp skip-front=0 ratio=0.25 init-a=0.1 "
        "reset-interval=1 partition=iid sync=catchup evaluate-every=1"
    )
    found = restarted("fedmud", config, tmp_path / "there", tls=True)
    check_same_id(found)
    assert [found.run.lost[0], *found.run.lost[2:]] == [{}] * (len(found.run.lost) - 1)
    # Participants are drawn of those that are there: who is not is not missed.
    there = next(record["round"] for record in found.run.rounds[3:] if record["sent"] == 2)
    lapse = Lapse(1, {number + 1 for number in range(2, there)}, forgets_before=there)
    here = engine("fedmud", 2, config, tmp_path / "here", lapse)
    assert different(found.run.model, here.model) == []


def test_a_restarted_node_of_ceps_is_told_its_settings_again_and_joins_in(tmp_path: Path) -> None:
    config = (
        "topology=complete iterations=8 interval-low=1 interval-high=1 features=60 sparsity=3 "
        "measurements=90 samples-low=30 samples-high=60 monitor=false"
    )
    found = restarted("ceps", config, tmp_path / "out", tls=True)
    check_same_id(found)
    assert story(found) == [{}, {"error 2": 1}] + [{}] * (len(story(found)) - 2)
    trained = [record["train"] for record in found.run.rounds[1:]]
    assert [train["restarted"] for train in trained] == [
        int(n > back(found)) for n in range(1, len(trained) + 1)
    ]
    assert trained[-1]["receivers"] == trained[-1]["deliveries"] == 2
    # The other node had nobody to hear in the rounds that lost this one.
    assert trained[-1]["missed"] == 2 * (back(found) - 1)
