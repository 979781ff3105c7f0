"""A sensing matrix is its seed: any part, chunked or kept, is the same bits, within the memory allowed.

Values are of the specification of Sha et al., sections 2.5 and 8.1; P_Omega is tested here too.
"""

import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hedgerow.wire import sensing
from hedgerow.wire.sensing import GaussianSensing, HadamardSensing, Sensing, shared_sensing
from hedgerow.wire.thresholding import largest, project

TIED = hnp.arrays(
    np.float64, st.integers(1, 30), elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 3.0])
)


def whole(phi):
    return phi.columns(np.arange(phi.n))


def chunked(memory_limit=0):
    return GaussianSensing((3, 1), 700, 301, memory_limit=memory_limit)


@settings(deadline=None)
@given(TIED, st.integers(1, 35), st.sampled_from([0.25, 0.5, 3.0, 64.0]))
def test_the_projection_is_a_stable_sorts_idempotent_and_homogeneous(v, s, alpha):
    kept = np.sort(np.argsort(-np.abs(v), kind="stable")[:s])
    assert np.array_equal(largest(np.abs(v), s), kept)
    expected = np.zeros_like(v)
    expected[kept] = v[kept]
    assert np.array_equal(project(v, s), expected)
    assert np.array_equal(project(expected, s), expected)
    assert np.array_equal(project(alpha * v, s), alpha * expected)


def test_the_projection_keeps_the_largest_and_the_first_of_equals():
    assert project([3, -3, 1, 3, -2], 2).tolist() == [3, -3, 0, 0, 0]
    assert project([0.5, -2, 2, 0, 1], 3).tolist() == [0, -2, 2, 0, 1]
    for v, said in (([np.nan], "NaN"), ([[1.0]], r"shape \(1, 1\)")):
        with pytest.raises(ValueError, match=said):
            project(v, 1)


def test_a_hadamard_transform_is_that_of_its_signs():
    phi = HadamardSensing((4,), 20, 29)
    H = scipy.linalg.hadamard(32)
    full = H @ np.diag(phi._second) @ H @ np.diag(phi._first) / np.sqrt(32)
    assert whole(phi) == pytest.approx(full[phi._rows, :29], abs=1e-6)
    assert len(set(phi._rows)) == 20
    assert set(phi._first) == set(phi._second) == {-1, 1}


@pytest.mark.parametrize("kind", [GaussianSensing, HadamardSensing])
def test_the_entries_are_standard_normal(kind):
    entries = whole(kind((1,), 400, 500)).ravel()
    # A transform has 512 different entries, up to their signs.
    assert entries.mean() == pytest.approx(0, abs=0.01)
    assert entries.std() == pytest.approx(1, abs=0.05 if kind is HadamardSensing else 0.01)
    if kind is HadamardSensing:
        return
    assert np.mean(np.abs(entries) < 1) == pytest.approx(0.6827, abs=0.005)
    # The density is the fraction of nonzeros.
    entries = whole(kind((1,), 400, 500, density=0.3))
    assert np.mean(entries != 0) == pytest.approx(0.3, abs=0.01)
    assert entries[entries != 0].std() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", [GaussianSensing, HadamardSensing])
def test_columns_and_seeds_are_independent(kind):
    phi, other = whole(kind((1, 0), 4000, 60)), whole(kind((1, 1), 4000, 60))
    correlation = np.abs(phi.T @ phi / 4000 - np.eye(60)).max()
    assert max(correlation, np.abs(phi.T @ other / 4000).max()) < 0.1


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 4 * 700 * 93, 4 * 700 * 200, 2**28]))
def test_chunked_products_equal_the_whole_matrix_bit_for_bit(seed, memory_limit):
    rng = np.random.default_rng(seed)
    x, h = rng.standard_normal(301) * (rng.random(301) < 0.1), rng.standard_normal(700)
    picked = rng.choice(301, 17, replace=False)
    part, full = chunked(memory_limit), chunked(2**28)
    assert np.array_equal(part.columns(picked), full.columns(picked))
    for _ in range(2):  # Drawn, then read back.
        assert np.array_equal(part.rmatvec(h), full.rmatvec(h))
    assert np.array_equal(part.matvec(x), full.matvec(x))
    assert np.array_equal(part.columns(picked), full.columns(picked))


@pytest.mark.parametrize(
    "phi", [chunked(), HadamardSensing((3, 1), 700, 301), HadamardSensing((3, 1), 9, 301)]
)
def test_products_are_those_of_the_matrix(phi: Sensing):
    matrix, rng = whole(phi), np.random.default_rng(0)
    x, h = rng.standard_normal(301), rng.standard_normal(phi.d)
    assert phi.matvec(x) == pytest.approx(matrix @ x, rel=1e-12, abs=1e-12)
    assert phi.rmatvec(h) == pytest.approx(matrix.T @ h, abs=1e-3)


