"""What a node with a file of its own refuses: of its owner's config, and of what it is told."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from tests.clients import contexts
from tests.clients.hsgd.federation import sent

from hedgerow.clients import Refusal, hsgd_client, own_share
from hedgerow.clients.hsgd.match_key import MatchKey
from hedgerow.clients.hsgd.own_data import own_handlers, own_party
from hedgerow.wire import SealingKey
from hedgerow.wire.message_types import EXCHANGE, PAIR, POOL, SETUP, UNMASK

SECRET = bytes(range(32))
PEOPLE = MatchKey(SECRET, 0)


def node(folder: Path, text: str = "id,pulse\np-1,61\n", **config: Any) -> Context:
    (folder / "half.csv").write_text(text)
    (folder / "match.key").write_bytes(SECRET)
    good = {"role": "device", "group": 0, "data": str(folder / "half.csv"), "partition-id": 1}
    good |= {"match-key-file": str(folder / "match.key")}
    told = {key: value for key, value in {**good, **config}.items() if value is not None}
    return Context(run_id=1, node_id=9, node_config=told, state=RecordDict(), run_config={})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"role": "nurse"}, "role must be one of hospital, device, edge, got 'nurse' in the node config"),
        ({"role": None}, "role must be one of hospital, device, edge, got None"),
        ({"group": -1}, "group must be an integer >= 0, got -1"),
        ({"group": "first"}, "group must be an integer >= 0, got 'first'"),
        ({"data": None}, "data must be the path of a file, got None in the node config"),
        (
            {"data": "/nowhere/half.csv"},
            "data must be the path of a readable file, got 'half.csv' in the node config",
        ),
        ({"match-key-file": None}, "match-key-file must be the path of a file, got None"),
        (
            {"match-key-file": "/nowhere/match.key"},
            "match-key-file must be the path of a readable file, got 'match.key' in the node config",
        ),
        ({"role": "hospital"}, "half.csv: no column 'label'"),
        ({"id": "mrn"}, "half.csv: no column 'mrn'"),
    ],
)
def test_a_bad_node_config_is_named(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        own_party(node(tmp_path, **config))


def test_a_server_is_told_nothing_of_a_device_s_bad_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_share, "is_simulated", lambda: False)
    with caplog.at_level("ERROR"), pytest.raises(ValueError, match="its log says why") as error:
        own_party(node(tmp_path, "id,pulse\np-77,fast\n"))
    assert not {"half", "pulse", "fast", "77"} & {*re.split(r"\W", str(error.value))}
    assert "half.csv: row 2, column 'pulse' must be a finite number, got 'fast'" in caplog.text


def test_a_device_has_one_person(tmp_path: Path) -> None:
    for rows, words in (
        ("", "there must be at least one row"),
        ("p-1,61\np-2,62\n", "a device must have one person, got 2"),
    ):
        with pytest.raises(ValueError, match=words):
            own_party(node(tmp_path, f"id,pulse\n{rows}"))


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    context = node(tmp_path, role="edge")
    assert len(own_party(context).rows) == 1
    (tmp_path / "half.csv").write_text("id,pulse\np-1,61\np-2,62\n")
    assert len(own_party(context).rows) == 2


def test_integers_of_a_half_are_refused_because_they_would_be_ids(tmp_path: Path) -> None:
    np.savez(tmp_path / "half.npz", ids=np.array(["a", "b"]), x=np.arange(6).reshape(2, 3))
    with pytest.raises(ValueError, match="x must be floating-point, got integers"):
        own_party(node(tmp_path, role="edge", data=str(tmp_path / "half.npz")))


def test_a_party_says_what_it_read(tmp_path: Path) -> None:
    own = own_party(node(tmp_path, "rownames,id,pulse,spo2\n4,p-1,61,1\n", features="spo2"))
    assert own.half.features == ("spo2",)
    assert own.reading.skipped == (("rownames", "an index of the rows"), ("pulse", "not in the key features"))


def setup(**changes: Any) -> dict[str, Any]:
    person = PEOPLE.person("p-1")
    good: dict[str, Any] = {"model": "auto", "seed": 0, "hospital-shape": [3], "device-shape": [1]}
    good |= {"classes": ["no", "yes"], "features": ["pulse"], "people": [person]}
    return {**good, "labels": [PEOPLE.seal(1, person, ["no", "yes"])], **changes}


def told(context: Context, kind: str, **config: Any) -> RecordDict | Exception:
    app = hsgd_client(own_party, own=lambda context: True)  # type: ignore[arg-type]
    return contexts.answer(app, kind, context, sent({}, **config))


def test_a_device_without_labels_is_ready_with_a_sealed_one(tmp_path: Path) -> None:
    answer = told(node(tmp_path), "query.setup", **setup())
    assert isinstance(answer, RecordDict)
    assert answer["ready"] == ConfigRecord({"encoding": 1})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hospital-shape": [2**20, 2**20]}, "a shape must have 1 to 16777216 features"),
        ({"hospital-shape": [0]}, "features, got (0,) in the message's config"),
        ({"device-shape": [2]}, "the shape must be this data's (1,), got (2,)"),
        ({"features": ["spo2"]}, "features"),
        ({"people": ["0" * 32]}, "1 people, got 1 others in the message's config"),
        ({"people": [], "labels": []}, "people must not be empty"),
        ({"labels": [b"x" * 32]}, "not sealed with this party's key"),
        ({"labels": []}, "received none"),
        # Of whatever label: a refusal tells nothing of it.
        ({"labels": [PEOPLE.seal(1, PEOPLE.person("p-1"), ["no", "other", "yes"])]}, "not sealed with"),
        ({"labels": [PEOPLE.seal(0, PEOPLE.person("p-1"), ["no", "other", "yes"])]}, "not sealed with"),
        ({"mean": [1.0], "deviation": [0.0]}, "must be finite, the latter two > 0"),
        ({"mean": [1.0, 1.0], "deviation": [1.0, 1.0]}, "mean must have 1 entries, got 2"),
        ({"model": "os:getcwd"}, "code, which this node's owner has not allowed"),
        ({"model": "huge"}, "import path module:function, got 'huge'"),
        ({"model": 3}, "model or seed"),
        ({"classes": "no,yes"}, "must be a list"),
    ],
)
def test_a_bad_agreement_is_refused_and_not_kept(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    context = node(tmp_path)
    answer = told(context, "query.setup", **setup(**changes))
    assert isinstance(answer, ValueError)
    assert words in str(answer)
    assert not context.state


@pytest.mark.parametrize("key", ["sealing-key", "neighbour-keys"])
def test_a_node_that_names_sealing_keys_takes_part_in_no_plain_run(key: str, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    if key == "neighbour-keys":
        key_file.write_text("")
    context = node(tmp_path, **{key: str(key_file)})
    if key == "sealing-key":
        SealingKey.at(key_file)
    config = setup(t=0, steps=1, upload=True, ids=[PEOPLE.person("p-1")], sums=True, **{"eta0": 0.1})
    first = (PAIR, POOL, UNMASK, SETUP)
    for kind in first:
        answer = told(context, kind, **config)
        assert isinstance(answer, Refusal), kind
        assert str(answer).startswith("sealed: ")
        assert not context.state
        assert not isinstance(told(node(tmp_path), kind, **config), Refusal)
    for kind in (POOL, SETUP):
        assert isinstance(told(context, kind, **config, sealed=True), RecordDict)
    # It has an agreement now, of a sealed run.
    for kind in {*own_handlers(), EXCHANGE} - {*first}:
        assert isinstance(told(context, kind, **config), Refusal), kind


def test_nobody_trains_before_an_agreement_of_this_run(tmp_path: Path) -> None:
    context = node(tmp_path)
    assert "no agreement" in str(told(context, "train.exchange", t=0))
    told(context, "query.setup", **setup())
    context.run_id = 2
    assert "no agreement" in str(told(context, "train.exchange", t=0))
