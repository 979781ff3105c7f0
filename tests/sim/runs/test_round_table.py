"""A run's rounds read as a table on a terminal."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hedgerow.sim.runs.round_table import round_table, run_end


def record(n: int, **central: float) -> dict[str, Any]:
    return {"round": n, "central": central, "bits": n * 1_500_000, "sim_seconds": n / 4}


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_table_shows_the_evaluated_rounds() -> None:
    rounds = [record(0, loss=2.3, accuracy=0.1), record(1), record(2, loss=1.0, accuracy=0.75)]
    table = round_table(rounds, "sd-feel on mnist")
    assert table.startswith("sd-feel on mnist")
    assert rows(table) == [
        ["0", "2.3000", "0.1000", "0.00", "0.000"],
        ["2", "1.0000", "0.7500", "0.50", "3.000"],
    ]


def test_a_table_of_a_method_without_time_and_accuracy_has_no_columns_for_them() -> None:
    rounds = [{**record(n, loss=1.0), "sim_seconds": 0.0, "bits": 20_000_000 * n} for n in (0, 1)]
    assert rows(round_table(rounds, "t")) == [["0", "1.0000", "0.0"], ["1", "1.0000", "20.0"]]


def test_a_number_of_a_list_is_a_column_where_it_is_asked_for() -> None:
    rounds = [{**record(0), "central": {"loss": 1.0, "accuracy": [0.5, 0.25]}}]
    assert rows(round_table(rounds, "t")) == [["0", "1.0000", "0.000"]]
    table = round_table(rounds, "t", metrics=("loss", "accuracy[1]"))
    assert rows(table) == [["0", "1.0000", "0.2500", "0.000"]]


def test_a_table_shows_what_went_through_the_hub() -> None:
    def links(n: int) -> dict[str, dict[str, int]]:
        sizes = {"hub->node": 2_000_000, "node->hub": 500_000, "client->edge": 9_000_000}
        return {
            link: {"messages": n, "nominal_bits": 0, "payload_bytes": n * size}
            for link, size in sizes.items()
        }

    rounds = [{**record(n, loss=1.0), "by_link": links(n)} for n in (0, 1)]
    table = round_table(rounds, "t")
    assert "hub MB" in table
    assert [row[-1] for row in rows(table)] == ["0.000", "2.500"]


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 1000])
@pytest.mark.parametrize("most", [2, 3, 20])
def test_a_long_table_is_thinned_evenly_and_keeps_its_ends(count: int, most: int) -> None:
    shown = [int(row[0]) for row in rows(round_table([record(n, loss=1.0) for n in range(count)], "t", most))]
    assert len(shown) == min(count, most)
    assert (shown[0], shown[-1]) == (0, count - 1)
    gaps = [b - a for a, b in pairwise(shown)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_end_says_what_was_lost_where_the_folder_is_and_how_to_go_on(tmp_path: Path) -> None:
    rounds = [{**record(n, loss=1.0), "sent": 5, "accepted": 3, "rejected": {"no reply": 2}} for n in (1, 2)]
    said = run_end(rounds, tmp_path / "a run").splitlines()
    assert said[:3] == [
        "Accepted 6 of 10 replies. Lost: 4 x no reply.",
        f"Run folder: {tmp_path / 'a run'}",
        "Next:",
    ]
    assert [line.split()[:2] for line in said[3:]] == [
        ["hedgerow", one] for one in ("report", "watch", "plot")
    ]
    assert f"hedgerow plot '{tmp_path / 'a run'}' --y loss" in said[5]


def test_a_title_wider_than_the_table_stays_on_one_line() -> None:
    title = "fedmud+bkd+aad on mnist-5k, ratio 0.03125, catchup, " + "x" * 40
    assert round_table([], title).splitlines()[0] == title
