"""Figures show mean and band of what was measured, and read without colour."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from hedgerow.sim import Results, load
from hedgerow.sim.runs.compare import t_interval
from hedgerow.sim.runs.plot import draw, mean_curve, save

WriteRun = Callable[..., Path]


@pytest.fixture
def results(write_sweep: WriteRun) -> Results:
    losses = {
        "A": {0: [2.0, None, 1.0], 1: [2.2, None, 0.6]},
        "B": {0: [2.0, None, 1.5], 1: [2.2, None, 1.3]},
    }
    return load([write_sweep(losses)])


def test_the_line_is_the_mean_over_seeds_at_evaluated_rounds(results: Results) -> None:
    curve = mean_curve(list(results.variants()["A"].values()), "sim-seconds", "loss")
    assert curve.x == [0.0, 1.0]
    assert curve.mean == pytest.approx([2.1, 0.8])


def test_the_band_of_five_seeds_is_a_t_interval(write_sweep: WriteRun) -> None:
    values = [1.0, 1.1, 1.2, 1.3, 2.0]
    results = load([write_sweep({"A": {seed: [v] for seed, v in enumerate(values)}})])
    curve = mean_curve(list(results.variants()["A"].values()), "rounds", "loss")
    assert (curve.low[0], curve.high[0]) == pytest.approx(t_interval(values))


def test_there_is_a_panel_for_each_pair_of_axes(results: Results) -> None:
    figure = draw(results, ["iterations", "bits"], ["loss", "accuracy"])
    assert [(ax.get_ylabel(), ax.get_xlabel()) for ax in figure.axes] == [
        ("loss", "local iterations"),
        ("loss", "nominal traffic (bit)"),
        ("accuracy", "local iterations"),
        ("accuracy", "nominal traffic (bit)"),
    ]


def test_a_settings_values_get_columns_of_their_own(write_run: WriteRun) -> None:
    runs = [
        write_run(f"{method}-{tau}", [1.0, 0.5], method=method, tau=tau) for tau in (1, 2) for method in "AB"
    ]
    figure = draw(load(runs), ["rounds"], ["loss", "accuracy"], by="tau")
    assert [ax.get_title() for ax in figure.axes] == ["tau=1", "tau=2"] * 2
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss"] * 2 + ["accuracy"] * 2
    labels = [[line.get_label() for line in ax.lines] for ax in figure.axes]
    assert labels == [["method=A", "method=B"]] * 4


def test_lines_differ_in_style_marker_and_colour(write_sweep: WriteRun) -> None:
    labels = "ABCDE"
    lines = draw(load([write_sweep({c: {0: [1.0]} for c in labels})]), ["rounds"], ["loss"]).axes[0].lines
    styles = {(line.get_linestyle(), str(line._unscaled_dash_pattern)) for line in lines}  # type: ignore[attr-defined]
    assert len(styles) == len({line.get_marker() for line in lines}) == 5
    assert len({to_hex(line.get_color()) for line in lines}) == 5


def test_the_figure_says_title_labels_seeds_band_and_realism(results: Results) -> None:
    figure = draw(results, ["rounds"], ["loss"])
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B"]
    assert figure.get_suptitle() == "Made up"
    caption = figure.get_supxlabel().replace("\n", " ")
    assert caption == "2 seeds: mean, band: minimum to maximum. Realism: numbers by hand."


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("figure", ["figure.png", "figure.svg", "figure.pdf"]),
        ("figure.pdf", ["figure.pdf"]),
    ],
)
def test_a_suffix_says_which_kind_of_file(
    results: Results, tmp_path: Path, name: str, files: list[str]
) -> None:
    figure = draw(results, ["iterations"], ["loss"], log_x=True, log_y=True)
    written = save(figure, tmp_path / "new" / name)
    assert [path.name for path in written] == files
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert all(path.read_bytes().startswith(begins[path.suffix]) for path in written)


@pytest.fixture
def linked(write_sweep: WriteRun) -> Results:
    """Return runs of A and B, seeds 0 and 1; B sends up half of what A does."""
    folder = write_sweep(
        {"A": {0: [2.0, 1.5, 1.0], 1: [2.0, 1.7, 1.4]}, "B": {0: [2.0, 1.4, 0.7], 1: [2.0, 1.5, 1.3]}}
    )
    for rounds in folder.glob("*/*/rounds.jsonl"):
        records = [json.loads(line) for line in rounds.read_text().splitlines()]
        bits = 8000 if rounds.parents[1].name == "A" else 4000
        for record in records:
            # Nothing has crossed a link before the first round.
            n = record["round"]
            record["by_link"] = {
                link: {"messages": n, "nominal_bits": bits * n, "payload_bytes": bits * n // 8 + 10 * n}
                for link in ("client->server", "server->client")
                if n
            }
        rounds.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load([folder])


def test_one_links_traffic_is_an_axis(linked: Results) -> None:
    figure = draw(linked, ["bits client->server"], ["loss", "payload-bytes client->server"])
    assert [(ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes] == [
        ("nominal traffic client->server (bit)", "loss"),
        ("nominal traffic client->server (bit)", "serialised traffic client->server (B)"),
    ]
    lines = [[(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines] for ax in figure.axes]
    assert lines[0][0] == ([0, 8000, 16000], pytest.approx([2.0, 1.6, 1.2]))
    assert lines[1] == [([0, 8000, 16000], [0, 1010, 2020]), ([0, 4000, 8000], [0, 510, 1020])]


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ("bits edge->edge", r"of a link of .* \(client->server, server->client\)"),
        ("rounds client->server", "one of rounds, .*or bits or payload-bytes of a link"),
    ],
)
def test_a_link_that_runs_do_not_have_is_refused(linked: Results, x: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"x must be {said}.*, got '{x}'"):
        draw(linked, [x], ["loss"])


def test_differences_are_paired_and_have_their_interval(linked: Results) -> None:
    figure = draw(linked, ["rounds"], ["loss"], differences=True)
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss", "loss, minus A"]
    zero, line = figure.axes[1].lines
    assert set(zero.get_ydata()) == {0.0}  # type: ignore[arg-type]
    assert line.get_label() == "B"
    assert list(line.get_ydata()) == pytest.approx([0.0, -0.15, -0.2])  # type: ignore[call-overload]
    (band,) = figure.axes[1].collections
    ends = band.get_paths()[0].vertices[:, 1]  # type: ignore[index]
    assert (min(ends), max(ends)) == pytest.approx(t_interval([-0.3, -0.1]))
    assert "Differences are paired by seed, band: 95 % t interval." in figure.get_supxlabel().replace(
        "\n", " "
    )


def test_differences_over_a_cost_are_at_equal_cost(linked: Results) -> None:
    line = draw(linked, ["bits"], ["loss"], differences=True).axes[1].lines[1]
    assert len(line.get_xdata()) == 3  # type: ignore[arg-type]
    # B at 8,000 bits is B after two rounds, A after one.
    line = draw(linked, ["bits client->server"], ["loss"], differences=True).axes[1].lines[1]
    assert list(line.get_xdata()) == [0, 8000]  # type: ignore[call-overload]
    assert list(line.get_ydata()) == pytest.approx([0.0, (0.7 - 1.5 + 1.3 - 1.7) / 2])  # type: ignore[call-overload]


def test_the_caption_says_what_metrics_are_of(write_run: WriteRun) -> None:
    settings = {"train-loss-samples": 5000, "dataset": "mnist", "num-clients": 4}
    results = load([write_run("a", [1.0, 0.5], **settings)])
    caption = draw(results, ["rounds"], ["loss", "accuracy"]).get_supxlabel().replace("\n", " ")
    assert caption.startswith(
        "mnist, 4 nodes. loss: of the averaged model on 5,000 training samples. "
        "accuracy: of the averaged model on test data. 1 seed"
    )
