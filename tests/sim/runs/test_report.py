"""A report holds what the runs hold, on one page that needs nothing, and nothing of them is markup."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import FancyArrowPatch

from hedgerow.sim import DrawnNetwork, load
from hedgerow.sim.runs.diagram import Crossed, Drawing, draw_links, draw_network
from hedgerow.sim.runs.report import report_html, write_report

WriteRun = Callable[..., Path]
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>]]>--> $\\frac{$ \x1b[2J\x00\u202e"
LINKS = {
    "client->edge": {"messages": 10, "nominal_bits": 8000, "payload_bytes": 12_345},
    "edge->client": {"messages": 12, "nominal_bits": 9000, "payload_bytes": 2_000_000},
    "edge->edge": {"messages": 6, "nominal_bits": 4800, "payload_bytes": 600},
}
# What stands alone in HTML.
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """The page's elements and its text; every element that is opened must be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def with_last(folder: Path, **changes: Any) -> Path:
    """Return a run folder whose last record says more."""
    file = folder / "rounds.jsonl"
    *first, last = file.read_text().splitlines()
    file.write_text("\n".join([*first, json.dumps({**json.loads(last), **changes})]) + "\n")
    return folder


@pytest.fixture
def sweep(write_sweep: WriteRun) -> Path:
    made = write_sweep({"A": {0: [2.0, 1.0], 1: [2.0, 1.2]}, "B": {0: [2.0, 0.8], 1: [2.0, 1.0]}})
    for n, folder in enumerate(sorted(made.glob("A/*"))):
        lost = {"timeout": 1 + n}
        with_last(folder, by_link=LINKS, rejected=lost, sent=10, accepted=9 - n)
    return made


def test_a_report_has_what_was_run_curves_tables_links_losses_and_settings(sweep: Path) -> None:
    page = Page(report_html(load([sweep]), targets={"loss": 1.0}))
    for words in (
        "Made up",
        "Realism: numbers by hand.",
        "loss over simulated time",
        "2 seeds: mean, band: minimum to maximum.",
        "loss at sim-seconds = 0.5",
        "1.1 ± 0.14",
        "sim-seconds to loss <= 1",
        "client->edge",
        "12.3 kB",
        "2 MB",
        "15.00% of 20",
        'A "A"',
    ):
        assert words in page.text, words


def of_app(run: Path, app: str, **environment: str) -> Path:
    file = run / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "app": app, "environment": environment}))
    return run


def test_a_report_starts_with_date_command_what_is_not_the_default_and_where_the_run_ended(
    write_run: WriteRun,
) -> None:
    run = write_run("a", [2.0, 1.0], **{"tau1": 3, "tau2": 2, "topology": "ring", "output-dir": "x"})
    of_app(run, "sd_feel", time="2026-01-02T03:04:05+00:00", command="hedgerow run sd-feel -c tau1=3")
    page = Page(report_html(load([run])))
    start = page.text[page.text.index("Started") : page.text.index("Realism")]
    assert start.startswith(
        "Started 2026-01-02 03:04:05 UTC Command hedgerow run sd-feel -c tau1=3 "
        "Not the defaults tau1 = 3 Where "
    )
    assert "made-up" not in start
    assert start.split("finished ")[1].split()[:5] == ["sd_feel", "1", "1", "1", "0.75"]
    # A single run is compared with none.
    assert "Comparison" not in page.text
    assert "tau1 = 3" in Page(report_html(load([run]), targets={"loss": 1.0})).text
    assert "rounds to loss <= 1" in Page(report_html(load([run]), targets={"loss": 1.0})).text


def test_several_runs_show_the_span_of_their_dates_and_what_all_changed(write_run: WriteRun) -> None:
    for n in range(6):
        run = write_run(f"{n}", [2.0], tau1=3, tau2=10 + n)
        of_app(run, "sd_feel", time=f"2026-01-0{n + 1}T00:00:00+00:00", command=f"hedgerow run x {n}")
    text = Page(report_html(load([run.parent]))).text
    assert "Started 2026-01-01 00:00:00 to 2026-01-06 00:00:00 UTC Command hedgerow run x 0 " in text
    assert "hedgerow run x 3 and 2 more Not the defaults tau1 = 3 Where" in text


def test_where_an_apps_defaults_are_not_known_the_report_says_so(write_run: WriteRun) -> None:
    assert (
        "Not the defaults the defaults of an app are not known"
        in Page(report_html(load([write_run("a", [2.0])]))).text
    )


def test_a_cost_that_only_some_runs_recorded_is_in_no_column(sweep: Path) -> None:
    first = sorted(sweep.glob("*/*"))[0]
    with_last(first, wall_seconds=3.0, train={"gradients": 5.0})
    page = Page(report_html(load([sweep])))
    assert "serialised traffic" in page.text
    assert "gradients per node" not in page.text


def test_a_page_needs_nothing_else_and_runs_nothing(sweep: Path) -> None:
    text = report_html(load([sweep]))
    page = Page(text)
    assert not page.all("script", "link", "img", "iframe", "object", "form")
    assert "default-src 'none'" in text
    outward = [value for _, found in page.elements for value in found.values() if value and "//" in value]
    assert outward == []
    assert not [key for _, found in page.elements for key in found if key.startswith("on")]
    assert "@import" not in text


