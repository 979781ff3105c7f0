"""What a node wrote reaches a log line as one short line without control characters."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hedgerow.wire import PayloadError
from hedgerow.wire.printable import cell, file_name, quoted, shown

HOSTILE = "\x1b[2J\r\nINFO: all is well\u202e\x00\x7f\udc80\u2028"


@pytest.mark.parametrize("show", [shown, quoted])
def test_nothing_that_a_terminal_obeys_is_left(show) -> None:  # type: ignore[no-untyped-def]
    assert show(HOSTILE).isprintable()
    assert show(HOSTILE * 1000).isprintable()


@pytest.mark.parametrize("show", [shown, quoted])
@pytest.mark.parametrize("text", ["x" * 10_000, "\x1b" * 10_000], ids=["letters", "escapes"])
def test_a_long_text_is_cut(show, text: str) -> None:  # type: ignore[no-untyped-def]
    assert len(show(text)) == 101
    assert show(text).endswith("…")
    assert len(show(text, limit=7)) == 8


def test_an_integer_of_too_many_digits_for_python_is_shown() -> None:
    assert quoted(16**9000) == "0x1" + "0" * 97 + "…"


def test_ordinary_text_is_left_as_it_is() -> None:
    assert shown("conv1.weight: größer als 3") == "conv1.weight: größer als 3"
    assert quoted("a'b") == repr("a'b")
    assert quoted(-0.5) == "-0.5"


def test_the_detail_of_a_payload_error_is_printable_and_short() -> None:
    error = PayloadError("unknown key", HOSTILE * 1000)
    assert str(error).isprintable()
    assert len(str(error)) < 400


@given(st.text())
def test_a_name_leads_out_of_no_folder_and_a_cell_is_no_formula(text: str) -> None:
    name = file_name(text)
    assert (Path("/a") / name).resolve().parent == Path("/a")
    assert not cell(text).startswith(("=", "+", "-", "@"))
    assert cell(text).isprintable()
