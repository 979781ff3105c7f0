"""What a node makes of its own data in a run, and what it says of them to whom."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from tests.clients import contexts

from hedgerow.clients import local_task, sd_feel_client
from hedgerow.clients.own_share import own_share
from hedgerow.wire import STANDARDISE, STATISTICS, WHOAMI, Call

X = np.random.default_rng(0).normal(3.0, 2.0, (40, 5)).astype(np.float32)
Y = np.arange(40) % 2


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    return tmp_path / "own.npz"


def context(data: Path, node: dict[str, Any] | None = None, **run: Any) -> Context:
    config = {"partition": "own", "standardise": "none", "holdout": 0.25, "seed": 1, "model": "logistic"}
    own = {"partition-id": 0, "data": str(data), **(node or {})}
    return contexts.context(0, 7, run_config={**config, **run}, **own)


def ask(message_type: str, own: Context, **records: ConfigRecord) -> RecordDict:
    return contexts.answered(sd_feel_client(), message_type, own, RecordDict({**records}))


def test_every_sample_is_learnt_from_or_held_out_by_the_seed_and_the_nodes_name(data: Path) -> None:
    share = own_share(context(data))
    assert sorted([*share.part, *share.held_out]) == list(range(40))
    assert len(share.held_out) == 10
    assert own_share(context(data, holdout=0.0)).part.tolist() == list(range(40))

    def held_out(**changes: Any) -> list[int]:
        node = {key: changes.pop(key) for key in ("name", "partition-id") if key in changes}
        return own_share(context(data, node, **changes)).held_out.tolist()

    assert held_out(name="ward") == held_out(name="ward", **{"partition-id": 3})
    assert held_out(name="ward") != held_out(name="clinic")
    assert held_out(name="ward", seed=1) != held_out(name="ward", seed=2)
    # A single sample is learnt from.
    np.savez(data, x=X[:1], y=Y[:1])
    share = own_share(context(data, holdout=0.9))
    assert (len(share.part), len(share.held_out)) == (1, 0)


def test_a_node_introduces_itself_with_what_its_data_look_like(data: Path) -> None:
    me = ask(WHOAMI, context(data, {"name": "ward"})).config_records["whoami"]
    assert dict(me) == {
        "message-format": 1,
        "partition-id": 0,
        "num-examples": 30,
        "role": "",
        "group": "",
        "name": "ward",
        "input-shape": [5],
        "num-classes": 2,
        "dtype": "float32",
    }


def test_a_node_with_a_name_needs_no_place(data: Path) -> None:
    own = context(data, {"name": "ward"})
    del own.node_config["partition-id"]
    assert "partition-id" not in ask(WHOAMI, own).config_records["whoami"]
    other = context(data, {"name": "clinic"})
    del other.node_config["partition-id"]
    ids = [Call(RecordDict(), one, WHOAMI).partition_id for one in (own, other)]
    assert ids[0] != ids[1]
    assert all(0 <= one < 2**62 for one in ids)


def test_statistics_are_of_the_samples_that_are_learnt_from_unless_a_node_keeps_them(data: Path) -> None:
    own = context(data)
    told = ask(STATISTICS, own).metric_records["statistics"]
    part = X[own_share(own).part].astype(np.float64)
    assert told["count"] == 30
    assert told["mean"] == pytest.approx(part.mean(axis=0))
    assert told["squares"] == pytest.approx(part.var(axis=0) * 30)
    with pytest.raises(PermissionError, match="share-statistics"):
        ask(STATISTICS, context(data, {"share-statistics": False}))


def test_a_node_learns_from_what_its_run_standardises(data: Path) -> None:
    own = context(data, standardise="federated")
    with pytest.raises(ValueError, match="has no standardisation for this run"):
        local_task(own)
    ask(STANDARDISE, own, standardise=ConfigRecord({"mean": [3.0] * 5, "std": [2.0] * 5}))
    assert local_task(own).x.numpy() == pytest.approx((X - 3) / 2, abs=1e-6)
    # The statistics stay those of the file.
    assert ask(STATISTICS, own).metric_records["statistics"]["mean"][0] == pytest.approx(3, abs=1.5)
    own.run_id += 1
    with pytest.raises(ValueError, match="has no standardisation"):
        local_task(own)
    assert local_task(context(data, standardise="3,2")).x.numpy() == pytest.approx((X - 3) / 2, abs=1e-6)
    assert local_task(context(data)).x.numpy() == pytest.approx(X)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"mean": [0.0] * 5},
        {"mean": [0.0] * 4, "std": [1.0] * 4},
        {"mean": [0.0] * 5, "std": [0.0] * 5},
        {"mean": [0.0] * 5, "std": [-1.0] * 5},
        {"mean": [float("nan")] * 5, "std": [1.0] * 5},
        {"mean": 0.0, "std": 1.0},
    ],
)
def test_a_bad_standardisation_is_refused(data: Path, told: dict[str, Any]) -> None:
    own = context(data, standardise="federated")
    with pytest.raises(ValueError, match=r"mean|std"):
        ask(STANDARDISE, own, standardise=ConfigRecord(told))
    assert not own.state


@pytest.mark.parametrize(
    "changes", [{"holdout": 0.95}, {"holdout": "all"}, {"seed": -1}, {"seed": True}, {"classes": "a"}]
)
def test_a_bad_run_config_is_refused(data: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"holdout|seed|not valid"):
        own_share(context(data, **changes))


def test_the_owner_reads_what_is_wrong_and_the_server_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hedgerow.clients.own_share.is_simulated", lambda: False)
    np.savez(tmp_path / "private-name.npz", x=X, y=Y - 1)
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        with pytest.raises(ValueError, match="its log says why") as refused:
            ask(WHOAMI, context(tmp_path / "private-name.npz"))
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert "private-name" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert "private-name.npz: y[0] must be an integer from 0" in caplog.text
    assert "got '-1'" in caplog.text


def test_who_simulates_a_node_is_told_what_is_wrong_with_its_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "name.npz", x=X, y=Y - 1)
    with pytest.raises(ValueError, match=r"local data are not valid: .*name.npz: y\[0\] must be .*got '-1'"):
        ask(WHOAMI, context(tmp_path / "name.npz"))


def test_the_server_cannot_name_a_module_on_the_node(data: Path) -> None:
    with pytest.raises(ValueError, match="allow-imports"):
        local_task(context(data, model="os:getcwd"))
    with pytest.raises(ValueError, match="must be 'own' for this node"):
        local_task(context(data, partition="iid", dataset="os:getcwd"))