def test_a_page_is_read_by_those_who_do_not_see_it(sweep: Path) -> None:
    text = report_html(load([sweep]))
    page = Page(text)
    assert page.all("html") == [{"lang": "en"}]
    heads = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert heads[0] == 1
    assert heads.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(heads))
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    pictures = page.all("svg")
    assert len(pictures) >= 2
    for picture in pictures:
        assert picture["role"] == "img"
        assert set((picture["aria-labelledby"] or "").split()) <= set(ids)
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(found.get("scope") in ("col", "row") for found in page.all("th"))
    inner = [found["href"][1:] for found in page.all("a", "use") if (found["href"] or "").startswith("#")]
    assert inner
    assert set(inner) <= set(ids)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_texts_stand_out_in_light_dark_and_print(sweep: Path) -> None:
    schemes = re.findall(r":root \{([^}]*)\}", report_html(load([sweep])))
    assert len(schemes) == 3
    for scheme in schemes:
        colour = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        for ink in ("ink", "muted", "accent", "bad", "good"):
            for ground in ("paper", "panel"):
                light, dark = sorted((luminance(colour[ink]), luminance(colour[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)


def test_the_same_runs_give_the_same_page(sweep: Path, tmp_path: Path) -> None:
    first = write_report(load([sweep]), tmp_path / "one.html").read_bytes()
    assert write_report(load([sweep]), tmp_path / "there" / "two.html").read_bytes() == first


def test_nothing_that_a_run_says_is_markup(
    write_run: WriteRun, write_sweep: WriteRun, tmp_path: Path
) -> None:
    sweep = write_sweep({"A": {0: [2.0, 1.0]}, "B": {0: [2.0, 1.0]}})
    asked = json.loads((sweep / "sweep.json").read_text())
    asked |= {"title": EVIL, "realism": EVIL}
    asked["variants"][0]["label"] = EVIL
    (sweep / "sweep.json").write_text(json.dumps(asked))
    folder = next(sweep.glob("A/*"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"app": EVIL, "version": EVIL}
    config["environment"] = {
        "cpu": EVIL,
        "git": {"commit": EVIL},
        "packages": {"torch": EVIL},
        "engine": EVIL,
    }
    config["run"] |= {EVIL: EVIL, "text": EVIL}
    (folder / "config.json").write_text(json.dumps(config))
    evil_links = {
        EVIL: LINKS["edge->edge"],
        f"{EVIL.replace(' ', '')}->b {EVIL}": LINKS["edge->edge"],
        "c->d": EVIL,
    }
    with_last(folder, by_link=evil_links, rejected={EVIL: 1}, central={"loss": 1.0, EVIL: 2.0})
    honest = report_html(load([next(sweep.glob("B/*"))]))
    text = report_html(load([sweep]), network=lambda _: DrawnNetwork(EVIL, 2, [(0, 1)], EVIL, [1, 1]))
    page = Page(text)
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in Page(honest).elements} | DIAGRAM
    assert not [key for _, found in page.elements for key in found if key.startswith("on")]
    assert not any(c in text for c in "\x00\x1b\u202e")
    # It is there, as text.
    assert "<script>alert(1)</script>" in page.text


# What the other page has not: drawings of links, and a warning.
DIAGRAM = {
    *("svg", "title", "desc", "path", "rect", "text", "circle", "g", "div", "li", "figure", "strong", "ul"),
}


# Drawings


def crossed(**payload: float) -> dict[str, Crossed]:
    return {link.replace("_", "->"): Crossed(3, 80, size) for link, size in payload.items()}


def words(drawing: Drawing) -> list[str]:
    return [text.get_text() for text in drawing.figure.axes[0].texts]


def test_links_are_told_in_both_directions_and_the_highest_kind_stands_above() -> None:
    links = crossed(edge_edge=600.0, client_edge=1_500.0, edge_client=3_000.0, cloud_client=9_000.0)
    drawing = draw_links({**links, "no link": Crossed(1, 1, 1)})
    assert drawing is not None
    told = words(drawing)
    assert "↓ 1.5 kB, 3 messages\n↑ 3 kB, 3 messages" in told
    assert "↻ 600 B, 3 messages" in told
    height = {text.get_text(): text.get_position()[1] for text in drawing.figure.axes[0].texts}
    assert height["cloud"] > height["client"] > height["edge"]
    assert draw_links({"no link": Crossed(1, 1, 1)}) is None


def test_a_network_is_drawn_with_each_links_share() -> None:
    ring = DrawnNetwork("edge", 4, [(0, 1), (1, 2), (2, 3), (0, 3)], "client", [2, 2, 2, 9])
    links = crossed(edge_edge=8_000.0, client_edge=1_500.0, edge_client=3_000.0)
    drawing = draw_network(ring, links)
    assert drawing is not None
    # Four links, both ways.
    assert words(drawing).count("1 kB") == 4
    assert "each link carried 1 kB each way." in drawing.description
    assert drawing.description.endswith("client->edge: 100 B each. edge->client: 200 B each.")
    assert "×9" in words(drawing)
    assert len(drawing.figure.axes[0].lines) == 2 + 2 + 2 + 6


def test_an_edge_of_one_way_is_an_arrow_with_all_of_its_share() -> None:
    ring = DrawnNetwork("node", 3, [(0, 1), (1, 2), (2, 0)], directed=True)
    drawing = draw_network(ring, crossed(node_node=3_000.0))
    assert drawing is not None
    assert words(drawing).count("1 kB") == 3
    assert len([patch for patch in drawing.figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]) == 3
    assert drawing.description.endswith("each link carried 1 kB.")
