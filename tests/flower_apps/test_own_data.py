"""Every app on data that each node has for itself, with a server that has none."""

import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from hedgerow.sim import plan_run, read_config, read_rounds, run_app
from hedgerow.strategies import RosterError, SimilarityFree, TooFewRepliesError
from hedgerow.tasks import federated, write_split

from .cases import CASES, CEPS, FEDMUD, HSGD, SD_FEEL, SIMILARITY_FREE, AppCase
from .hsgd_own import files as hsgd_files

pandas = pytest.importorskip("pandas")

USE_MODEL = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "use_model.py"))["main"]
NODES = 4
SAME = {"num-clients": NODES, "partition": "dirichlet(0.5)", "dataset": "mnist-5k", "scaling": "unit"}
SMALL: dict[str, dict[str, Any]] = {
    "sd_feel": {"num-servers": 2, "iterations": 8, "tau1": 2, "tau2": 2, "model": "logistic"},
    "similarity_free": {"num-rounds": 2, "local-iters": 2, "model": "logistic"},
    "fedmud": {"num-rounds": 2, "clients-per-round": 2, "model": "mlp", "skip-front": 0, "ratio": 0.25},
}


def run(case: AppCase, parent: Path, configs: list[dict[str, Any]], **changes: Any) -> Path:
    """Run an app with node configs; return the run's folder."""
    parent.mkdir(parents=True, exist_ok=True)
    settings = {
        **case.small_for(changes.get("partition")),
        "evaluate-every": 1,
        "num-clients": len(configs),
        **changes,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    plan = plan_run(case.spec, [*overrides, f"output-dir={json.dumps(str(parent))}", "quiet=true"])
    run_app(case.loaded, plan, node_configs=configs)
    (folder,) = parent.iterdir()
    return folder


def model(folder: Path) -> dict[str, np.ndarray]:
    (path,) = folder.rglob("model.npz")
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    write_split("mnist-5k", folder, NODES, "dirichlet(0.5)", seed=0, scaling="unit")
    return folder


def files(folder: Path, **more: Any) -> list[dict[str, Any]]:
    return [{"data": str(folder / f"node-{i}.npz"), **more} for i in range(NODES)]


@pytest.mark.parametrize("case", [SD_FEEL, SIMILARITY_FREE, FEDMUD], ids=lambda case: case.name)
def test_own_data_give_the_model_of_the_simulation_with_the_same_split(
    case: AppCase, split: Path, tmp_path: Path
) -> None:
    small = {**SMALL[case.name], "training-mode": "loop"}
    simulated = run(case, tmp_path / "simulated", [{}] * NODES, **SAME, **small)
    own = run(case, tmp_path / "own", files(split), partition="own", holdout=0.0, standardise="none", **small)
    expected, found = model(simulated), model(own)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[key], found[key]) for key in expected)
    assert federated("mnist-5k", "dirichlet(0.5)", NODES, 0, scaling="unit").sizes == [
        len(np.load(config["data"])["y"]) for config in files(split)
    ]


# Two features of very unlike size, of which the label is a function.
def table(folder: Path, name: str, samples: int, shift: float, seed: int) -> str:
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(50 + shift, 10, samples), rng.normal(1e-3, 1e-4, samples)
    sick = (age - 50) / 10 + (dose - 1e-3) / 1e-4 > 0
    columns = {"age": age, "outcome": np.where(sick, "sick", "well"), "dose": dose}
    pandas.DataFrame(columns).to_csv(path := folder / name, index=False)
    return str(path)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tables")
    return [
        {"data": table(folder, f"{i}.csv", 60 + 40 * i, 3.0 * (i - 1), i), "label": "outcome"}
        for i in range(4)
    ]


TABLES: dict[str, Any] = {"partition": "own", "classes": "well,sick", "model": "logistic"}


