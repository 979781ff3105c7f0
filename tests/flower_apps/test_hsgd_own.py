"""The app of HSGD where each party has its own file: the same model, nothing plain on the wire, who fails."""

import csv
import json
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from tests.flower_apps.cases import HSGD as CASE
from tests.flower_apps.hsgd_own import SECRET, Played, files, people, play, prepared, rewrite
from typer.testing import CliRunner

from hedgerow.clients.hsgd.match_key import MatchKey
from hedgerow.sim import flower_identity, load_newest, plan_run, read_rounds, run_app
from hedgerow.sim.cli import app as command_line
from hedgerow.strategies import PairingError
from hedgerow.tasks import (
    VerticalDataset,
    evaluate_split,
    group_split,
    load_vertical,
    split_model,
    write_groups,
)

LAYOUTS = pytest.mark.parametrize("layout", ["edges", "devices"])
K = 12  # people of a group, where a simulation is compared with


def by_hash(_: Path | None) -> VerticalDataset:
    """Return the biopsies so that the groups of the ``iid`` deal have their people in the order of hashes."""
    data = load_vertical("breast-cancer")
    order = np.arange(len(data.y_train))
    for m, rows in enumerate(group_split("iid", data.y_train, 2, 0)):
        key = MatchKey(SECRET, m)
        first = rows[:K]
        order[first] = sorted(first, key=lambda row: key.person(data.ids_train[row]))
    return VerticalDataset(
        "by-hash",
        data.hospital_train[order], data.device_train[order], data.y_train[order], data.ids_train[order],
        data.hospital_test, data.device_test, data.y_test, data.ids_test,
        data.classes, data.hospital_features, data.device_features,
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "method"), [("edges", "hsgd"), ("devices", "jfl")])
def test_the_model_is_that_of_the_simulation_to_the_last_bit(
    layout: str, method: str, tmp_path: Path
) -> None:
    common = {
        "method": method, "num-groups": 2, "participation": 0.5, "training-mode": "loop", "iterations": 8,
        "global-interval": 4, "local-interval": 2, "num-clients": 4 if layout == "edges" else 2 + 2 * K,
    }  # fmt: skip
    CASE.run(
        tmp_path,
        strict=True,
        dataset=f"{__name__}:by_hash",
        layout=layout,
        **{"patients-per-group": K},
        **common,
    )
    (folder,) = tmp_path.iterdir()
    with np.load(folder / "model.npz") as file:
        simulated = {key: file[key] for key in file}

    rows = [group[:K] for group in group_split("iid", by_hash(None).y_train, 2, 0)]
    configs: list[dict[str, Any]] = [*write_groups(by_hash(None), rows, tmp_path / "own", layout)]
    for m in range(2):
        (tmp_path / "own" / f"group-{m}" / "match.key").write_bytes(SECRET)
    own = play(configs, **common, holdout=0.0, standardise="none")

    assert own.arrays.keys() == simulated.keys()
    for key, value in own.arrays.items():
        assert np.array_equal(value, simulated[key]), key


def plain_hash(self: MatchKey, name: str) -> str:
    return sha256(name.encode()).hexdigest()[:32]


def found(traffic: bytes, candidates: list[str], guess: Callable[[str], str]) -> set[str]:
    """Return the candidates whom a server finds in what it saw, guessing how ids travel."""
    return {name for name in candidates if name.encode() in traffic or guess(name).encode() in traffic}


