"""Log lines of Flower as JSON: each line is one object, and nothing of a message is lost."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hedgerow.sim.deploy.log_lines import as_json

# Logs with Flower's own logger.
FLOWER = """
from logging import ERROR, INFO
from flwr.common import log
log(INFO, 'started "here" \\N{SNOWMAN}')
log(ERROR, "first\\nsecond")
"""


def test_the_lines_of_flowers_logger_have_their_levels() -> None:
    program = [sys.executable, "-c", FLOWER]
    written = subprocess.run(program, stderr=subprocess.PIPE, check=True).stderr
    made = subprocess.run(
        [sys.executable, "-m", "hedgerow.sim.deploy.log_lines"],
        input=written, stdout=subprocess.PIPE, check=True,
    ).stdout  # fmt: skip
    told = [json.loads(line) for line in made.splitlines()]
    assert [(line["level"], line["message"]) for line in told] == [
        ("INFO", 'started "here" \N{SNOWMAN}'),
        ("ERROR", "first"),
        (None, "second"),
    ]
    assert all(line["time"].endswith("+00:00") for line in told)


@given(st.lists(st.text()))
def test_any_line_is_one_line_of_json(lines: list[str]) -> None:
    made = list(as_json(lines))
    assert not [line for line in made if "\n" in line]
    assert all(set(json.loads(line)) == {"time", "level", "message"} for line in made)


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        ("INFO:     Shutting down", "INFO", "Shutting down"),
        ("\x1b[93mWARNING 2026-01-01 10:00:00,1\x1b[0m:   a: b", "WARNING", "a: b"),
        ("Traceback (most recent call last):", None, "Traceback (most recent call last):"),
    ],
)
def test_a_level_is_read_where_there_is_one(line: str, level: str | None, message: str) -> None:
    (made,) = map(json.loads, as_json([line]))
    assert (made["level"], made["message"]) == (level, message)