@pytest.mark.parametrize("case", [SD_FEEL, SIMILARITY_FREE], ids=lambda case: case.name)
def test_an_app_learns_from_tables_that_only_their_nodes_have(
    case: AppCase, tables: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(case, tmp_path / "runs", tables, **TABLES, **LONGER[case.name])
    rounds = read_rounds(folder)
    first, last = rounds[0]["central"], rounds[-1]["central"]
    assert last["accuracy"] > 0.8 > first["accuracy"] + 0.05
    assert last["auc"] > 0.9
    assert last["worst-accuracy"] == min(last["node-accuracy"])
    assert last["node-ids"] == [0, 1, 2, 3]
    weights = last["node-examples"]
    assert weights == [12, 20, 28, 36]
    assert last["accuracy"] == pytest.approx(np.average(last["node-accuracy"], weights=weights))
    about = read_config(folder)["own-data"]
    assert (about["input-shape"], about["num-classes"]) == ([2], 2)
    everything = np.concatenate([pandas.read_csv(one["data"])["age"] for one in tables])
    assert about["mean"][0] == pytest.approx(everything.mean(), abs=1.5)
    # Whoever trained it uses the model on rows that have no label.
    fresh = pandas.read_csv(table(tmp_path, "new.csv", 200, 0.0, 9))
    fresh.drop(columns="outcome").to_csv(tmp_path / "rows.csv", index=False)
    USE_MODEL(folder, tmp_path / "rows.csv")
    sick = [float(line.split()[1]) > 0.5 for line in capsys.readouterr().out.splitlines()[-200:]]
    assert np.mean(np.where(sick, "sick", "well") == fresh["outcome"]) > 0.8


class Read(dict[str, Any]):
    """A run config that notes which keys are read, in ``noted``."""

    def __init__(self, values: Mapping[str, Any], noted: set[str]) -> None:
        super().__init__(values)
        self.noted = noted

    def __getitem__(self, key: str) -> Any:
        self.noted.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.noted.add(key)
        return super().get(key, default)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Callable[[AppCase], set[str]]:
    """Return the set of keys that an app's server or nodes will have read, other than in rules."""

    def watch(case: AppCase) -> set[str]:
        kind, keys, checking = case.settings.Settings, set[str](), list[bool]()
        fields = {name: name.replace("_", "-") for name in kind.model_fields}
        rules, made = kind.rules, Context.__init__

        def checked(self: Any) -> Any:
            checking.append(True)
            found = list(rules(self))
            checking.pop()
            return found

        def read(self: Any, name: str) -> Any:
            if name in fields and not checking:
                keys.add(fields[name])
            return object.__getattribute__(self, name)

        def context(self: Any, *args: Any, **options: Any) -> None:
            made(self, *args, **options)
            self.run_config = Read(self.run_config, keys)

        monkeypatch.setattr(kind, "rules", checked)
        monkeypatch.setattr(kind, "__getattribute__", read, raising=False)
        monkeypatch.setattr(
            kind, "run_config", property(lambda self: Read(self.model_dump(by_alias=True), keys))
        )
        monkeypatch.setattr(Context, "__init__", context)
        return keys

    return watch


# Read in one kind of run only and yet not refused in the other: the default of ``dataset`` is the app's,
# which `hedgerow new` changes; ``probe-batch`` is held against dealt people; own data
# have ``tdcd`` with another method.
READ_ONCE = {"dataset", "probe-batch", "tdcd"}
NETWORK = {"problem": "network", "codec": "dense64", "model": "logistic"}


@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: case.name)
def test_a_setting_that_is_read_with_one_kind_of_data_alone_says_so(
    case: AppCase,
    tables: list[dict[str, Any]],
    tmp_path: Path,
    noted: Callable[[AppCase], set[str]],
) -> None:
    found, small = noted(case), {**case.small, "model": case.defaults["model"]}
    configs, own = tables, {"num-clients": len(tables), "classes": "well,sick", "model": "logistic"}
    if case is CEPS:
        small |= NETWORK
        own |= NETWORK
    if case is FEDMUD:
        own |= {"model": "mlp", "ratio": 0.9}
    if case is HSGD:
        configs = hsgd_files(tmp_path)
        own = {"num-clients": 4, "num-groups": 2}
    flags = {key: one.own_data for key, one in case.settings.SETTINGS.items()}
    read = []
    for name, changes, nodes in (
        ("dealt", small, None),
        ("own", {**own, "partition": "own"}, configs),
    ):
        (tmp_path / name).mkdir()
        found.clear()
        case.run(tmp_path / name, node_configs=nodes, **changes)
        read.append(found & flags.keys())
    dealt, with_own = read
    said = {flag: {key for key, one in flags.items() if one is flag} for flag in (True, False)}
    # Parties of a dealt HSGD must all be there; the strategy takes the number for both.
    assert dealt & said[True] <= {"min-available-nodes"}
    assert not with_own & said[False]
    assert with_own - dealt <= said[True] | READ_ONCE
    assert dealt - with_own <= said[False] | READ_ONCE