@LAYOUTS
def test_the_server_finds_nobody_in_its_traffic_without_the_key(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = files(tmp_path / "keyed", 8, 1, layout)
    data, (rows,) = people(8, 1)
    here = set(data.ids_train[rows].tolist())
    candidates = data.ids_train.tolist()

    def unkeyed(name: str) -> str:
        return sha256(name.encode()).hexdigest()[:32]

    traffic = play(configs, 1, holdout=0.3).grid.traffic
    assert found(traffic, candidates, unkeyed) == set()
    assert found(traffic, candidates, MatchKey(b"another key of 32 bytes, so long", 0).person) == set()
    assert found(traffic, candidates, MatchKey(SECRET, 0).person) == here  # whoever has the key finds all

    monkeypatch.setattr(MatchKey, "person", plain_hash)
    traffic = play(files(tmp_path / "plain", 8, 1, layout), 1, holdout=0.3).grid.traffic
    assert found(traffic, candidates, unkeyed) == here  # hashes without a key hide nobody


def test_no_byte_of_a_feature_is_in_the_traffic_and_sealed_labels_are_alike(tmp_path: Path) -> None:
    configs = files(tmp_path, 8, 1, "devices")
    data, (rows,) = people(8, 1)
    played = play([{**config, "min-people": 2} for config in configs], 2, holdout=0.3)
    traffic = played.grid.traffic
    for x in (data.hospital_train[rows], data.device_train[rows]):
        for value in x.ravel():
            assert float(value).hex() not in traffic.decode("latin1")
            assert np.float64(value).tobytes() not in traffic
        for pair in x.reshape(len(x), -1)[:, :2]:
            assert pair.tobytes() not in traffic
    setups = [content["config"] for kind, _, content in played.grid.sent if kind == "query.setup"]
    sealed = [label for config in setups for label in config["labels"]]
    assert len(sealed) == 8
    assert len({len(label) for label in sealed}) == 1
    assert len(set(sealed)) == 8


@LAYOUTS
def test_a_small_spread_beside_a_large_mean_is_standardised(layout: str, tmp_path: Path) -> None:
    """A Unix time in milliseconds, at the hospitals and at the devices."""
    configs = files(tmp_path, 12, 1, layout)
    stream = np.random.default_rng(0)
    times: dict[str, list[float]] = {"hospital": [], "device": []}
    for config in configs:
        side = times["hospital" if config["role"] == "hospital" else "device"]

        def stamped(header: list[str], rows: list[list[str]], side: list[float] = side) -> Any:
            added = np.round(stream.normal(1.7e12, 7e5, len(rows))).tolist()
            side.extend(added)
            return [*header, "time"], [[*row, f"{value:.0f}"] for row, value in zip(rows, added, strict=True)]

        rewrite(config["data"], stamped)
    agreed = play(configs, 1, holdout=0.0).strategy.members.agreed
    assert agreed is not None
    for values, (mean, deviation) in ((times["hospital"], agreed.hospital), (times["device"], agreed.device)):
        assert len(values) == 12
        assert mean[-1] == pytest.approx(np.mean(values), rel=1e-12)
        assert deviation[-1] == pytest.approx(np.std(values), rel=1e-7)


def test_a_party_that_refuses_its_sums_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    configs = files(tmp_path, 8, 2)
    with pytest.raises(PairingError, match=r"1 refused \(partition-3: .*ids must have at least 99 people"):
        play([*configs[:3], {**configs[3], "min-people": 99}], 1)


def test_constants_of_the_run_or_of_the_nodes_standardise_alike(tmp_path: Path) -> None:
    configs = files(tmp_path, 8, 1)
    data = load_vertical("breast-cancer")
    names = [*data.hospital_features, *data.device_features]
    (tmp_path / "constants.csv").write_text(
        "feature,mean,std\n" + "".join(f"{name},0.5,2.0\n" for name in names)
    )
    of_run = play(configs, 1, standardise="0.5,2.0").arrays
    of_nodes = play(
        [{**config, "constants": str(tmp_path / "constants.csv")} for config in configs],
        1,
        standardise="none",
    ).arrays
    plain = play(configs, 1, standardise="none").arrays
    assert all(np.array_equal(of_run[key], of_nodes[key]) for key in plain)
    assert not all(np.array_equal(of_run[key], plain[key]) for key in plain)


def test_balanced_classes_weigh_as_their_counts_say(tmp_path: Path) -> None:
    configs = files(tmp_path, 12, 1)
    data, (rows,) = people(12, 1)
    counts = np.bincount(data.y_train[rows], minlength=2)
    weights = ",".join(repr(float(weight)) for weight in 12 / (2 * counts))
    options: dict[str, Any] = {"holdout": 0.0}
    balanced = play(configs, 1, **{"class-weights": "balanced"}, **options).arrays
    stated = play(configs, 1, **{"class-weights": weights}, **options).arrays
    plain = play(configs, 1, **options).arrays
    assert all(np.array_equal(balanced[key], stated[key]) for key in plain)
    assert not all(np.array_equal(balanced[key], plain[key]) for key in plain)


def test_the_record_has_the_metrics_of_people_held_out(tmp_path: Path) -> None:
    """Against the two halves joined, which no party of the run can do."""
    played = play(files(tmp_path, 60, 2), 2, holdout=0.4, standardise="none")
    data, groups = people(60, 2)
    held = played.strategy.members.matching.held_out  # type: ignore[union-attr]
    named = {
        MatchKey(SECRET, m).person(data.ids_train[row]): row for m, rows in enumerate(groups) for row in rows
    }
    rows = [named[person] for group in held.values() for person in group.ids]
    model = split_model("auto", (15,), (15,), 2, 0)
    model.load_state_dict({key: torch.tensor(value) for key, value in played.arrays.items()})
    x1, x2, y = (torch.tensor(part[rows]) for part in (data.hospital_train, data.device_train, data.y_train))
    central = evaluate_split(model, x1, x2, y)
    told = played.ends[-1].central
    assert told["evaluated"] == len(rows) > 20
    assert told["loss"] == pytest.approx(central.loss, abs=1e-6)
    assert told["accuracy"] == central.accuracy
    assert told["auc"] == pytest.approx(central.auc, abs=0.01)
    assert 0 <= told["ece"] <= 1
    assert played.ends[0].central["evaluated"] == len(rows)


def test_those_who_are_not_matched_are_counted_and_left_out(tmp_path: Path) -> None:
    configs = files(tmp_path, 12, 1)
    rewrite(configs[0]["data"], lambda header, rows: (header, rows[:-3]))
    rewrite(configs[1]["data"], lambda header, rows: (header, rows[1:]))
    train = play(configs, 1, holdout=0.0).ends[-1].train
    assert (train["matched"], train["unmatched-hospital"], train["unmatched-device"]) == (8, 1, 3)


def test_a_party_with_another_key_costs_its_group_alone(tmp_path: Path) -> None:
    configs = files(tmp_path, 12, 2)
    other = tmp_path / "other.key"
    other.write_bytes(b"another key of 32 bytes, so long")
    configs[3]["match-key-file"] = str(other)
    played = play(configs, 1)
    assert [group.number for group in played.strategy.groups] == [0]
    assert played.ends[-1].train["left-out-no-match"] == 2
    assert played.ends[-1].train["unmatched-hospital"] == 12

    with pytest.raises(PairingError, match="no hospital has a person in common"):
        play([configs[1], configs[3]], 1)


Change = Callable[[list[str], list[list[str]]], tuple[list[str], list[list[str]]]]


# What a reader of files refuses is its own tests' matter.
@pytest.mark.parametrize(
    ("partition", "change", "reason"),
    [
        (5, lambda header, rows: (header, []), "left-out-no-introduction"),
        (2, lambda header, rows: (header[:-1], [row[:-1] for row in rows]), "left-out-no-introduction"),
        (5, lambda header, rows: ([header[0], *header[2:]], [[row[0], *row[2:]] for row in rows]),
            "left-out-other-form"),
    ],
    ids=("nobody", "no labels", "fewer columns"),
)  # fmt: skip
def test_a_bad_file_costs_its_group_alone(
    partition: int, change: Change, reason: str, tmp_path: Path
) -> None:
    # Three groups, so that the others are the majority.
    configs = files(tmp_path, 8, 3)
    rewrite(configs[partition]["data"], change)
    played = play(configs, 1)
    assert [group.number for group in played.strategy.groups] == [0, 1]
    assert played.ends[-1].train[reason] >= 1


@pytest.mark.parametrize("kind", ["query.pair", "query.setup", "train.update"])
def test_a_party_that_vanishes_costs_its_group_alone(kind: str, tmp_path: Path) -> None:
    played = prepared(files(tmp_path, 8, 2), holdout=0.5)
    gone: list[str] = []

    def lost(message_type: str, partition: int) -> bool:
        if partition == 3 and message_type == kind:
            gone.append(message_type)
        return partition == 3 and bool(gone)

    played.grid.lost = lost  # type: ignore[method-assign]
    with flower_identity(1):
        played.strategy.start(played.grid, RecordDict(), num_rounds=2, timeout=5.0)  # type: ignore[arg-type]
    assert played.ends[-1].train["groups"] == 1
    assert played.ends[-1].central["evaluated"] >= 1


def test_people_who_come_later_are_learnt_from(tmp_path: Path) -> None:
    configs = files(tmp_path, 12, 1)
    kept: list[list[list[str]]] = []
    rewrite(configs[1]["data"], lambda header, rows: (kept.append(rows), (header, rows[:6]))[1])  # type: ignore[func-returns-value]
    played = prepared(configs, holdout=0.0, **{"rematch-every": 2})

    def grow(end: Any) -> None:
        if end.round == 1:
            rewrite(configs[1]["data"], lambda header, rows: (header, kept[0]))
            later = time.time_ns() + 10**9
            os.utime(configs[1]["data"], ns=(later, later))

    played.strategy.on_round_end = [*played.strategy.on_round_end, grow]
    with flower_identity(1):
        played.strategy.start(played.grid, RecordDict(), num_rounds=4, timeout=60.0)  # type: ignore[arg-type]
    assert [end.train["matched"] for end in played.ends[1:]] == [6, 6, 12, 12]


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    configs = files(tmp_path, 12, 2)
    whole = play(configs, 3)
    first = play(configs, 2)
    second = prepared(configs)
    second.strategy.load_state_dict(json_like(first.strategy.state_dict()))
    with flower_identity(1):
        result = second.strategy.start(second.grid, RecordDict(), num_rounds=3, timeout=60.0)  # type: ignore[arg-type]
    assert all(np.array_equal(array.numpy(), whole.arrays[key]) for key, array in result.arrays.items())


def json_like(state: Any) -> Any:
    """Return a state as a checkpoint gives it back: tuples are lists."""
    if isinstance(state, dict):
        return {key: json_like(value) for key, value in state.items()}
    if isinstance(state, tuple | list):
        return [json_like(value) for value in state]
    return state if isinstance(state, np.ndarray) else json.loads(json.dumps(state))


# A server that lies


def asked(played: Played, kind: str, partition: int, config: dict[str, Any]) -> Exception | RecordDict:
    node = next(n for n, p in played.grid.partitions.items() if p == partition)
    with flower_identity(1):
        message = Message(RecordDict({"config": ConfigRecord(config)}), node, kind, ttl=60.0)
        (reply,) = played.grid.send_and_receive([message])
    return ValueError(reply.error.reason) if reply.has_error() else reply.content


def test_sums_over_few_people_and_other_sums_than_were_told_are_refused(tmp_path: Path) -> None:
    configs = files(tmp_path, 12, 1, "devices")
    for i, config in enumerate(configs):
        (tmp_path / f"policy{i}.toml").write_text(f"ledger = 'ledger{i}.jsonl'\n")
        config["policy"] = str(tmp_path / f"policy{i}.toml")
    played = play(configs, 1, holdout=0.0)
    group = played.strategy.groups[0]
    data = load_vertical("breast-cancer")
    common = {"classes": list(data.classes), "features": list(data.hospital_features), "sums": True}
    few = asked(played, "query.pool", 0, {**common, "ids": list(group.ids[:1])})
    other = asked(played, "query.pool", 0, {**common, "ids": list(group.ids[:-1])})
    masks = asked(
        played, "query.unmask", 0, {"ids": list(group.ids[:-1]), "seeds": [b"x"] * 11, "numbers": 30}
    )
    for answer, words in ((few, "could not answer"), (other, "as often as"), (masks, "as often as")):
        assert isinstance(answer, ValueError)
        assert words in str(answer)
    same = asked(played, "query.pool", 0, {**common, "ids": list(group.ids)})
    assert isinstance(same, RecordDict)


def test_code_that_the_owner_did_not_allow_is_not_imported(tmp_path: Path) -> None:
    configs = files(tmp_path, 8, 1)
    with pytest.raises(PairingError, match="not-ready"):
        play(configs, 1, model="os:getcwd")


# After training


def recorded(
    configs: list[dict[str, Any]], parent: Path, **changes: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """Run the app itself; return the run's folder and rounds."""
    before = set(parent.iterdir()) if parent.is_dir() else set()
    values = {
        **CASE.small_for("own"),
        "partition": "own",
        "num-clients": len(configs),
        "output-dir": str(parent),
        **changes,
    }
    plan = plan_run(CASE.spec, [f"{key}={json.dumps(value)}" for key, value in values.items()])
    run_app(CASE.loaded, plan, node_configs=configs, strict=True)
    (folder,) = set(parent.iterdir()) - before
    return folder, read_rounds(folder)


def test_a_trained_model_predicts_for_people_it_has_not_seen(tmp_path: Path) -> None:
    classes = ",".join(load_vertical("breast-cancer").classes)
    trained, rounds = recorded(
        files(tmp_path / "then", 16, 2), tmp_path / "runs", classes=classes, **{"training-mode": "loop"}
    )
    assert rounds[-1]["central"]["evaluated"] >= 1
    data, groups = people(24, 2, seed=1)
    configs = write_groups(data, groups, tmp_path / "now", "devices")
    configs[0]["predictions"] = str(tmp_path / "predictions.csv")
    options = [option for i, config in enumerate(configs) for option in ("--node-config", at(i, config))]
    done = CliRunner().invoke(
        command_line, ["predict", str(CASE.folder), str(trained), "--nodes", str(len(configs)), *options]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout[done.stdout.rindex("{") :])
    assert told["evaluated"] == 48

    model = split_model("auto", (15,), (15,), 2, 0)
    with np.load(trained / "model.npz") as file:
        model.load_state_dict({key: torch.tensor(file[key]) for key in file})
    state = load_newest(trained / "checkpoint")[1].state["parts"]["strategy"]["parts"]["members"]["agreed"]
    halves = []
    for x, side in ((data.hospital_train, "hospital"), (data.device_train, "device")):
        mean, deviation = (np.array(part) for part in state[side])
        halves.append(((x.astype(float) - mean) / deviation).astype(np.float32))
    rows = np.concatenate(groups)
    x1, x2, y = (torch.tensor(part[rows]) for part in (*halves, data.y_train))
    central = evaluate_split(model, x1, x2, y)
    assert told["loss"] == pytest.approx(central.loss, abs=1e-6)
    assert told["accuracy"] == central.accuracy

    with (tmp_path / "predictions.csv").open(newline="") as lines:
        written = list(csv.DictReader(lines))
    p = torch.sigmoid(model(x1, x2)[:24, 0]).detach().numpy()
    expected = dict(zip(data.ids_train[groups[0]].tolist(), p, strict=True))
    assert {row["id"] for row in written} == set(expected)
    positive = f"p({data.classes[1]})"
    assert all(float(row[positive]) == pytest.approx(expected[row["id"]], abs=1e-5) for row in written)


def at(partition: int, config: dict[str, Any]) -> str:
    return f"{partition}: " + " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


@LAYOUTS
def test_sealing_moves_no_bit_and_no_score_of_people_held_out(layout: str, tmp_path: Path) -> None:
    configs = files(tmp_path, 12, layout=layout)
    plain, sealed = (play(configs, 1, sealed=one, holdout=0.3) for one in (False, True))
    assert plain.arrays.keys() == sealed.arrays.keys()
    assert all(np.array_equal(array, sealed.arrays[key]) for key, array in plain.arrays.items())
    assert plain.ends[-1].central == sealed.ends[-1].central
    assert plain.ends[-1].central["evaluated"] > 0
    assert sealed.ends[-1].train["unopened"] == sealed.ends[-1].train["withheld"] == 0
    told = [content for _, _, content in sealed.grid.replies]
    kinds = {key for content in told for record in content.array_records.values() for key in record}
    assert "zeta2" not in kinds
    assert "evaluated-zeta2" in {
        key for content in told if "sealed" in content.config_records for key in content["sealed"]
    }


def test_parties_that_have_a_name_alone_train_the_same_model(tmp_path: Path) -> None:
    """No partition-id in any node config, in a sealed run."""
    configs = files(tmp_path, 6, 3, "devices")
    options: dict[str, Any] = {"holdout": 0.0}
    numbered = play(configs, 1, **options)
    named = prepared([{**one, "name": f"ward-{i:02}"} for i, one in enumerate(configs)], **options)
    for node in named.grid._nodes.values():
        del node.config["partition-id"]
    with flower_identity(1):
        result = named.strategy.start(named.grid, ArrayRecord(), num_rounds=1, timeout=60.0)
    assert named.ends[-1].rejected == {}
    assert named.ends[-1].train["groups"] == 3
    assert {key: array.numpy().tolist() for key, array in result.arrays.items()} == {
        key: array.tolist() for key, array in numbered.arrays.items()
    }


def test_nodes_that_want_noise_take_part_with_their_own_data(tmp_path: Path) -> None:
    """No sums of features, labels at both sides, and noise on all that they tell."""
    configs = files(tmp_path, 8, 1)
    with Path(configs[0]["data"]).open(newline="") as lines:
        labels = {row["id"]: row["label"] for row in csv.DictReader(lines)}
    rewrite(
        configs[1]["data"],
        lambda header, rows: ([*header, "label"], [[*row, labels[row[header.index("id")]]] for row in rows]),
    )
    for i, config in enumerate(configs):
        (tmp_path / f"{i}.toml").write_text(f'privacy = "sound"\nledger = "{i}.jsonl"\n')
        config["policy"] = str(tmp_path / f"{i}.toml")
    noise = {"clip": 1.0, "noise-multiplier": 8.0, "upload-clip": 1.0, "upload-noise-multiplier": 8.0}
    intervals = {"global-interval": 2, "local-interval": 2}
    played = play(configs, 2, standardise="none", holdout=0.0, **noise, **intervals)
    assert played.ends[-1].rejected == {}
    assert np.isfinite(played.ends[-1].train["epsilon"])
    told = [json.loads(line)["what"] for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert told == ["release"] * 4
