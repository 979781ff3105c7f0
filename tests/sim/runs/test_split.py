"""A folder of files, one a node: what its manifest may say."""

import json
from pathlib import Path

import pytest

from hedgerow.sim.runs.split import read_split, readable_by_others

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