LONGER: dict[str, dict[str, Any]] = {
    "sd_feel": {"num-servers": 2, "iterations": 40, "tau1": 2, "tau2": 2, "learning-rate": 0.5},
    "similarity_free": {"num-rounds": 15, "algorithm": "fedavg", "fixed-c": 2.0},
}


def test_ceps_solves_logistic_regression_on_tables(tables: list[dict[str, Any]], tmp_path: Path) -> None:
    changes = {**TABLES, "problem": "logistic", "codec": "dense64", "sparsity": 2, "iterations": 40}
    rounds = read_rounds(run(CEPS, tmp_path, tables, **changes))
    last = next(record["central"] for record in reversed(rounds) if record["central"])
    assert last["accuracy"] > 0.85
    assert last["auc"] > 0.9
    assert len(last["node-accuracy"]) == 4


def test_a_run_that_goes_on_keeps_the_standardisation(
    tables: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**TABLES, **LONGER["similarity_free"], "num-rounds": 4, "checkpoint-every": 2}
    whole = run(SIMILARITY_FREE, tmp_path / "whole", tables, **changes)
    real = SimilarityFree.configure_train

    def stop(self: SimilarityFree, server_round: int, *rest: Any) -> Any:
        if server_round == 3:
            raise KeyboardInterrupt
        return real(self, server_round, *rest)

    monkeypatch.setattr(SimilarityFree, "configure_train", stop)
    with pytest.raises(KeyboardInterrupt):
        run(SIMILARITY_FREE, tmp_path / "part", tables, **changes)
    monkeypatch.setattr(SimilarityFree, "configure_train", real)
    (part,) = (tmp_path / "part").iterdir()
    # Had it asked again, it would have heard the moments of three nodes.
    silent = [{**tables[0], "share-statistics": False}, *tables[1:]]
    run(SIMILARITY_FREE, tmp_path / "part", silent, **changes, resume=str(part))
    expected, found = model(whole), model(part)
    assert all(np.array_equal(expected[key], found[key]) for key in expected)


