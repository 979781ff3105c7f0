"""Own data by the command line: node configs of a simulation, modules in the current folder, known sets."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.sim.cli.command_line import APPS, OWN_SET, hedgerow

from hedgerow.sim import read_rounds
from hedgerow.tasks import DATASETS, VERTICAL_DATASETS
from hsgd.medical import SETS

SMALL = ("-c", "num-clients=2 num-rounds=1 local-iters=1 model=logistic min-replies=1", "--quiet")


def one_run(folder: Path) -> list[dict]:
    (run,) = (folder / "runs").iterdir()
    return read_rounds(run)


def test_each_node_of_a_simulation_reads_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        x = np.random.default_rng(i).normal(size=(10 * (i + 1), 3))
        np.savez(tmp_path / f"n{i}.npz", x=x, y=np.arange(len(x)) % 2)
    node = "data=n{partition-id}.npz"
    shown = hedgerow("run", APPS / "similarity-free", "-c", "partition=own", *SMALL, "--node-config", node)
    assert shown.exit_code == 0, shown.output
    assert one_run(tmp_path)[-1]["central"]["node-examples"] == [2, 4]


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "set_of_my_own.py").write_text(OWN_SET)
    shown = hedgerow(
        "run", APPS / "similarity-free", "-c", "dataset=set_of_my_own:load partition=iid", *SMALL
    )
    assert shown.exit_code == 0, shown.output
    assert 0 <= one_run(tmp_path)[-1]["central"]["accuracy"] <= 1


def test_every_known_set_is_listed() -> None:
    shown = hedgerow("data").output
    named = [line.partition(":")[0] for line in shown.splitlines() if not line.startswith(" ")]
    assert sorted(named) == sorted({*DATASETS, *VERTICAL_DATASETS, *SETS})


@pytest.mark.parametrize(
    ("node", "cause"),
    [
        (("data=n{partition-id}.csv label=target",), "n0.csv: no column 'target'; the columns are 'a', 'y'"),
        (("data=none-{partition-id}.csv",), "none-0.csv: the file does not exist"),
        (("1: data=n1.csv label=y", "0: data=n0.csv label=target"), "n0.csv: no column 'target'"),
        ((), "data is missing in the node config; "),
    ],
)
def test_what_keeps_local_data_from_being_read_is_the_one_error(
    node: tuple[str, ...], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        (tmp_path / f"n{i}.csv").write_text("a,y\n" + "1,u\n2,v\n" * 4)
    configs = [word for one in node for word in ("--node-config", one)]
    shown = hedgerow("run", APPS / "similarity-free", "-c", 'partition=own classes="u,v"', *SMALL, *configs)
    assert shown.exit_code == 1, shown.output
    last = shown.stderr.splitlines()[-1].replace("none-1", "none-0").replace("n1.csv", "n0.csv")
    assert last.startswith("Run failed: ")
    place = f"{tmp_path}/" if node else ""
    assert f"local data are not valid: {place}{cause}" in last
    assert "Traceback" not in shown.stderr
    assert "ClientApp(mods=[introduce])" not in shown.stderr


def test_a_data_set_is_fetched_by_its_package_or_the_line_that_fetches_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    told = hedgerow("data", "--download", "Fashion_MNIST", "--data-dir", tmp_path)
    assert told.exit_code == 2
    line = f"import torchvision; torchvision.datasets.FashionMNIST(root='{tmp_path}', download=True)"
    assert f'python -c "{line}"' in told.stderr
    assert "pip install 'hedgerow[vision]'" in told.stderr
    fetched: list[dict[str, object]] = []
    sets = SimpleNamespace(MNIST=lambda **options: fetched.append(options))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(datasets=sets))
    done = hedgerow("data", "--download", "mnist", "--data-dir", tmp_path)
    assert done.exit_code == 0, done.output
    organs = SimpleNamespace(OrganAMNIST=lambda **options: fetched.append(options))
    monkeypatch.setitem(sys.modules, "medmnist", organs)
    # medmnist does not make the folder.
    done = hedgerow("data", "--download", "organamnist", "--data-dir", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "new").is_dir()
    assert fetched == [
        {"root": str(tmp_path), "download": True},
        {"root": str(tmp_path / "new"), "download": True, "split": "train"},
    ]

    def offline(**options: object) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    sets.MNIST = offline
    failed = hedgerow("data", "--download", "mnist", "--data-dir", tmp_path)
    assert failed.exit_code == 2
    assert failed.stderr.startswith(
        "Error: torchvision could not fetch mnist (RuntimeError: Error downloading"
    )
    assert "(did you mean 'cifar10'?)" in hedgerow("data", "--download", "cifar1").stderr
    assert "requires --data-dir" in hedgerow("data", "--download", "mnist").stderr


def test_what_no_package_fetches_is_here_or_its_owner_is_named(tmp_path: Path) -> None:
    assert "breast-cancer was found in scikit-learn" in hedgerow("data", "--download", "breast-cancer").output
    told = hedgerow("data", "--download", "esr", "--data-dir", tmp_path)
    assert told.exit_code == 2
    assert told.stderr.startswith(
        "Error: esr cannot be downloaded automatically: put data.csv of UCI's Epileptic Seizure"
    )
