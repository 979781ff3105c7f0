"""A trained model in a file gives what it gives here, on samples scaled as the file beside it says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower_apps.cases import CASES, AppCase
from tests.sim.cli.command_line import hedgerow
from tests.sim.runs.test_trained import trained

from hedgerow.sim import load_model
from hedgerow.sim.cli.shipping import shipped, write_onnx, write_torchscript
from hedgerow.tasks import Dataset, load, preprocessing

CLASSIFIERS = [case for case in CASES if case.name in ("sd_feel", "similarity_free", "fedmud")]


def run_onnx(file: Path, x: np.ndarray) -> np.ndarray:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    onnx.checker.check_model(str(file))
    (y,) = ReferenceEvaluator(str(file)).run(None, {"x": x})
    return np.asarray(y)


@pytest.fixture(scope="module", params=CLASSIFIERS, ids=lambda case: case.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case: AppCase = request.param
    return trained(case, tmp_path_factory.mktemp("runs"))


def settings(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "config.json").read_text())["run"]
    return found


def dealt(run: Path) -> Dataset:
    return load(settings(run)["dataset"], scaling=settings(run).get("scaling", "standard"))


def test_a_model_in_either_format_answers_as_the_module_does(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    files = tmp_path / "m.onnx", tmp_path / "m.pt"
    told = hedgerow("export", run, "--onnx", files[0], "--torchscript", files[1])
    assert told.exit_code == 0, told.output
    module = load_model(run)
    data = dealt(run)
    # Other numbers of samples than the two that the files were made with.
    for number in (1, 5):
        x = torch.from_numpy(data.x_test[:number])
        with torch.inference_mode():
            wanted = module(x).numpy()
            scripted = torch.jit.load(str(files[1]))(x).numpy()
        assert np.array_equal(scripted, wanted)
        assert run_onnx(files[0], x.numpy()) == pytest.approx(wanted, abs=1e-4)


def test_the_file_beside_a_model_has_the_constants_of_its_data(run: Path, tmp_path: Path) -> None:
    beside = json.loads(write_torchscript(shipped(run), tmp_path / "m.pt").read_text())
    used = settings(run)
    mean, std = preprocessing(used["dataset"], scaling=used.get("scaling", "standard")) or ([], [])
    assert beside["preprocessing"] == {"mean": mean, "std": std}
    assert beside["input"]["shape"] == ["N", *dealt(run).input_shape]
    assert beside["output"]["shape"] == ["N", 10]


class Branching(torch.nn.Module):
    """Cannot be exported: its answer depends on a file-like object of Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 1e9:
            return x
        raise KeyError(iter([x]).__class__.__name__) if torch.jit.is_tracing() else StopIteration


def test_a_model_that_cannot_be_traced_is_one_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    from hedgerow.sim.cli.shipping import Shipped

    old = tmp_path / "m.pt"
    old.write_bytes(b"old")
    with pytest.raises(ValueError, match="Branching cannot be written as TorchScript: KeyError"):
        write_torchscript(Shipped(Branching(), torch.zeros(2, 3), {}), old)
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt"]
    assert old.read_bytes() == b"old"


def test_without_the_extra_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    from hedgerow.sim.cli.shipping import Shipped

    with pytest.raises(ImportError, match=r"pip install 'hedgerow\[onnx\]'"):
        write_onnx(Shipped(torch.nn.Linear(3, 2), torch.zeros(2, 3), {}), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--torchscript m.pt --input-shape 0,2", "integers >= 1"),
        ("--torchscript m.pt --input-shape 7", "must be that of a sample that the model takes, got"),
    ],
)
def test_a_wrong_shape_is_one_error(options: str, why: str, run: Path, tmp_path: Path) -> None:
    told = hedgerow("export", run, *options.replace("m.pt", str(tmp_path / "m.pt")).split())
    assert told.exit_code == 2
    assert why in " ".join(told.output.split())
    assert not list(tmp_path.iterdir())


def test_a_model_of_own_data_has_the_constants_of_its_nodes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for node in range(2):
        values = rng.normal((50, 3), (9, 2), (40, 2))
        rows = [
            "age,dose,outcome",
            *(f"{age:.2f},{dose:.2f},{i % 2}" for i, (age, dose) in enumerate(values)),
        ]
        (tmp_path / f"{node}.csv").write_text("\n".join(rows) + "\n")
    config = 'partition=own num-clients=2 classes="0,1" model=logistic num-rounds=1 compressor=identity'
    done = hedgerow(
        "run", "similarity-free", "-c", f"{config} output-dir='{tmp_path / 'runs'}'",
        "--node-config", f"data='{tmp_path}/{{partition-id}}.csv' label=outcome",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    beside = json.loads(write_torchscript(shipped(folder), tmp_path / "m.pt").read_text())
    own = json.loads((folder / "config.json").read_text())["own-data"]
    assert beside["preprocessing"] == {"mean": own["mean"], "std": own["std"]}
    assert beside["preprocessing"]["mean"][0] == pytest.approx(50, abs=5)
    assert beside["input"] == {"name": "x", "shape": ["N", 2], "dtype": "float32"}
    assert beside["classes"] == "0,1"
    assert torch.jit.load(str(tmp_path / "m.pt"))(torch.zeros(3, 2)).shape == (3, 2)


@pytest.mark.parametrize("case", [case for case in CASES if case.name == "hsgd"], ids=["hsgd"])
def test_a_shape_that_does_not_follow_from_a_run_is_asked_for(case: AppCase, tmp_path: Path) -> None:
    told = hedgerow("export", trained(case, tmp_path / "runs"), "--torchscript", tmp_path / "m.pt")
    assert told.exit_code == 2
    assert "--input-shape must be given" in told.output


def test_a_model_is_of_one_run(tmp_path: Path) -> None:
    told = hedgerow("export", tmp_path, "--onnx", tmp_path / "m.onnx")
    assert told.exit_code == 2
    assert "the folder of one run" in told.output
