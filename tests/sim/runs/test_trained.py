"""The trained model of every app, and of a copy by ``hedgerow new``, is evaluated and used in plain torch."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower_apps.cases import CASES, CEPS, FEDMUD, SD_FEEL, SIMILARITY_FREE, AppCase
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import load, load_model, plan_run, read_model, read_rounds, run_app
from hedgerow.sim.runs.compare import where

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "use_model.py"


def trained(
    case: AppCase, parent: Path, node_configs: list[dict[str, Any]] | None = None, **settings: Any
) -> Path:
    asked = {**case.small_for(settings.get("partition")), "quiet": True, **settings}
    plan = plan_run(
        case.spec, [*(f"{k}={json.dumps(v)}" for k, v in asked.items()), f"output-dir='{parent}'"]
    )
    run_app(case.loaded, plan, node_configs=node_configs)
    (folder,) = parent.iterdir()
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_saved_model_is_that_of_the_last_evaluation(case: AppCase, tmp_path: Path) -> None:
    folder = trained(case, tmp_path)
    shown = hedgerow("predict", case.spec.folder, folder)
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert hedgerow("predict", folder).stdout == shown.stdout
    if case is CEPS:
        assert list(told) == [f"partition-{i}" for i in range(case.small["num-clients"])]
        assert all(np.isfinite(one["loss"]) for one in told.values())
        assert read_model(folder / "nodes" / "partition-1")["w"].shape == (case.small["features"],)
        return
    last = read_rounds(folder)[-1]["central"]
    assert told.keys() <= last.keys()
    for key, value in told.items():
        assert last[key] == pytest.approx(value, rel=1e-6)
    model = load_model(folder)
    for name, array in read_model(folder).items():
        assert torch.equal(model.state_dict()[name], torch.from_numpy(np.array(array)))


def test_a_model_is_used_where_the_files_of_its_run_are_gone(tmp_path: Path) -> None:
    folder = trained(FEDMUD, tmp_path / "runs", model="mlp")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["run"] |= {"registry": str(tmp_path / "keys/nodes.toml"), "output-dir": str(file / "runs")}
    file.write_text(json.dumps(config))
    load_model(folder)
    shown = hedgerow("predict", folder, "-c", f"output-dir='{tmp_path}'")
    assert shown.exit_code == 0, shown.output


def test_the_example_shows_the_classes_of_new_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of data that the run split; test_own_data.py has those of the nodes' own."""
    folder = trained(FEDMUD, tmp_path / "runs", model="mlp")
    rows = np.random.default_rng(0).normal(size=(3, 784)).astype(np.float32)
    np.savetxt(tmp_path / "rows.csv", rows, fmt="%.9g", delimiter=",", header="pixels", comments="")
    capsys.readouterr()
    runpy.run_path(str(EXAMPLE))["main"](str(folder), tmp_path / "rows.csv")
    shown = [[float(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()]
    with torch.no_grad():
        expected = load_model(folder)(torch.from_numpy(rows)).softmax(1)
    assert np.array(shown) == pytest.approx(expected.numpy(), abs=6e-4)


def test_a_network_of_a_node_is_loaded_by_its_number(tmp_path: Path) -> None:
    network = {"problem": "network", "model": "logistic", "partition": "iid", "sparsity": 100}
    folder = trained(CEPS, tmp_path, **network)
    model = load_model(folder, node=2)
    assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    told = json.loads(hedgerow("predict", CEPS.spec.folder, folder).stdout)
    assert set(told["partition-2"]) == {"accuracy"}


# Shortest runs of copies, and the shape of a sample of the template's data; those of parties are two inputs.
COPIES = {
    "sd-feel": "num-servers=2 tau1=1 tau2=1 iterations=1 topology=complete num-clients=4",
    "similarity-free": "num-rounds=1 num-clients=4 partition=iid",
    "fedmud": "num-rounds=1 num-clients=4",
    "ceps": "iterations=6 num-clients=4",
    "hsgd": "iterations=4",
}


def test_a_copys_model_is_used_too(tmp_path: Path) -> None:
    """In a process of its own, because a copy's package has the app's name."""
    code = """
import json, sys
from pathlib import Path
import torch
from hedgerow.sim import load, load_model
from hedgerow.sim.cli import app
from hedgerow.sim.runs.hooks import drawn_network
def command(*words):
    try:
        app(list(words))
    except SystemExit as end:
        assert not end.code, words
for method, settings in json.loads(sys.argv[1]).items():
    copy = "my-" + method
    command("new", method)
    command("run", copy, "-q", "-c", settings)
    (run,) = Path("runs").glob(copy + "-*")
    model = load_model(run, copy, node=0 if method == "ceps" else None)
    with torch.no_grad():
        inputs = [torch.zeros(2, 7), torch.zeros(2, 6)] if method == "hsgd" else [torch.zeros(2, 64)]
        assert model(*inputs).argmax(1).shape == (2,), method
    if method in ("ceps", "sd-feel"):
        assert drawn_network(load([run]).runs[0]) is not None
    print("PREDICTED", method)
    command("predict", copy, str(run))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(COPIES)],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for method, told in zip(COPIES, done.stdout.split("PREDICTED ")[1:], strict=True):
        assert '"accuracy"' in told, method


OWN: dict[str, tuple[AppCase, dict[str, Any]]] = {
    "sd-feel": (SD_FEEL, {"num-servers": 2, "iterations": 2, "tau1": 1, "tau2": 1, "model": "mlp"}),
    "similarity-free": (SIMILARITY_FREE, {"num-rounds": 2, "local-iters": 2, "model": "mlp"}),
    "fedmud": (FEDMUD, {"num-rounds": 1, "model": "mlp", "skip-front": 0, "ratio": 0.6}),
    "ceps, logistic": (CEPS, {"problem": "logistic", "sparsity": 2, "iterations": 8}),
    "ceps, network": (CEPS, {"problem": "network", "model": "mlp", "sparsity": 50, "iterations": 8}),
}


@pytest.mark.parametrize("standardise", ["federated", "none", "0.5,2.0"])
@pytest.mark.parametrize("name", OWN)
def test_a_model_of_tables_of_the_nodes_own_is_used_on_their_rows(
    name: str, standardise: str, tmp_path: Path
) -> None:
    case, settings = OWN[name]
    rng = np.random.default_rng(0)
    for i in range(4):
        x = rng.normal(40.0, 7.0, (40, 3))
        y = (x[:, 0] > 40.0).astype(int)
        np.savetxt(
            tmp_path / f"{i}.csv",
            np.column_stack([x, y]),
            fmt=["%.4f"] * 3 + ["%d"],
            delimiter=",",
            header="a,b,c,label",
            comments="",
        )
    configs = [{"data": str(tmp_path / f"{i}.csv"), "label": "label"} for i in range(4)]
    own = {
        "partition": "own",
        "num-clients": 4,
        "topology": "complete",
        "standardise": standardise,
        **settings,
    }
    own = {key: value for key, value in own.items() if key in case.defaults}
    runs = tmp_path / "runs"
    folder = trained(case, runs, configs, **own)
    config = [f"data='{tmp_path}/{{partition-id}}.csv' label='label'"]
    refused = hedgerow("predict", folder)
    assert refused.exit_code == 2
    assert "--node-config must name each node's data" in refused.stderr
    refused = hedgerow("predict", case.spec.folder, folder, "--node-config", "data=none.csv")
    assert (refused.exit_code, "none.csv: the file does not exist" in refused.stderr) == (1, True)
    shown = hedgerow("predict", case.spec.folder, folder, "--node-config", *config)
    assert shown.exit_code == 0, shown.output
    told, (run,) = json.loads(shown.stdout), load([folder]).runs
    last = read_rounds(folder)[-1]["central"]
    assert "held-out samples" in where(run, "accuracy")
    if case is not CEPS:
        assert told["accuracy"] == pytest.approx(last["accuracy"], abs=1e-6)
    for one in told.values() if case is CEPS else [told]:
        assert one["held-out"] == 1.0
    if name == "ceps, logistic":
        assert read_model(folder / "nodes" / "partition-0")["w"].shape == (3,)
        return
    # Raw rows in, as the nodes' files have them.
    model = load_model(folder, node=0 if case is CEPS else None)
    with torch.no_grad():
        logits = model(torch.from_numpy(x.astype(np.float32)))
    about = json.loads((folder / "config.json").read_text())["own-data"]
    scales = {"federated": (about.get("mean"), about.get("std")), "none": (0.0, 1.0), "0.5,2.0": (0.5, 2.0)}
    mean, std = map(np.asarray, scales[standardise])
    bare = model if standardise == "none" else model[1]  # type: ignore[index]
    with torch.no_grad():
        expected = bare(torch.from_numpy(((x - mean) / std).astype(np.float32)))
    assert torch.allclose(logits, expected, atol=1e-4)


def test_a_strangers_app_is_refused(tmp_path: Path) -> None:
    shown = hedgerow("predict", Path(__file__).parents[1] / "torch_app", tmp_path)
    assert shown.exit_code == 2
    assert "APP must be one of the suite's or a copy of one" in shown.stderr
