"""Run folders of several orchestrators, read as the one run that they are of."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hedgerow.sim import load
from hedgerow.sim.runs.checkpoint import keep_model
from hedgerow.sim.runs.joined import OrchestratorFolder
from hedgerow.sim.runs.trained import evaluate_together
from hedgerow.tasks import build_model

APPS = Path(__file__).parents[3] / "flower_apps"


def record(number: int, loss: float, **changes: Any) -> dict[str, Any]:
    link = {"messages": number, "nominal_bits": 8 * number, "payload_bytes": 2 * number}
    return {
        "round": number, "train": {}, "evaluate": {}, "central": {"loss": loss, "accuracy": 1 - loss},
        "iterations": 5 * number, "total_iterations": None, "bits": 8 * number, "payload_bytes": 2 * number,
        "by_link": {"edge->edge": link}, "sim_seconds": 0.5 * number, "wall_seconds": 1.0, "sent": 2,
        "accepted": 2, "rejected": {}, **changes,
    }  # fmt: skip


def folder(place: Path, who: int, rounds: list[dict[str, Any]], **settings: Any) -> Path:
    """Write what edge server ``who`` wrote."""
    place.mkdir(parents=True)
    mine = {"edge-servers": "direct", "edge": who}
    said = {"seed": 1, "tau1": 5, "peers": "a:1,b:2", "output-dir": str(place), **mine, **settings}
    (place / "config.json").write_text(json.dumps({"app": "sd_feel", "run": said}))
    (place / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rounds))
    (place / "summary.json").write_text("{}")
    return place


def test_servers_are_one_run_with_what_they_measured(tmp_path: Path) -> None:
    slow = {"train": {"gossip-seconds": 3.0, "lost-links-no-answer": 1, "servers": [0, 1]}}
    quick = {"train": {"gossip-seconds": 1.0, "lost-links-no-answer": 2}}
    folder(tmp_path / "edge0" / "run", 0, [record(0, 0.9), record(2, 0.5, **slow)])
    folder(tmp_path / "edge1" / "run", 1, [record(0, 0.9), record(2, 0.3, **quick)])
    (run,) = load([tmp_path]).runs
    assert [point.y for point in run.series("rounds", "gossip-seconds")] == [3.0]
    assert [point.y for point in run.series("rounds", "lost-links-no-answer")] == [3.0]
    assert (run.seed, run.finished) == (1, True)
    # The same, named one by one.
    named = load([tmp_path / "edge1" / "run", tmp_path / "edge0" / "run"])
    assert [one.rounds for one in named.runs] == [run.rounds]


def test_what_was_measured_of_all_together_stands_in_the_place_of_their_own(tmp_path: Path) -> None:
    first = folder(tmp_path / "edge0", 0, [record(0, 0.9), record(1, 0.8), record(2, 0.5)])
    folder(tmp_path / "edge1", 1, [record(0, 0.9), record(1, 0.7), record(2, 0.3)])
    u = {"round": 2, "central": {"loss": 0.35}, "train": {"consensus-error": 0.1, "servers": [0, 1]}}
    (first / "together.jsonl").write_text(json.dumps(u) + "\n")
    (run,) = load([tmp_path]).runs
    assert [(point.x, point.y) for point in run.series("bits", "loss")] == [(32.0, 0.35)]
    assert [point.y for point in run.series("rounds", "consensus-error")] == [0.1]
    assert run.costs("bits") == [0.0, 16.0, 32.0]


def test_without_an_evaluation_u_is_nobodys_and_costs_are_those_of_all(tmp_path: Path) -> None:
    folder(tmp_path / "edge0", 0, [record(0, 0.9), record(1, 0.8), record(2, 0.5)])
    # One that was away in round 1.
    folder(tmp_path / "edge1", 1, [record(0, 0.9), record(2, 0.3, sim_seconds=4.0)])
    found = load([tmp_path])
    (run,) = found.runs
    assert found.ys == ("servers-loss",)
    assert "'hedgerow evaluate' does it" in found.warnings[0]
    assert [point.y for point in run.series("rounds", "servers-loss")] == pytest.approx([0.9, 0.8, 0.4])
    assert run.costs("bits") == [0.0, 8.0, 32.0]
    assert run.costs("sim-seconds") == [0.0, 0.5, 4.0]
    assert run.rounds[-1]["by_link"]["edge->edge"]["messages"] == 4
    with pytest.raises(ValueError, match=r"\(servers-accuracy, servers-loss\), got 'loss'"):
        run.series("rounds", "loss")


def test_seeds_and_settings_part_runs_and_a_server_alone_is_a_run_of_its_own(tmp_path: Path) -> None:
    for tau1 in (5, 10):
        for seed in (1, 2):
            for edge in (0, 1):
                place = tmp_path / f"edge{edge}" / f"{tau1}-{seed}"
                folder(place, edge, [record(1, 0.5)], tau1=tau1, seed=seed)
    variants = load([tmp_path]).variants()
    assert {label: sorted(seeds) for label, seeds in variants.items()} == {
        "tau1=5": [1, 2],
        "tau1=10": [1, 2],
    }
    (alone,) = load([tmp_path / "edge0" / "5-1"]).runs
    assert [point.y for point in alone.series("rounds", "loss")] == [0.5]


def event(iteration: int, receivers: int, disagreement: float, **changes: Any) -> dict[str, Any]:
    train = {"iteration": iteration - 1, "receivers": receivers, "deliveries": 2 * receivers, **changes}
    if receivers:
        train["disagreement"] = disagreement
    link = {"messages": iteration, "nominal_bits": 8 * iteration, "payload_bytes": 2 * iteration}
    return {
        **record(0, 0.0), "train": train, "central": {}, "iterations": iteration, "bits": 8 * iteration,
        "by_link": {"node->node": link}, "accepted": receivers,
    }  # fmt: skip


def site(place: Path, number: int, events: list[dict[str, Any]], **settings: Any) -> Path:
    place.mkdir(parents=True)
    said = {"seed": 1, "method": "ceps", "peers": "a:1,b:2", "site": number, "monitor": False, **settings}
    (place / "config.json").write_text(json.dumps({"app": "ceps", "run": said}))
    told = [{**one, "round": number} for number, one in enumerate(events)]
    (place / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    (place / "summary.json").write_text("{}")
    return place


def test_events_of_sites_are_put_in_order_by_iteration_and_summed(tmp_path: Path) -> None:
    site(
        tmp_path / "site0", 0, [event(0, 0, 0.0), event(3, 1, 0.5), event(7, 3, 0.25, **{"lost-payloads": 2})]
    )
    site(
        tmp_path / "site1",
        1,
        [event(0, 0, 0.0), event(4, 2, 0.4), event(7, 1, 0.05, **{"site-seconds": 2.0}), event(9, 0, 0.0)],
    )
    found = load([tmp_path])
    (run,) = found.runs
    assert [one["round"] for one in run.rounds] == [0, 1, 2, 3, 4]
    assert run.costs("iterations") == [0.0, 3.0, 4.0, 7.0, 9.0]
    # What a site has spent until its own last event, summed.
    assert run.costs("bits") == [0.0, 24.0, 56.0, 112.0, 128.0]
    assert [one["by_link"]["node->node"]["messages"] for one in run.rounds] == [0, 3, 7, 14, 16]
    assert [point.y for point in run.series("rounds", "deliveries")] == [0.0, 2.0, 4.0, 8.0, 0.0]
    assert [point.y for point in run.series("rounds", "lost-payloads")] == [2.0]
    # By how many of each site's nodes took part; of an event without any there is none.
    means = [(point.x, point.y) for point in run.series("iterations", "sites-disagreement")]
    assert means == [(3.0, 0.5), (4.0, 0.4), (7.0, pytest.approx((3 * 0.25 + 0.05) / 4))]
    assert found.ys == ("sites-disagreement",)
    assert "no site saw all models" in found.warnings[0]
    alone = tmp_path / "alone"
    site(alone, 0, [event(0, 0, 0.0), event(3, 1, 0.5)], peers="")
    assert len(load([alone]).runs) == 1
    site(tmp_path / "again", 0, [event(3, 1, 0.5)])
    with pytest.raises(ValueError, match="both of site 0"):
        load([tmp_path])


def test_u_of_two_servers_is_the_mean_of_the_models_that_they_kept(tmp_path: Path) -> None:
    app, peers = str(APPS / "sd-feel"), "127.0.0.1:1,127.0.0.1:2"
    settings = {"num-clients": 4, "num-servers": 2, "tau1": 1, "tau2": 1, "model": "logistic", "peers": peers}
    parts = []
    for d, weight in enumerate((1.0, 3.0)):
        sized = {"train": {"cluster-size": 10.0 * (1 + d)}}
        place = folder(
            tmp_path / str(d), d, [record(0, 0.9), record(1, 0.8, **sized)], iterations=1, **settings
        )
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "app": app}))
        model = build_model("logistic", (1, 28, 28), 10, seed=0)
        for number in (0, 1):
            values = {
                key: value.numpy() if number == 0 else np.full(value.shape, weight, np.float32)
                for key, value in model.state_dict().items()
            }
            keep_model(place, number, values)
        parts.append(OrchestratorFolder.read(place))
    first, last = evaluate_together([part for part in parts if part])
    assert "consensus-error" not in first["train"]
    # u is (1 * 10 + 3 * 20) / 30 in every entry; the servers are at -4/3 and 2/3 from it.
    assert last["train"]["consensus-error"] == pytest.approx(7850 * (16 / 9 / 3 + 4 / 9 * 2 / 3))
    assert first["central"].keys() == last["central"].keys() >= {"loss", "accuracy"}
    assert first["central"]["loss"] != last["central"]["loss"]
