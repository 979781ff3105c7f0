"""A reader changes nothing in silence: row numbers, ids, large numbers, and what it says that it read."""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.tasks import OwnData, OwnSource, Standardisation, in_training, moments, parse_classes, read_own
from hedgerow.tasks.files import FileColumns, FileData, _check_counters, _numbers, read_file

pandas = pytest.importorskip("pandas")

ROWS = 40
RNG = np.random.default_rng(0)
TABLE = {"dose": RNG.normal(size=ROWS), "age": RNG.integers(20, 80, ROWS), "label": np.arange(ROWS) % 2}


def own(path: Path, **config: str) -> OwnData:
    return read_own(OwnSource.of({"data": str(path), **config}), parse_classes("2"))


def written(folder: Path, form: str, table: Any, index: bool = False) -> Path:
    frame, path = pandas.DataFrame(table), folder / f"t.{form}"
    if form == "csv":
        frame.to_csv(path, index=index)
    elif form == "parquet":
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    else:
        pytest.importorskip("datasets").Dataset.from_pandas(frame).save_to_disk(str(path))
    return path


FORMS = pytest.mark.parametrize("form", ["csv", "parquet", "saved"])
NUMBERS = np.arange(100, 100 + 2 * ROWS, 2)  # every other row of a larger table


# Row numbers.


@FORMS
@pytest.mark.parametrize(
    "name",
    [
        "",
        "Unnamed: 0",
        "Unnamed: 17",
        "Unnamed: 0.1.1",
        "__index_level_0__",
        "rownames",
        "row.names",
        "row_names",
    ],
)
def test_an_index_is_never_a_feature_unless_it_is_named(tmp_path: Path, form: str, name: str) -> None:
    path = written(tmp_path, form, {name: NUMBERS, **TABLE})
    data = own(path)
    assert data.features == ("dose", "age")
    assert data.reading is not None
    assert data.reading.skipped == ((name, "an index of the rows"),)
    if name:
        assert own(path, features=f"{name},dose").features == (name, "dose")
    # Sites with the column and without it have the same features.
    assert data.dtype == own(written(tmp_path, form, TABLE)).dtype if form != "saved" else True


@FORMS
@pytest.mark.parametrize("name", ["", "Unnamed: 3", "rownames"])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("kind", ["whole", "fractions", "texts", "empty"])
def test_a_column_without_a_name_is_left_out_only_as_an_index(
    tmp_path: Path, form: str, name: str, place: int, kind: str
) -> None:
    cells: Any = {
        "whole": NUMBERS,
        "fractions": NUMBERS + 0.5,
        "texts": [f"p{number}" for number in NUMBERS],
        "empty": [""] * ROWS,
    }[kind]
    columns = list(TABLE.items())
    path = written(tmp_path, form, dict([*columns[:place], (name, cells), *columns[place:]]))
    if kind == "empty" or (place == 0 and kind != "fractions"):
        assert own(path).features == ("dose", "age")
    else:
        with pytest.raises(ValueError, match=rf"column {name!r} must be an index of the rows"):
            own(path)
    assert own(path, features="dose").features == ("dose",)
    if kind == "fractions":
        assert own(path, label="label", features="dose," + name).x.shape == (ROWS, 2 if name else 1)


