"""What a node wrote reaches a log line as one short line without control characters."""

import ast
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hedgerow.wire import PayloadError
from hedgerow.wire.printable import cell, file_name, quoted, shown, traced

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


@pytest.mark.parametrize(
    "text", [HOSTILE, HOSTILE * 1000, "a\n" * 1000 + "\x1b"], ids=["short", "long", "lines"]
)
def test_a_traceback_has_lines_and_nothing_else_that_a_terminal_obeys(text: str) -> None:
    try:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(text) from error
    except ValueError as error:
        lines = traced(error).split("\n")
    assert all(line.isprintable() and len(line) <= 1001 for line in lines)
    assert len(lines) <= 300
    assert any("\\x1b" in line for line in lines)


def test_no_traceback_is_logged_as_python_has_it() -> None:
    """What an error says may come from a node or a server; ``traced`` alone makes it printable."""
    rooms = [Path(__file__).parents[2] / room for room in ("clients", "sim", "strategies", "tasks", "wire")]
    for file in (file for room in rooms for file in room.rglob("*.py") if file.name != "printable.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = {getattr(node, "attr", ""), getattr(node, "arg", "")} | {getattr(node, "id", "")}
            assert not names & {"exc_info", "format_exc", "print_exc", "format_exception"}, file


@given(st.text(), st.text())
@example("a/b", "a_b")
@example("a/b", file_name("a/b"))
@example("x" * 300, "x" * 301)
@example(".a", "_.a")
@example("", "_")
def test_different_texts_have_different_names(one: str, other: str) -> None:
    assert (file_name(one) == file_name(other)) == (one == other)
    assert len(file_name(one).encode()) <= 255


@given(st.text())
def test_a_name_leads_out_of_no_folder_and_a_cell_is_no_formula(text: str) -> None:
    name = file_name(text)
    assert (Path("/a") / name).resolve().parent == Path("/a")
    assert not cell(text).startswith(("=", "+", "-", "@"))
    assert cell(text).isprintable()
