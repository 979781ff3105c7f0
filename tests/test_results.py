"""The READMEs say what results/ holds, and a verdict follows from its interval alone."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from results import redraw

from hedgerow.sim import RecordedRun, Results, read_sweep
from hedgerow.sim.runs.compare import Paired
from hedgerow.sim.runs.results import cost_named, write_collected

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
        (0.3, 0.4, 3, "level", "reversed"),
        (-0.4, -0.3, 3, "level", "reversed"),
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
        for test in claim.get("test", []):
            figure = test.get("figure", claim["figure"])
            sweep = read_sweep(ROOT / "flower_apps" / file.stem / "figures" / f"{figure}.toml")
            labels = [variant.label for variant in sweep.variants]
            assert ("right" in test) is not ("published" in test)
            for name in (test["left"], test.get("right", test["left"])):
                matching = [one for one in labels if one == name] or [
                    one for one in labels if one.startswith(f"{name}, ")
                ]
                assert len(matching) == 1, f"{claim['id']}: {name} in {figure}"
            cost_named(test["x"])
            assert test["expect"] in ("lower", "higher", "level")
            # What links sent is kept of those that a sweep shows.
            shown = {name.partition(" ")[2] for name in (*sweep.xs, *sweep.ys, *sweep.columns)}
            assert {test[axis].partition(" ")[2] for axis in "xy"} <= shown


# A finding


Losses = Mapping[str, Mapping[int, Sequence[float | None]]]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., redraw.Finding]:
    """Compares variants whose loss was evaluated, or was not, after each of some rounds."""
    monkeypatch.setattr(redraw, "HERE", tmp_path)

    def finding(
        losses: Losses, failed: Mapping[str, Mapping[int, str]] | None = None, **test: Any
    ) -> redraw.Finding:
        runs = [
            RecordedRun(tmp_path, label, seed, {"run": {"seed": seed}}, _records(values, 1 + seed), True)
            for label, seeds in losses.items()
            for seed, values in seeds.items()
        ]
        made = Results(runs, "", "", ("rounds",), ("loss",), "figure", failed=failed or {})
        write_collected(made, tmp_path / "app/figure.json")
        redraw.results.cache_clear()
        asked = {"left": "ours", "right": "theirs", "x": "bits", "y": "loss", "expect": "lower", **test}
        return redraw.finding("app", {"figure": "figure"}, asked)

    return finding


def _records(losses: Sequence[float | None], bits: int) -> list[dict[str, Any]]:
    return [
        {
            "round": number,
            "train": {},
            "evaluate": {},
            "central": {} if loss is None else {"loss": loss},
            "bits": bits * number,
            **dict.fromkeys(("iterations", "payload_bytes", "sim_seconds", "wall_seconds"), 0.0),
        }
        for number, loss in enumerate(losses)
    ]


def test_a_summary_has_no_value_of_what_a_variant_does_not_record(tmp_path: Path) -> None:
    def run(label: str, told: dict[str, float]) -> RecordedRun:
        records = [{**record, "train": told} for record in _records([4.0, 3.0], 1)]
        return RecordedRun(tmp_path, label, 0, {"run": {"seed": 0}}, records, True)

    runs = [run("plain", {}), run("noisy", {"epsilon": 2.0})]
    found = Results(runs, "", "", ("rounds",), ("loss",), "figure")
    rows = redraw.summary(found, ["rounds"], ["loss", "epsilon"], [], []).splitlines()[2:]
    assert rows == ["| plain | 1 | 3 |  | 1 |", "| noisy | 1 | 3 | 2 | 1 |"]
    with pytest.raises(ValueError, match="y = 'epsilom': no run"):
        redraw.summary(found, ["rounds"], ["epsilom"], [], [])


def test_a_fresh_evaluation_is_not_compared_with_an_old_one(find: Callable[..., redraw.Finding]) -> None:
    """At its last round `ours` is evaluated too, where `theirs` was not since round 2."""
    ours = {seed: [4.0, None, 3.0, 1.0 + seed / 10] for seed in range(3)}
    theirs = {seed: [4.0, None, 2.0, None, 0.5] for seed in range(3)}
    found = find({"ours": ours, "theirs": theirs})
    assert found.text.startswith("loss at bits 4: ours 3, theirs 2 ")
    assert found.verdict == "reversed"
    assert find({"ours": ours, "theirs": theirs}, x="rounds", at=3).verdict == "shown"


def test_two_moments_of_a_run_are_compared(find: Callable[..., redraw.Finding]) -> None:
    losses = {"ours": {seed: [4.0, 3.0 + seed / 10, 2.0] for seed in range(3)}}
    found = find(losses, right="ours", x="rounds", **{"at": 2, "right-at": 1})
    assert found.text.startswith("loss at rounds 2 and 1: ours 2, ours 3.1 ")
    assert found.verdict == "shown"


def test_means_over_the_last_share_are_compared(find: Callable[..., redraw.Finding]) -> None:
    """Of rounds 2 to 4; what `theirs` has beyond `ours` is not of it."""
    ours = {seed: [9.0, 9.0, 1.0, None, 3.0 + seed / 10] for seed in range(3)}
    theirs = {seed: [0.0, 0.0, 4.0, 4.0, 2.5, 0.0] for seed in range(3)}
    found = find({"ours": ours, "theirs": theirs}, x="rounds", over=0.5)
    assert found.text.startswith("mean loss over rounds 2 to 4: ours 2.05, theirs 3.5 ")
    assert found.verdict == "shown"


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "shown"), (0.4, "reversed")])
def test_a_share_of_the_other_is_compared(
    find: Callable[..., redraw.Finding], factor: float, verdict: str
) -> None:
    losses = {name: {seed: [4.0, low] for seed in range(3)} for name, low in (("ours", 1.0), ("theirs", 2.0))}
    assert find(losses, x="rounds", factor=factor).verdict == verdict


def test_what_a_paper_published_is_compared(find: Callable[..., redraw.Finding]) -> None:
    losses = {"ours": {seed: [4.0, 1.0 + seed / 100] for seed in range(3)}}
    found = find(losses, right="ours", x="rounds", published=1.06, expect="level", margin=0.1)
    assert found.text.startswith("loss at rounds 1: ours 1.01, published 1.06 (-0.05 [-0.07484, -0.02516]")
    assert found.verdict == "shown"


@pytest.mark.parametrize(
    ("theirs", "seeds", "expect", "verdict"),
    [
        ([4.0, 3.0, 3.0], 3, "lower", "shown"),
        ([4.0, 3.0, 3.0], 3, "higher", "reversed"),
        ([4.0, 3.0, 3.0], 3, "level", "not shown"),
        ([4.0, 3.0, 3.0], 2, "lower", "not decidable"),
        # They ended before they had spent what ours paid.
        ([4.0], 3, "lower", "not decidable"),
    ],
)
def test_a_target_that_one_reached_and_the_other_never_decides(
    find: Callable[..., redraw.Finding], theirs: list[float], seeds: int, expect: str, verdict: str
) -> None:
    losses = {
        name: dict.fromkeys(range(seeds), low) for name, low in (("ours", [4.0, 1.0]), ("theirs", theirs))
    }
    assert find(losses, target=2.0, expect=expect).verdict == verdict


@pytest.mark.parametrize("test", [{}, {"target": 1.5}, {"expect": "higher"}])
def test_those_that_survived_decide_nothing(
    find: Callable[..., redraw.Finding], test: Mapping[str, Any]
) -> None:
    """The same runs decide without the one that failed."""
    losses = {name: {seed: [4.0, low] for seed in range(3)} for name, low in (("ours", 1.0), ("theirs", 2.0))}
    assert find(losses, **test).verdict != "not decidable"
    found = find(losses, failed={"theirs": {3: "Run failed: the run diverges"}}, **test)
    assert found == redraw.Finding("1 of 4 runs of theirs failed", "not decidable")
