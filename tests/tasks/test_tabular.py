from pathlib import Path

from hedgerow.tasks.tabular import read_breast_cancer


def test_breast_cancer_needs_no_files():
    table = read_breast_cancer(Path("nowhere"))
    assert table.hospital.shape == table.device.shape == (569, 15)
    assert not set(table.hospital_features) & set(table.device_features)
    assert table.classes == ("malignant", "benign")
