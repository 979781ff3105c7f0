"""Headlines, in README.md and in the apps' READMEs, are what results/ holds, and name the best baseline."""

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest

from hedgerow.sim import RecordedRun, Results, load
from hedgerow.sim.runs.compare import paired_difference, paired_values, to_target

ROOT = Path(__file__).parents[3]
Variants = dict[str, dict[int, RecordedRun]]


def recorded(name: str, only: str = "") -> Variants:
    """Return the runs of each variant, named by its label's first part, where the label contains ``only``."""
    results: Results = load([ROOT / "results" / f"{name}.json"])
    return {label.split(",")[0]: runs for label, runs in results.variants().items() if only in label}


def costs(runs: Iterable[RecordedRun], x: str, y: str, target: float) -> float:
    """Return the mean cost of reaching a target; infinite if a run did not reach it."""
    found = [to_target(run, x, y, target) for run in runs]
    return fmean(float("inf") if one is None else one for one in found)


def last(run: RecordedRun, y: str, since: int | None = None) -> float:
    """Return the last value, or the mean of those from round ``since`` on."""
    points = run.series("rounds", y)
    return points[-1].y if since is None else fmean(point.y for point in points if point.x >= since)


def readme(app: str) -> str:
    return (ROOT / "flower_apps" / app / "README.md").read_text()


def said(app: str, *texts: str) -> None:
    """Check that texts are in the app's row of README.md and in the prose of its own README."""
    (row,) = re.findall(rf"^\| \[`{app}`\].*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    own = readme(app)
    for text in texts:
        number = re.compile(rf"(?<![\d.]){re.escape(text)}(?!\d|\.\d)")
        assert number.search(row), (app, text)
        prose = "\n".join(line for line in own.splitlines() if not line.startswith("|"))
        assert number.search(prose), (app, text)


def test_sd_feels_headline() -> None:
    runs = recorded("sd-feel/fig3-cifar10")
    needs = {label: costs(one.values(), "sim-seconds", "accuracy", 0.55) for label, one in runs.items()}
    said("sd-feel", "0.55", *(f"{cost:.0f}" for cost in needs.values()))
    assert needs["SD-FEEL"] == min(needs.values())
    for other in ("HierFAVG", "FEEL"):
        times = {
            label: {seed: costs([run], "sim-seconds", "accuracy", 0.55) for seed, run in runs[label].items()}
            for label in ("SD-FEEL", other)
        }
        assert paired_difference(times["SD-FEEL"], times[other]).high < 0
    _, ours, theirs = paired_values(runs["SD-FEEL"], runs["FEEL"], "sim-seconds", "accuracy")[-1]
    lead = paired_difference(ours, theirs)
    assert lead.low < 0 < lead.high
    assert f"leads FEEL by {lead.mean:.3f}, with an interval that includes zero" in readme("sd-feel")


def test_similarity_frees_headline() -> None:
    (exact,), (coded,) = (
        recorded("similarity-free/paper-fixed", f"ring(1), algorithm={name}").values()
        for name in ("fedavg", "ef-fedavg")
    )
    ends = [fmean(last(run, "accuracy") for run in runs.values()) for runs in (exact, coded)]
    share = coded[0].costs("bits worker->server")[-1] / exact[0].costs("bits worker->server")[-1]
    said("similarity-free", *(f"{end:.2f}" for end in ends), f"{100 * share:.0f} %")


def test_fedmuds_headline() -> None:
    runs = recorded("fedmud/table1-small", "capped-dirichlet")
    ends = {
        label: fmean(last(run, "accuracy", since=30) for run in seeds.values())
        for label, seeds in runs.items()
    }
    said("fedmud", f"{ends['FedMUD+BKD+AAD']:.3f}", f"{ends['FedBAT']:.3f}")
    others = {label: end for label, end in ends.items() if "FedMUD" not in label and label != "FedAvg"}
    assert max(others, key=others.__getitem__) == "FedBAT"
    bits = {label: runs[label][0].costs("bits")[-1] for label in ("FedMUD+BKD+AAD", "FedBAT", "FedAvg")}
    assert bits["FedMUD+BKD+AAD"] == pytest.approx(bits["FedBAT"], rel=0.02)
    assert bits["FedAvg"] / bits["FedMUD+BKD+AAD"] == pytest.approx(32, rel=0.02)


def test_cepss_headline() -> None:
    runs = recorded("ceps/fig4", "num-clients=64")
    needs = {label: costs(one.values(), "bits", "loss", 0.135) for label, one in runs.items()}
    rivals = {label: cost for label, cost in needs.items() if not label.startswith("CEPS")}
    assert min(rivals, key=rivals.__getitem__) == "CHOCO-SGD"
    said(
        "ceps",
        f"{needs['CEPS-1BCS'] / 1e3:.0f} kbit",
        f"{rivals['CHOCO-SGD'] / 1e6:.0f} Mbit",
        f"{needs['CEPS-sparse32'] / 1e3:.0f} kbit",
    )


def test_hsgds_headline() -> None:
    runs = recorded("hsgd/fig4-p1")
    needs = {label: costs(one.values(), "bits", "auc", 0.9) / 1e9 for label, one in runs.items()}
    assert min(needs, key=needs.__getitem__) == "C-HSGD"
    said("hsgd", *(f"{needs[label]:.2f}" for label in ("HSGD", "C-HSGD", "TDCD")), f"{needs['JFL']:.1f}")
