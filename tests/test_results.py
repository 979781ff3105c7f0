"""The READMEs say what results/ holds, and a verdict follows from its interval alone."""

import tomllib
from pathlib import Path

import pytest
from results import redraw

from hedgerow.sim.runs.compare import Paired

ROOT = Path(__file__).parents[1]
CLAIMS = sorted((ROOT / "results/claims").glob("*.toml"))


def test_the_readmes_are_what_the_results_give() -> None:
    assert redraw.redraw(check=True) == [], "`make results` writes them anew"


@pytest.mark.parametrize(
    ("low", "high", "seeds", "expect", "verdict"),
    [
        (0.1, 0.2, 3, "higher", "shown"),
        (0.1, 0.2, 3, "lower", "reversed"),
        (-0.2, -0.1, 3, "lower", "shown"),
        (-0.1, 0.2, 3, "lower", "not shown"),
        (-0.1, 0.2, 3, "level", "shown"),
        (-0.1, 0.3, 3, "level", "not shown"),
        (float("-inf"), float("inf"), 1, "lower", "not decidable"),
        (float("-inf"), float("inf"), 1, "level", "not decidable"),
    ],
)
def test_a_verdict_follows_from_the_interval(
    low: float, high: float, seeds: int, expect: str, verdict: str
) -> None:
    assert redraw.judge(Paired((low + high) / 2, low, high, seeds), expect, margin=0.25) == verdict


def test_what_is_shown_in_part_is_not_called_shown() -> None:
    assert redraw.overall(["shown", "shown"]) == "shown"
    assert redraw.overall(["shown", "reversed", "shown"]) == "in part: 2 shown, 1 reversed"


@pytest.mark.parametrize("file", CLAIMS, ids=[file.stem for file in CLAIMS])
def test_a_claim_is_decided_by_runs_or_says_by_what(file: Path) -> None:
    for claim in tomllib.loads(file.read_text())["claim"]:
        if claim.get("test"):
            assert "verdict" not in claim, f"{claim['id']}: runs decide it"
            assert (ROOT / "flower_apps" / file.stem / "figures" / f"{claim['figure']}.toml").is_file()
        else:
            assert claim["verdict"] in ("shown", "not shown", "reversed", "not decidable")
            assert claim.get("from") or claim.get("figure")
