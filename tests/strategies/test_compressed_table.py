"""What docs/strategies.md says of Flower's strategies with compressed uplinks is so."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from tests.strategies import compressed_table as runs

pytestmark = pytest.mark.usefixtures("flower_identity")

OPEN = [case for case in runs.CASES if case.refusal("randk(0.1)") is None]


def named(case: runs.Case) -> str:
    return case.name


@pytest.fixture(autouse=True)
def global_generators() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002


def test_the_document_refuses_what_the_code_refuses_for_the_same_reasons() -> None:
    assert runs.documented() == runs.table(runs.documented_rows())


def test_the_document_has_a_number_for_all_that_is_not_refused() -> None:
    for case in OPEN:
        told = runs.documented_rows()[case.name]
        assert set(told) == {"plain", *(c for c in runs.COMPRESSORS if case.refusal(c) is None)}


@pytest.mark.parametrize("case", OPEN, ids=named)
def test_a_strategy_of_flowers_learns_from_one_bit_an_entry(case: runs.Case) -> None:
    strategy = case.compressed("sign")
    loss = runs.loss_after(strategy, 5, runs.compress_reply, *case.mods)
    assert loss < runs.start_loss()
    assert strategy.uplink_bits < strategy.dense_uplink_bits / 20


@pytest.mark.slow
@pytest.mark.parametrize("case", OPEN, ids=named)
def test_the_documents_numbers_are_those_of_the_runs(case: runs.Case) -> None:
    told, found = runs.documented_rows()[case.name], runs.row(case)
    assert told.keys() == found.keys()
    for column, cell in told.items():
        (loss, *words), (found_loss, *found_words) = cell.split(", "), found[column].split(", ")
        assert words == found_words, column
        assert float(loss) == pytest.approx(float(found_loss), abs=0.05), column
