"""``hedgerow deploy``: what it exits with, and what it asks of the deployment."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sim.cli.command_line import APPS, OWN_SET, SD_FEEL, hedgerow

from hedgerow.sim import AppSpec, StartError, read_rounds
from hedgerow.sim.deploy import edges, local
from hedgerow.sim.deploy.supernode import read_split, readable_by_others


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (lambda: 0, 0),
        (StartError("no port"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
    ],
)
def test_exit_codes_tell_how_it_ended(ends: object, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def end(spec: AppSpec, plan: object, **options: object) -> int:
        asked.update(options, plan=plan)
        if isinstance(ends, BaseException):
            raise ends
        return ends()  # type: ignore[operator, no-any-return]

    monkeypatch.setattr(local, "deploy_local", end)
    options = ["--nodes", "3", "-c", "num-servers=2", "--tls", "--out", "/a/b", "--keep-logs"]
    options += ["--node-config", "role=north"]
    shown = hedgerow("deploy", "local", SD_FEEL, *options)
    assert shown.exit_code == code, shown.output
    assert asked["plan"].run_config["output-dir"] == "/a/b"  # type: ignore[attr-defined]
    assert asked["plan"].run_config["num-clients"] == 3  # type: ignore[attr-defined]
    del asked["plan"]
    assert asked == {
        "tls": True,
        "keep_logs": True,
        "own_data": False,
        "own_users": False,
        "node_config": [{"role": "north"}] * 3,
        "records": None,
    }


def test_keys_for_a_lan_are_made_by_a_command(tmp_path: Path) -> None:
    arguments = ["deploy", "keys", str(tmp_path / "keys"), "--nodes", "2", "--host", "192.168.1.10"]
    shown = hedgerow(*arguments)
    assert shown.exit_code == 0
    assert f"register {tmp_path / 'keys' / 'node1.pub'}" in shown.output
    again = hedgerow(*arguments)
    assert again.exit_code == 2
    assert "which has keys: change them with --add N, --renew or --revoke I" in again.output


def test_keys_of_edge_servers_are_a_folder_each(tmp_path: Path) -> None:
    arguments = ["deploy", "keys", str(tmp_path / "keys"), "--nodes", "3", "--edges", "2"]
    shown = hedgerow(*arguments, "--host", "10.0.0.1")
    assert shown.exit_code == 2
    assert "--host must be given once for each of the 2 edge servers, got 1" in shown.output
    shown = hedgerow(*arguments, "--host", "10.0.0.1", "--host", "10.0.0.2")
    assert shown.exit_code == 0, shown.output
    assert f"register {tmp_path / 'keys' / 'edge1' / 'node2.pub'}" in shown.output
    assert (tmp_path / "keys" / "edge0" / "peer.pem").exists()


CEPS_SITES = ("deploy", "local", APPS / "ceps", "--sites", "2")


def test_sites_start_each_with_its_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def end(spec: AppSpec, overrides: object, partitions: object, **options: object) -> int:
        asked.append({**options, "partitions": partitions})
        return 0

    monkeypatch.setattr(edges, "deploy_edges", end)
    assert hedgerow(*CEPS_SITES, "--nodes", "5").exit_code == 0
    assert (asked[0]["partitions"], asked[0]["sites"]) == ([[0, 1, 2], [3, 4]], True)


def test_level_e3_starts_each_edge_server_with_its_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def end(spec: AppSpec, overrides: object, partitions: object, **options: object) -> int:
        asked.update(options, partitions=partitions)
        return 1

    monkeypatch.setattr(edges, "deploy_edges", end)
    options = ["--level", "E3", "--nodes", "5", "--edges", "3", "--tls", "--out", "/a/b"]
    shown = hedgerow("deploy", "local", SD_FEEL, *options, "-c", "iterations=20 data-dir=/srv/data")
    assert shown.exit_code == 1, shown.output
    assert asked["partitions"] == [[0, 1], [2, 3], [4]]
    assert asked["tls"] is True
    assert asked["output_dir"] == "/a/b"
    assert asked["node_config"] == [{"data-dir": "/srv/data"}] * 5


def test_nodes_of_ones_own_read_and_import_what_the_run_config_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(local, "deploy_local", lambda spec, plan, **options: asked.update(options) or 0)
    monkeypatch.chdir(tmp_path)
    said = ["-c", "data-dir=mine dataset=my.data:load model=my.model:build", "--nodes", "4"]
    assert hedgerow("deploy", "local", SD_FEEL, *said, "--node-config", "1: data-dir=/own").exit_code == 0
    ours = {"data-dir": str(tmp_path / "mine"), "allow-imports": "my.data:load,my.model:build"}
    assert asked["node_config"] == [ours, {**ours, "data-dir": "/own"}, ours, ours]


@pytest.mark.parametrize(("level", "servers", "nodes"), [("E1", "emulated", 6), ("E2", "nodes", 8)])
def test_the_other_levels_are_settings_of_the_app(
    level: str, servers: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(local, "deploy_local", lambda spec, plan, **options: asked.update(plan=plan) or 0)
    shown = hedgerow("deploy", "local", SD_FEEL, "--level", level, "--edges", "2", "-c", "num-clients=6")
    assert shown.exit_code == 0, shown.output
    assert asked["plan"].run_config["edge-servers"] == servers
    assert asked["plan"].run_config["num-servers"] == 2
    assert asked["plan"].num_nodes == nodes


# Own data


LEARN = "tau1=1 tau2=1 num-servers=3 topology=path iterations=1 model=logistic holdout=0.0 standardise=none"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three nodes' files, by the command line, of a set in the current folder."""
    folder = tmp_path_factory.mktemp("samples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        (folder / "set_to_split.py").write_text(OWN_SET)
        shown = hedgerow("deploy", "split", "set_to_split:load", "own", "--nodes", "3")
    assert shown.exit_code == 0, shown.output
    return folder / "own"


def test_a_split_has_one_private_file_a_node(samples: Path) -> None:
    files = sorted(path for path in samples.iterdir() if path.name != "manifest.json")
    assert [path.name for path in files] == ["node-0.npz", "node-1.npz", "node-2.npz"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert sum(len(np.load(path)["y"]) for path in files) == 40


def test_a_split_of_a_vertical_set_has_one_private_file_a_party(tmp_path: Path) -> None:
    arguments = ["breast-cancer", tmp_path / "own", "--groups", "2", "--people", "3", "--layout", "devices"]
    shown = hedgerow("deploy", "split", *arguments)
    assert shown.exit_code == 0, shown.output
    configs = read_split(tmp_path / "own").node_configs
    assert [(config["role"], config["group"]) for config in configs] == [
        *(("hospital", m) for m in range(2)),
        *(("device", m) for m in range(2) for _ in range(3)),
    ]
    assert len({config["data"] for config in configs}) == 8
    assert readable_by_others(configs) == []
    people = [len(Path(str(config["data"])).read_text().splitlines()) - 1 for config in configs]
    assert people == [3, 3] + [1] * 6


def test_each_node_is_told_of_its_own_file_alone(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setenv("HEDGEROW_DATA_DIR", "/all/of/it")

    class AskedError(Exception):
        pass

    def note(spec: AppSpec, num_nodes: int, **options: object) -> None:
        asked.update(options)
        raise AskedError

    monkeypatch.setattr(local, "Deployment", note)
    shown = hedgerow("deploy", "local", SD_FEEL, "--own-data", samples, "-c", LEARN)
    assert isinstance(shown.exception, SystemExit | AskedError)
    # Whoever starts them owns the nodes: the run's held-out share is theirs.
    ours = {"holdout": 0.0, "holdout-seed": 0}
    assert asked["node_config"] == [{**ours, "data": str(samples / f"node-{i}.npz")} for i in range(3)]
    assert asked["env"] == {"HEDGEROW_DATA_DIR": ""}
    assert asked["own_users"] is True
    hedgerow("deploy", "local", SD_FEEL, "--own-data", samples, "--one-user", "-c", LEARN)
    assert asked["own_users"] is False


@pytest.mark.parametrize(
    ("app", "arguments", "words"),
    [
        (SD_FEEL, ["--nodes", "4"], "--nodes must be 3, the nodes of"),
        (SD_FEEL, ["-c", "data-dir=/srv"], "data-dir must be '' with partition = 'own', got '/srv'"),
    ],
)
def test_own_data_that_do_not_go_with_a_run_are_one_error(
    app: Path, arguments: list[str], words: str, samples: Path
) -> None:
    shown = hedgerow("deploy", "local", app, "--own-data", samples, "-c", LEARN, *arguments)
    assert shown.exit_code == 2, shown.output
    assert words in shown.output


def test_a_simulation_takes_the_same_folder(samples: Path, tmp_path: Path) -> None:
    options = ["-c", LEARN, "--output-dir", tmp_path, "--quiet"]
    shown = hedgerow("run", SD_FEEL, "--own-data", samples, *options)
    assert shown.exit_code == 0, shown.output
    (folder,) = tmp_path.iterdir()
    sizes = [len(np.load(samples / f"node-{i}.npz")["y"]) for i in range(3)]
    assert read_rounds(folder)[-1]["central"]["node-examples"] == sizes