def test_a_node_with_bad_data_costs_that_node_alone(
    tables: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("age,outcome,dose\n1,sick,2\n3,,4\n")
    configs = [*tables[:3], {"data": str(bad), "label": "outcome"}]
    quorum = {"min-available-nodes": 3, "min-replies": 3, "num-rounds": 2}
    rounds = read_rounds(run(SIMILARITY_FREE, tmp_path / "runs", configs, **TABLES, **quorum))
    assert rounds[-1]["central"]["node-ids"] == [0, 1, 2]
    assert "row 3, column 'outcome' must be a label, got an empty cell" in caplog.text


def test_what_is_wrong_with_a_file_stays_at_its_node(tmp_path: Path) -> None:
    (tmp_path / "secret-name.csv").write_text("age,label\n12,0\nsecret,1\n")
    # A simulated node tells its user what is wrong; one with a policy is a device to a server.
    (tmp_path / "policy.toml").write_text("")
    own = {"data": str(tmp_path / "secret-name.csv"), "policy": str(tmp_path / "policy.toml")}
    configs = [own] * 2
    with pytest.raises(RosterError) as refused:
        run(SIMILARITY_FREE, tmp_path / "runs", configs, **TABLES)
    assert "secret" not in str(refused.value)


def test_a_node_that_has_data_of_its_own_takes_part_in_no_other_run(split: Path, tmp_path: Path) -> None:
    with pytest.raises(RosterError, match="No node can introduce itself"):
        run(SIMILARITY_FREE, tmp_path, files(split), **SAME)


TOKENS = """
import numpy as np, torch
from hedgerow.tasks import Dataset
class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(40, 6), torch.nn.Linear(6, classes)
    def forward(self, tokens):
        assert not tokens.is_floating_point()
        return self.linear(self.embedding(tokens).mean(dim=1))
def net(shape, classes):
    return Net(classes)
def load(data_dir):
    x = np.random.default_rng(0).integers(0, 40, (240, 5))
    y = (x < 20).sum(axis=1) // 3
    return Dataset("tokens", x[:200], y[:200], x[200:], y[200:], num_classes=2)
"""


@pytest.mark.parametrize("partition", ["iid", "own"])
@pytest.mark.parametrize("case", [SD_FEEL, SIMILARITY_FREE, FEDMUD, CEPS], ids=lambda case: case.name)
def test_ids_reach_the_model_as_they_are(
    case: AppCase, partition: str, tmp_path: Path, write_module: Any
) -> None:
    write_module("own_tokens", TOKENS)
    configs: list[dict[str, Any]] = [{}] * 2
    dealt = {"dataset": "own_tokens:load"}
    if partition == "own":
        dealt = {}
        write_split("own_tokens:load", tmp_path / "files", 2, "iid")
        with np.load(tmp_path / "files" / "node-0.npz") as file:
            assert file["x"].dtype == np.int64
        configs = [
            {"data": str(tmp_path / "files" / f"node-{i}.npz"), "allow-imports": "own_tokens:net"}
            for i in range(2)
        ]
    small = {key: value for key, value in SMALL.get(case.name, {}).items() if key != "num-servers"}
    changes = {**small, **dealt, "model": "own_tokens:net", "partition": partition}
    if case is CEPS:
        changes |= {
            "problem": "network",
            "codec": "dense64",
            "iterations": 4,
            "topology": "complete",
            "sparsity": 1,
        }
    if case is SD_FEEL:
        changes |= {"num-servers": 2}
    if case is FEDMUD:
        changes |= {"skip-back": 0, "ratio": 1.0}
    rounds = read_rounds(run(case, tmp_path / "runs", configs, **changes))
    assert np.isfinite(rounds[-1]["central"]["loss"])


def test_ids_are_refused_with_a_model_of_measurements(tmp_path: Path, write_module: Any) -> None:
    write_module("own_tokens", TOKENS)
    write_split("own_tokens:load", tmp_path / "files", 2, "iid")
    words = "an import path module:function of a model of ids, got 'logistic'"
    configs = [{"data": str(tmp_path / "files" / f"node-{i}.npz")} for i in range(2)]
    with pytest.raises(RosterError, match=words):
        run(SIMILARITY_FREE, tmp_path / "own", configs, partition="own", model="logistic")
    with pytest.raises(ValueError, match=words):
        run(SIMILARITY_FREE, tmp_path / "dealt", [{}] * 2, dataset="own_tokens:load", model="logistic")


def test_ids_are_no_records_of_logistic_regression(
    tmp_path: Path, write_module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_module("own_tokens", TOKENS)
    write_split("own_tokens:load", tmp_path / "files", 2, "iid")
    allowed = {"allow-imports": "own_tokens:net"}
    configs = [{"data": str(tmp_path / "files" / f"node-{i}.npz"), **allowed} for i in range(2)]
    with pytest.raises(RuntimeError, match="No node answered"):
        run(CEPS, tmp_path / "runs", configs, partition="own", problem="logistic", model="own_tokens:net",
            codec="dense64", iterations=2, sparsity=1, topology="complete")  # fmt: skip
    assert "must be floating-point, got integers, which are ids" in caplog.text


MODULE = """
import torch
def net(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, classes))
"""


def test_a_run_names_no_module_on_a_node_that_does_not_allow_it(
    split: Path, tmp_path: Path, write_module: Any
) -> None:
    write_module("own_model", MODULE)
    changes: Mapping[str, Any] = {"partition": "own", "model": "own_model:net", "num-rounds": 1}
    run(SIMILARITY_FREE, tmp_path / "let", files(split, **{"allow-imports": "own_model:net"}), **changes)
    with pytest.raises(TooFewRepliesError):
        run(SIMILARITY_FREE, tmp_path / "not", files(split), **changes)