def test_the_index_that_pandas_declares_is_never_a_feature(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    visits = [*NUMBERS[1:], NUMBERS[0]]  # pandas stores no column of a range
    frame = pandas.DataFrame({"visit": visits, **TABLE}).set_index("visit")
    frame.to_parquet(tmp_path / "t.parquet")
    assert own(tmp_path / "t.parquet").features == ("dose", "age")
    # It may be the ids.
    half = read_file(tmp_path / "t.parquet", FileColumns(id="visit"))
    assert (half.ids[:2], half.features) == (("102", "104"), ("dose", "age"))


@FORMS
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_column_that_counts_the_rows_is_refused_unless_it_is_named(
    tmp_path: Path, form: str, first: int, shuffled: bool
) -> None:
    counted = np.arange(first, first + ROWS)
    path = written(
        tmp_path,
        form,
        {
            "dose": TABLE["dose"],
            "case": RNG.permutation(counted) if shuffled else counted,
            "label": TABLE["label"],
        },
    )
    with pytest.raises(
        ValueError, match=rf"column 'case' must not be a feature.*{first} to {ROWS - 1 + first}"
    ):
        own(path)
    with pytest.raises(ValueError, match="column 'case' must not be a feature"):
        read_file(path, FileColumns(id=None, labelled=False))
    assert own(path, features="dose,case").features == ("dose", "case")
    assert own(path, features="dose").features == ("dose",)


@given(st.lists(st.integers(-3, 60), min_size=10, max_size=60, unique=True))
def test_only_a_permutation_of_row_numbers_is_refused(numbers: list[int]) -> None:
    counts = sorted(numbers) in ([*range(len(numbers))], [*range(1, len(numbers) + 1)])
    assert refused(numbers) == counts
    assert refused([number + 0.5 for number in numbers]) is False
    assert refused([*numbers[:-1], numbers[0]]) is False


@given(st.integers(10, 60), st.sampled_from([0, 1]), st.randoms(use_true_random=False))
def test_every_order_of_the_row_numbers_is_refused(rows: int, first: int, random: Any) -> None:
    numbers = [*range(first, first + rows)]
    random.shuffle(numbers)
    assert refused(numbers)


def refused(numbers: list[Any]) -> bool:
    try:
        _check_counters(np.array(numbers, np.float64)[:, None], ["n"])
    except ValueError:
        return True
    return False


def test_few_rows_are_no_count(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text("dose,label\n1,0\n2,1\n3,0\n4,1\n")
    assert own(tmp_path / "few.csv").features == ("dose",)


def test_a_column_that_rises_by_a_step_is_pointed_out(tmp_path: Path) -> None:
    data = own(written(tmp_path, "csv", {"row": NUMBERS, **TABLE}))
    assert data.reading is not None
    assert "column 'row' changes by 2 from row to row" in str(data.reading)


# What was read is said.


def test_one_line_says_what_was_read(tmp_path: Path) -> None:
    path = written(tmp_path, "csv", {"Unnamed: 0": NUMBERS, **TABLE, "note": "x"})
    data = own(path, features="age,dose")
    reading = data.reading
    assert reading is not None
    assert (reading.rows, reading.dtype, reading.features) == (
        40,
        "float32",
        (("age", "int64"), ("dose", "float64")),
    )
    assert reading.classes == (("0", 20), ("1", 20))
    assert reading.skipped == (("Unnamed: 0", "an index of the rows"), ("note", "not in the key features"))
    assert str(reading) == (
        f"Read {path}: 40 rows as float32; 2 features: 'age' (int64), 'dose' (float64); 2 classes: '0' (20), "
        "'1' (20); skipped 'Unnamed: 0' (an index of the rows), 'note' (not in the key features)"
    )


def test_a_line_about_many_columns_is_short(tmp_path: Path) -> None:
    wide = {f"c{i}": RNG.normal(size=5) for i in range(500)}
    reading = own(written(tmp_path, "csv", {**wide, "label": [0, 1, 0, 1, 0]})).reading
    assert reading is not None
    assert len(reading.features) == 500
    assert "480 more" in str(reading)
    assert len(str(reading)) < 1000


# Integers are ids.


@pytest.mark.parametrize("kind", ["uint8", "int16", "int32", "int64", "uint32"])
def test_integers_of_an_array_stay_integers(tmp_path: Path, kind: str) -> None:
    tokens = RNG.integers(0, 200, (6, 7)).astype(kind)
    np.savez(tmp_path / "ids.npz", x=tokens, y=np.arange(6) % 2)
    data = own(tmp_path / "ids.npz")
    assert (data.x.dtype, data.dtype, data.is_integer) == (np.int64, "int64", True)
    assert np.array_equal(data.x, tokens)
    assert in_training(data.x) is data.x


def test_large_ids_keep_every_bit(tmp_path: Path) -> None:
    tokens = np.array([[2**24 + 1, 2**53 + 1], [0, 2**62 + 1]])
    np.savez(tmp_path / "ids.npz", x=tokens, y=[0, 1])
    assert np.array_equal(own(tmp_path / "ids.npz").x, tokens)
    np.savez(tmp_path / "ids.npz", x=tokens.astype(np.uint64) + 2**63, y=[0, 1])
    with pytest.raises(ValueError, match="x must be integers of int64, got"):
        own(tmp_path / "ids.npz")


def test_a_saved_column_of_token_lists_stays_integers(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[5, 7, 2], [1, 2**25 + 1, 0]], "label": [0, 1]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    data = own(tmp_path / "saved")
    assert (data.x.dtype, data.x.tolist()) == (np.int64, rows["input_ids"])


def test_integers_of_a_table_and_of_images_are_measurements(tmp_path: Path) -> None:
    data = own(written(tmp_path, "csv", {"age": TABLE["age"], "label": TABLE["label"]}))
    assert (data.x.dtype, data.dtype[:7]) == (np.float32, "float32")
    np.savez(
        tmp_path / "pixels.npz", x=RNG.integers(0, 256, (6, 3, 8, 8)).astype(np.uint8), y=np.arange(6) % 2
    )
    pixels = own(tmp_path / "pixels.npz")
    assert (pixels.x.dtype, pixels.dtype) == (np.float32, "float32")
    assert pixels.reading is not None
    assert pixels.reading.features == (("x", "uint8 3×8×8"),)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_with_the_channels_last_are_refused(tmp_path: Path, channels: int) -> None:
    x = RNG.normal(size=(6, 28, 20, channels)).astype(np.float32)
    np.savez(tmp_path / "images.npz", x=x, y=np.arange(6) % 2)
    with pytest.raises(ValueError, match=r"must be images \(N, C, H, W\).*x.transpose\(0, 3, 1, 2\)"):
        own(tmp_path / "images.npz")
    np.savez(tmp_path / "images.npz", x=x.transpose(0, 3, 1, 2), y=np.arange(6) % 2)
    assert own(tmp_path / "images.npz").input_shape == (channels, 28, 20)


# Large numbers.


@FORMS
@pytest.mark.parametrize(
    ("mean", "deviation"), [(1.7e9, 700.0), (1.7e12, 7e5), (1.7e18, 1e9), (2459000.5, 0.01), (-1e6, 1e-3)]
)
def test_a_small_spread_beside_a_large_mean_is_kept(
    tmp_path: Path, form: str, mean: float, deviation: float
) -> None:
    column = np.round(RNG.normal(mean, deviation, ROWS), 6)
    data = own(written(tmp_path, form, {"t": column, **TABLE}))
    found = moments(data.x)
    std = np.sqrt(found.squares / found.count)
    assert std[0] == pytest.approx(column.std(), rel=1e-6)
    x = Standardisation(tuple(found.mean), tuple(std)).apply(data.x)
    assert x.dtype == np.float32
    assert x[:, 0] == pytest.approx((column - column.mean()) / column.std(), abs=1e-5)


@pytest.mark.parametrize("form", ["npz", "csv"])
@settings(deadline=None, max_examples=30)
@given(st.integers(-320, -30), st.integers(0, 2**32))
def test_small_numbers_keep_their_differences(
    tmp_path_factory: pytest.TempPathFactory, form: str, exponent: int, seed: int
) -> None:
    # float32 ends at 1e-45.
    values = np.random.default_rng(seed).integers(1, 1000, ROWS) * float(f"1e{exponent}")
    path = tmp_path_factory.mktemp("small") / f"t.{form}"
    if form == "npz":
        np.savez(path, x=values[:, None], y=TABLE["label"])
    else:
        pandas.DataFrame({"dose": values, "label": TABLE["label"]}).to_csv(path, index=False)
    x = own(path).x[:, 0].astype(np.float64)
    assert abs(x - values).max() <= 1e-3 * values.std()


@given(st.from_regex(r"[+-]?[0-9٠-٩_]{1,6}(\.[0-9_]{0,3})?(e[0-9_]{1,2})?", fullmatch=True))
def test_a_number_is_read_as_other_programs_read_it(text: str) -> None:
    try:
        expected = float(text) if re.fullmatch(r"[0-9.e+-]*", text) else np.nan
    except ValueError:
        expected = np.nan
    for cells in ([text], [text, "1"], [text, "true"]):
        found = _numbers(cells)[0]
        assert found == expected or (np.isnan(found) and np.isnan(expected))


def test_what_float32_would_destroy_is_not_trained_on_unscaled(tmp_path: Path) -> None:
    data = own(written(tmp_path, "csv", {"t": np.round(RNG.normal(1.7e9, 700, ROWS)), **TABLE}))
    with pytest.raises(ValueError, match=r"standardise must be .*round away the differences of 't'"):
        in_training(data.x, data.features)
    harmless = own(written(tmp_path, "csv", {"t": RNG.normal(1e5, 700, ROWS), **TABLE}))
    assert in_training(harmless.x, harmless.features).dtype == np.float32


@given(st.floats(-1e12, 1e12), st.floats(1e-3, 1e3), st.integers(2, 200))
def test_moments_are_those_of_the_exact_values(mean: float, spread: float, rows: int) -> None:
    x = mean + spread * np.random.default_rng(rows).normal(size=(rows, 1))
    exact = [Fraction(value) for value in x[:, 0].tolist()]
    middle = sum(exact) / rows
    found = moments(x)
    assert found.mean[0] == pytest.approx(float(middle), rel=1e-15)
    squares = float(sum((value - middle) ** 2 for value in exact))
    assert found.squares[0] == pytest.approx(squares, rel=1e-6, abs=1e-9)


def test_what_a_file_holds_is_the_same_in_every_form(tmp_path: Path) -> None:
    table = {"": NUMBERS, **TABLE}
    found: list[FileData] = [
        read_file(written(tmp_path, form, table), FileColumns()) for form in ("csv", "parquet", "saved")
    ]
    assert len({one.features for one in found}) == len({one.skipped for one in found}) == 1
    assert all(np.array_equal(one.x, found[0].x) for one in found)
