"""Data sets as files of nodes: what was dealt is read back, to the bit, by who owns it."""

from pathlib import Path

import numpy as np
import pytest

from hedgerow.tasks import OwnSource, federated, load_vertical, read_own, write_groups, write_split
from hedgerow.tasks.files import FileColumns, read_file


def test_a_split_is_the_partition_of_the_simulation(tmp_path: Path) -> None:
    manifest = write_split("mnist-5k", tmp_path / "split", 3, "dirichlet(0.3)", seed=4)
    data = federated("mnist-5k", "dirichlet(0.3)", 3, 4)
    for i, part in enumerate(data.parts):
        own = read_own(OwnSource.of({"data": str(tmp_path / "split" / f"node-{i}.npz")}))
        assert np.array_equal(own.x, data.dataset.x_train[part])
        assert np.array_equal(own.y, data.dataset.y_train[part])
        assert own.num_classes == 10
    assert '"num-nodes": 3' in manifest.read_text()
    assert (tmp_path / "split" / "node-0.npz").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="exists already"):
        write_split("mnist-5k", tmp_path / "split", 3, "iid")


def test_files_of_a_split_hold_the_same_bits_and_are_their_owners_alone(tmp_path: Path) -> None:
    data = load_vertical("breast-cancer")
    rows = [np.array([3, 1]), np.array([8, 9, 7])]
    configs = write_groups(data, rows, tmp_path, "devices")
    assert [config["role"] for config in configs] == ["hospital"] * 2 + ["device"] * 5
    for m in range(2):
        hospital = read_file(Path(str(configs[m]["data"])), FileColumns(id="id"))
        assert np.array_equal(hospital.x, data.hospital_train[rows[m]])
        assert hospital.ids == tuple(data.ids_train[rows[m]])
        assert hospital.labels is not None
        number = [data.classes.index(name) for name in hospital.labels.first]
        assert np.array_equal(hospital.labels.numbers(number), data.y_train[rows[m]])
    device = read_file(Path(str(configs[4]["data"])), FileColumns(id="id", labelled=False))
    assert np.array_equal(device.x, data.device_train[[8]])
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(ValueError, match="exists already"):
        write_groups(data, rows, tmp_path, "devices")
