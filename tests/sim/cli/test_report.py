"""``hedgerow report``: where the page goes, and the graphs that settings say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import RecordedRun
from hedgerow.sim.runs.hooks import drawn_network

WriteRun = Callable[..., Path]


def test_a_report_is_one_file_where_it_is_told(made: Path, tmp_path: Path) -> None:
    result = hedgerow("report", made, "-o", tmp_path / "new" / "page.html", "--target", "loss=1")
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(tmp_path / "new" / "page.html")]
    page = (tmp_path / "new" / "page.html").read_text()
    assert "sim-seconds to loss &lt;= 1" in page


def test_the_page_of_one_run_goes_into_its_folder_and_of_several_here(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = (write_run(f"runs/{name}", [2.0, 1.0], seed=seed) for seed, name in enumerate("ab"))
    for folder in (one, other):
        assert hedgerow("report", folder).stdout.split() == [str(folder / "report.html")]
    assert not (tmp_path / "report.html").exists()
    assert hedgerow("report", "runs").stdout.split() == [str(tmp_path / "report.html")]
    (tmp_path / "report.html").unlink()
    assert hedgerow("report").stdout.split() == [str(tmp_path / "report.html")]


def run(link: str, **settings: Any) -> RecordedRun:
    links = {link: {"messages": 1, "nominal_bits": 1, "payload_bytes": 1}}
    app = "sd_feel" if link == "edge->edge" else "ceps"
    config = {"app": app, "run": {"seed": 0, **settings}}
    return RecordedRun(Path(), "a", 0, json.loads(json.dumps(config)), [{"round": 1, "by_link": links}], True)


def test_edge_servers_are_drawn_as_their_topology_says_with_their_clients() -> None:
    settings = {"topology": "ring", "num-servers": 4, "num-clients": 10, "clusters": "contiguous"}
    network = drawn_network(run("edge->edge", **settings))
    assert network is not None
    assert list(network.edges) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert (network.kind, network.leaf, list(network.leaves)) == ("edge", "client", [3, 2, 3, 2])
    grouped = drawn_network(run("edge->edge", **{**settings, "clusters": "group"}))
    assert grouped is not None
    assert not grouped.leaves


def test_nodes_are_drawn_as_their_topology_says() -> None:
    network = drawn_network(run("node->node", **{"topology": "star", "num-clients": 3}))
    assert network is not None
    assert list(network.edges) == [(0, 1), (0, 2)]
    assert not network.directed


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"topology": "no-such", "num-servers": 2, "num-clients": 2},
        {"topology": "complete", "num-servers": 10**9, "num-clients": 10**9},
    ],
)
def test_what_is_no_graph_is_not_drawn(settings: dict[str, Any]) -> None:
    assert drawn_network(run("edge->edge", **settings)) is None
