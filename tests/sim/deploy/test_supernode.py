"""Node configs as the command line says them."""

import json
from pathlib import Path

import pytest

from hedgerow.sim.deploy.supernode import node_configs, read_split, readable_by_others


def test_a_node_config_is_for_all_for_one_or_for_some() -> None:
    texts = ["site=north", '0: role=hub group="a b"', "1-2: role=leaf rank=3", "2:role=late"]
    assert node_configs(texts, 4) == [
        {"site": "north", "role": "hub", "group": "a b"},
        {"site": "north", "role": "leaf", "rank": 3},
        {"site": "north", "role": "late", "rank": 3},
        {"site": "north"},
    ]


@pytest.mark.parametrize("text", ["4: role=hub", "2-1: role=hub", "0-4: role=hub"])
def test_a_partition_that_is_not_there_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="partitions must be from 0 to 3"):
        node_configs([text], 4)


def test_a_node_config_may_hold_each_nodes_own_number() -> None:
    configs = node_configs(["1-2: data=/srv/{partition-id}.npz", "name=node-{partition-id}"], 3)
    assert [config.get("data") for config in configs] == [None, "/srv/1.npz", "/srv/2.npz"]
    assert [config["name"] for config in configs] == ["node-0", "node-1", "node-2"]


GOOD = {
    "node-config": [{"data": "a.npz"}, {"data": "b/c.csv", "match-key-file": "k", "group": 1}],
    "run-config": {},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own" / "b").mkdir(parents=True)
    for name in ("a.npz", "b/c.csv", "k"):
        (tmp_path / "own" / name).touch(0o600)
    (tmp_path / "other.npz").touch()
    return tmp_path / "own"


def test_paths_are_within_the_folder_and_told_in_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "manifest.json").write_text(json.dumps(GOOD))
    monkeypatch.chdir(folder.parent)
    split = read_split("own")
    assert split.node_configs == [
        {"data": str(folder / "a.npz")},
        {"data": str(folder / "b/c.csv"), "match-key-file": str(folder / "k"), "group": 1},
    ]
    assert readable_by_others(split.node_configs) == []
    (folder / "k").chmod(0o640)
    assert readable_by_others(split.node_configs) == [folder / "k"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "in JSON"),
        ("[]", "with 'node-config', a list of"),
        (json.dumps({"node-config": GOOD["node-config"]}), "'run-config'"),
        (json.dumps({**GOOD, "node-config": [{"group": 0}]}), "must have 'data'"),
        (
            json.dumps({**GOOD, "node-config": [{"data": "nope.npz"}]}),
            "must be an existing file, got 'nope.npz'",
        ),
        (
            json.dumps({**GOOD, "node-config": [{"data": "../other.npz"}]}),
            "must be a file within the folder",
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused(folder: Path, text: str, words: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_split(folder)


def test_a_folder_without_a_manifest_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"hedgerow deploy split.*No such file"):
        read_split(folder)