def test_products_with_many_columns_are_summed_in_parts_and_a_given_matrix_keeps_its_precision(monkeypatch):
    x, h = np.random.default_rng(0).standard_normal(301), np.arange(20.0)
    product = chunked().matvec(x)
    monkeypatch.setattr(sensing, "_PRODUCT_ENTRIES", 7000)
    assert chunked().matvec(x) == pytest.approx(product, rel=1e-12, abs=1e-12)
    matrix = np.random.default_rng(0).standard_normal((20, 30))
    assert GaussianSensing.of(matrix).rmatvec(h) == pytest.approx(matrix.T @ h, rel=1e-13)
    assert np.array_equal(whole(GaussianSensing.of(matrix)), matrix)


def test_another_process_draws_the_same_matrix():
    script = (
        "import numpy as np; from hedgerow.wire.sensing import GaussianSensing; "
        "print(GaussianSensing((5, 2), 90, 80).columns(np.arange(80)).astype('<f4').tobytes().hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == whole(GaussianSensing((5, 2), 90, 80)).astype("<f4").tobytes().hex()


@pytest.mark.parametrize("limit_mib", [0, 4])
def test_products_of_a_large_matrix_stay_within_the_memory_limit(limit_mib):
    phi = GaussianSensing((1,), 3000, 4000, memory_limit=limit_mib * 2**20)  # 46 MiB as a whole
    h, x = np.ones(3000), np.zeros(4000)
    x[::400] = 1
    tracemalloc.start()
    try:
        phi.matvec(x)
        phi.rmatvec(h)
        phi.rmatvec(h)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (limit_mib + 2) * 2**20


def blocks_drawn(phi, monkeypatch):
    drawn, draw = [], phi._draw
    monkeypatch.setattr(phi, "_draw", lambda block: drawn.append(block) or draw(block))
    return drawn


@pytest.mark.parametrize("memory_limit", [0, 4 * 700 * 200])
def test_what_memory_has_no_room_for_is_drawn_once(memory_limit, monkeypatch, tmp_path):
    monkeypatch.setattr(sensing.tempfile, "tempdir", str(tmp_path))
    phi = chunked(memory_limit)
    drawn = blocks_drawn(phi, monkeypatch)
    for _ in range(3):
        phi.rmatvec(np.ones(700))
        phi.columns(np.arange(301))
    assert sorted(drawn) == list(range(-(-301 // phi._width)))
    assert list(tmp_path.iterdir()) == []  # No process leaves it behind, however it ends.


def test_without_room_for_a_file_it_is_drawn_at_each_use(monkeypatch, tmp_path):
    kept = chunked(2**28).rmatvec(np.ones(700))
    monkeypatch.setattr(sensing.tempfile, "tempdir", str(tmp_path))
    size = 4 * 700 * 301

    def short(file, rows):
        return False

    for what in (
        lambda m: m.setattr(sensing, "_LARGEST_FILE", size - 1),
        lambda m: m.setattr(sensing.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * size - 1)),
        lambda m: m.setattr(sensing.tempfile, "tempdir", str(tmp_path / "nowhere")),
        lambda m: m.setattr(sensing, "_written", short),
    ):
        with monkeypatch.context() as patch:
            what(patch)
            phi = chunked(0)
            drawn = blocks_drawn(phi, patch)
            for _ in range(2):
                assert np.array_equal(phi.rmatvec(np.ones(700)), kept)
            assert sorted(drawn) == sorted([*range(-(-301 // phi._width))] * 2)


def test_one_matrix_that_is_shared_has_a_file(monkeypatch):
    monkeypatch.setattr(sensing, "_shared", type(sensing._shared)())
    for limit in (0, 4 * 700 * 93):
        for seed in range(3):
            shared_sensing((seed, 7), 700, 301, memory_limit=limit).rmatvec(np.ones(700))
            assert sum(phi._file is not None for phi in sensing._shared.values()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_file_that_does_not_take_its_rows_is_none():
    with Path("/dev/full").open("wb", buffering=0) as full:
        assert not sensing._written(full, np.zeros((2, 3), np.float32))


def test_encoding_a_sparse_vector_draws_only_the_blocks_it_touches(monkeypatch):
    phi, x = GaussianSensing((1,), 3000, 4000), np.zeros(4000)
    drawn = blocks_drawn(phi, monkeypatch)
    x[[3, 4, 3999]] = 1
    phi.matvec(x)
    assert drawn == [0, 3999 // (2**16 // 3000)]


def test_shared_matrices_keep_the_limit_together():
    limit = 3 * 4 * 50 * 60
    several = [shared_sensing((9, owner), 50, 60, 1.0, limit) for owner in range(5)]
    kept = [phi for phi in sensing._shared.values()]
    assert sum(phi.nbytes for phi in kept) <= limit
    assert several[4] is shared_sensing((9, 4), 50, 60, 1.0, limit)
    again = shared_sensing((9, 0), 50, 60, 1.0, limit)
    assert again is not several[0]
    assert np.array_equal(whole(again), whole(several[0]))
