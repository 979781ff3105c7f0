"""The READMEs say what results/ holds, and a verdict follows from its intervals and from runs that count."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from results import redraw

from hedgerow.sim import RecordedRun, Results, find_app, read_sweep
from hedgerow.sim.runs.compare import Paired, paired_difference
from hedgerow.sim.runs.results import cost_named, write_collected

ROOT = Path(__file__).parents[1]
CLAIMS = sorted((ROOT / "results/claims").glob("*.toml"))
# All tests read the same runs, once.
pytestmark = pytest.mark.xdist_group("results")
Judged = Sequence[tuple[Mapping[str, Any], Sequence[tuple[Mapping[str, Any], redraw.Finding]]]]


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
    ],
)
def test_a_verdict_follows_from_the_interval(
    low: float, high: float, seeds: int, expect: str, verdict: str
) -> None:
    assert redraw.judge(Paired((low + high) / 2, low, high, seeds), expect, margin=0.25) == verdict


def test_what_is_shown_in_part_is_not_called_shown() -> None:
    assert redraw.overall(["shown", "shown"]) == "shown"
    assert redraw.overall(["shown", "reversed", "shown"]) == "in part: 2 shown, 1 reversed"


# Claims and their findings


def every_finding(
    judged: Callable[[str], Judged] = redraw.judged,
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any], redraw.Finding]]:
    for file in CLAIMS:
        for claim, found in judged(file.stem):
            for test, finding in found:
                yield file.stem, claim, test, finding


every_app = pytest.mark.parametrize("app", [file.stem for file in CLAIMS])


@every_app
def test_a_claim_is_decided_by_runs_or_says_by_what(app: str) -> None:
    for claim, found in redraw.judged(app):
        if found:
            assert "verdict" not in claim, f"{claim['id']}: runs decide it"
        else:
            assert claim["verdict"] in ("shown", "not shown", "undecidable by construction", "not run")
            assert claim.get("from") or claim.get("figure")
            assert claim.get("note") or claim["verdict"] == "shown"
        for test, _ in found:
            figure = test.get("figure", claim["figure"])
            sweep = read_sweep(ROOT / "flower_apps" / app / "figures" / f"{figure}.toml")
            labels = [variant.label for variant in sweep.variants]
            assert ("right" in test) is not ("published" in test)
            for name in (test["left"], test.get("right", test["left"]), *test.get("than", ())):
                matching = [one for one in labels if one == name] or [
                    one for one in labels if one.startswith(f"{name}, ")
                ]
                assert len(matching) == 1, f"{claim['id']}: {name} in {figure}"
            cost_named(test["x"])
            assert test["expect"] in ("lower", "higher", "level", "only")
            # What links sent is kept of those that a sweep shows.
            shown = {name.partition(" ")[2] for name in (*sweep.xs, *sweep.ys, *sweep.columns)}
            assert {test[axis].partition(" ")[2] for axis in "xy"} <= shown


# What an axis is called in the claims.
AXES = {"rounds": "rounds", "iterations": "iterations", "sim-seconds": "simulated seconds", "bits": "bits"}


@every_app
def test_a_claim_names_axis_point_stop_seeds_and_the_papers_number(app: str) -> None:
    for claim, found in redraw.judged(app):
        assert all(claim[key].strip() for key in ("paper", "axis", "point", "stop", "seeds", "number"))
        assert all(AXES[test["x"]] in claim["axis"] for test, _ in found), claim["id"]
        figures = {test.get("figure", claim["figure"]) for test, finding in found if finding.runs}
        seeds = {run.seed for figure in figures for run in redraw.results(f"{app}/{figure}").runs}
        if seeds:
            assert claim["seeds"].startswith(f"{len(seeds)} seeds; the paper"), claim["id"]


@every_app
def test_a_claim_in_part_has_a_line_for_each_part(app: str) -> None:
    rows = redraw.claims_table(app).splitlines()[2:]
    for (claim, found), row in zip(redraw.judged(app), rows, strict=True):
        verdict, cell = row.split(" | ")[2], row.split(" | ")[4]
        if verdict.startswith("in part"):
            parts = dict.fromkeys((finding.verdict, finding.text) for _, finding in found)
            told = filter(None, re.split(r"<br>|<details><summary>.*?</summary>|</details>", cell))
            lines = [line.partition(": ")[0] for line in told][: len(parts)]
            assert lines == [said for said, _ in parts], claim["id"]
            assert len(set(lines)) > 1, claim["id"]


def test_only_a_claim_that_says_why_it_is_not_our_set_up_is_reversed() -> None:
    reversed_ = [
        (app, claim["id"]) for app, claim, _, found in every_finding() if found.verdict == "reversed"
    ]
    assert reversed_, "without one, this test says nothing"
    for file in CLAIMS:
        for claim, _ in redraw.judged(file.stem):
            if "reversed" in claim:
                assert (file.stem, claim["id"]) in reversed_, "the paragraph has nothing to explain"
                assert claim["reversed"].count(". ") >= 2, "a paragraph"


@every_app
def test_the_count_adds_up_and_tells_how_many_claims_have_a_comparison_against_the_paper(app: str) -> None:
    shown, total, *others, against = (int(number) for number in re.findall(r"\d+", redraw.count(app)))
    assert shown + sum(others) == total == len(redraw.judged(app))
    contrary = [
        any(finding.verdict == "reversed" or "on the other side" in finding.text for _, finding in found)
        for _, found in redraw.judged(app)
    ]
    assert sum(contrary) == against


def wrongly_told(claims: Judged) -> list[str]:
    """Return the claims with a paragraph but no comparison against the paper, or the other way round."""
    wrong = []
    for claim, found in claims:
        contrary = any(
            finding.verdict == "reversed" or "on the other side" in finding.text for _, finding in found
        )
        if contrary is not ("against" in claim):
            wrong.append(str(claim["id"]))
    return wrong


@every_app
def test_a_claim_has_a_paragraph_if_and_only_if_a_comparison_came_out_against_the_paper(app: str) -> None:
    claims = redraw.judged(app)
    assert wrongly_told(claims) == []
    # Without a paragraph that is there, or with one more, the test fails.
    for mutated, (claim, found) in enumerate(claims):
        if "against" in claim:
            other = {key: value for key, value in claim.items() if key != "against"}
        else:
            other = {**claim, "against": "A paragraph."}
        assert wrongly_told([*claims[:mutated], (other, found)]) == [str(claim["id"])]


@every_app
def test_a_paragraph_cites_figures_that_exist_and_is_below_the_table(app: str) -> None:
    pages = (ROOT / "flower_apps" / app / "RESULTS.md").read_text(encoding="utf-8")
    for claim, _ in redraw.judged(app):
        if text := claim.get("against"):
            assert f"- **{claim['id']}:** {text}\n" in pages
            assert 2 <= len(re.findall(r"[.](?= |$)", text)) <= 5, claim["id"]
            assert "because" not in text, claim["id"]
            cited = re.findall(r"`figures/([\w-]+)[.]toml`", text)
            assert claim["figure"] in cited or any(test.get("figure") in cited for test in claim["test"])
            for figure in cited:
                assert (ROOT / "flower_apps" / app / "figures" / f"{figure}.toml").is_file()
                assert (ROOT / "results" / app / f"{figure}.json").is_file()


@pytest.mark.parametrize(
    ("claim_id", "left", "right", "partition"),
    [
        (5, "FedHM, step 0.03", "FedLMT, step 0.3", "capped-dirichlet(0.3)"),
        (7, "EF21-P, step 0.03", "FedPara, step 0.3", "capped-dirichlet(0.3)"),
        ("4 on Non-IID-2", "FedHM, step 0.03", "FedMUD, step 0.3", "labels(3)"),
        ("7 on Non-IID-2", "EF21-P, step 0.03", "FedPara, step 0.3", "labels(3)"),
    ],
)
def test_a_paragraph_quotes_the_best_rounds_of_the_runs(
    claim_id: int | str, left: str, right: str, partition: str
) -> None:
    variants = redraw.results("fedmud/table1-small").variants()
    ours, theirs = (
        {
            seed: 100 * max(point.y for point in run.series("rounds", "accuracy"))
            for seed, run in variants[f"{label}, partition={partition}"].items()
        }
        for label in (left, right)
    )
    lead = paired_difference(ours, theirs)
    (claim,) = (one for one in redraw.claims("fedmud")["claim"] if one["id"] == claim_id)
    assert f"by {lead.mean:.1f} points [{lead.low:+.1f}, {lead.high:+.1f}]" in claim["against"]


def test_no_method_that_the_paper_lacks_is_in_a_verdict() -> None:
    for app, claim, _, found in every_finding():
        for run in found.runs:
            for key, allowed in redraw.claims(app)["methods"].items():
                assert run.settings.get(key, allowed[0]) in allowed, (app, claim["id"], run.label)


def at_chance_or_no_number(app: str, run: RecordedRun) -> bool:
    """The rule of results/README.md, from the run's last record alone."""
    last = run.rounds[-1]["central"]
    chance = redraw.claims(app).get("chance", {})
    return isnan(last.get("loss", 0.0)) or any(
        abs(last[name] - value) <= 0.01 for name, value in chance.items() if name in last
    )


def dead_in_verdicts(judged: Callable[[str], Judged] = redraw.judged) -> list[str]:
    """Return the runs behind a verdict that died or lost replies to a guard."""
    return [
        f"{app} {claim['id']}: {run.label}, seed {run.seed}"
        for app, claim, _, found in every_finding(judged)
        for run in found.runs
        if at_chance_or_no_number(app, run) or run.rounds[-1].get("rejected")
    ]


def test_no_verdict_rests_on_a_run_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dead_in_verdicts() == []
    # Without the rule, there are some: the test can fail.
    monkeypatch.setattr(redraw, "no_evidence", lambda run, chance: "")
    assert any("TDCD, seed 0" in one for one in dead_in_verdicts(redraw.judged.__wrapped__))


def test_dead_runs_are_counted_beside_the_verdict() -> None:
    texts = [
        found.text for app, _, test, found in every_finding() if "TDCD" in (test["left"], test.get("right"))
    ]
    assert any(text.endswith("4 seeds); 1 of 5 runs of TDCD died") for text in texts)


@every_app
def test_guards_and_caps_on_weights_are_off_in_the_figures_of_claims(app: str) -> None:
    guards = ("max-update-norm-ratio", "max-weight-ratio")
    defaults = find_app(ROOT / "flower_apps" / app).config
    for claim, found in redraw.judged(app):
        for figure in {test.get("figure", claim["figure"]) for test, _ in found}:
            sweep = read_sweep(ROOT / "flower_apps" / app / "figures" / f"{figure}.toml")
            for guard in guards:
                for variant in sweep.variants:
                    assert {**defaults, **sweep.base, **variant.settings}.get(guard, 0) == 0, (figure, guard)


# A finding


Losses = Mapping[str, Mapping[int, Sequence[float | None]]]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., redraw.Finding]:
    """Compares variants whose loss was evaluated, or was not, after each of some rounds."""
    monkeypatch.setattr(redraw, "HERE", tmp_path)
    monkeypatch.setattr(redraw, "results", redraw.results.__wrapped__)
    monkeypatch.setattr(redraw, "claims", redraw.claims.__wrapped__)

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
        asked = {"left": "ours", "right": "theirs", "x": "bits", "y": "loss", "expect": "lower", **test}
        return redraw.finding("app", {"figure": "figure", "reversed": "It is not our set-up."}, asked)

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


@pytest.mark.parametrize(("worst", "first", "second"), [(False, "**2**", "2.5"), (True, "4", "**3**")])
def test_trials_are_told_by_their_mean_or_their_worst_seed(
    tmp_path: Path, worst: bool, first: str, second: str
) -> None:
    """One trial was never asked for, another one has no run that finished."""
    ends = {"a, step=1": (0.0, 4.0), "a, step=2": (2.0, 3.0), "b, step=2": (1.0, 1.0)}
    runs = [
        RecordedRun(tmp_path, label, seed, {"run": {"seed": seed}}, _records([9.0, end], 1), True)
        for label, losses in ends.items()
        for seed, end in enumerate(losses)
    ]
    found = Results(runs, "", "", ("rounds",), ("loss",), "figure")
    table = redraw.trials(found, "loss", ["step"], [*ends, "b, step=3"], worst=worst)
    assert table.splitlines()[2:] == [f"| a | {first} | {second} |  |", "| b |  | **1** | diverges |"]


def test_a_fresh_evaluation_is_not_compared_with_an_old_one(find: Callable[..., redraw.Finding]) -> None:
    """At its last round `ours` is evaluated too, where `theirs` was not since round 2."""
    ours = {seed: [4.0, None, 3.0, 1.0 + seed / 10] for seed in range(3)}
    theirs = {seed: [4.0, None, 2.0, None, 0.5] for seed in range(3)}
    found = find({"ours": ours, "theirs": theirs})
    assert found.text.startswith("loss at bits 4: ours 3, theirs 2 ")
    assert found.verdict == "reversed"
    assert find({"ours": ours, "theirs": theirs}, x="rounds", at=3).verdict == "shown"


def test_runs_that_stop_at_different_costs_are_compared_at_their_ends(
    find: Callable[..., redraw.Finding],
) -> None:
    ours = {seed: [4.0, 3.0, None, 1.0 + seed / 10] for seed in range(3)}
    theirs = {seed: [4.0, 2.0] for seed in range(3)}
    found = find({"ours": ours, "theirs": theirs}, x="rounds", at="end")
    assert found.text.startswith("loss at the end: ours 1.1, theirs 2 ")
    assert found.verdict == "shown"


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
        ([4.0, 3.0, 3.0], 3, "only", "shown"),
        ([4.0, 1.0], 3, "only", "reversed"),
        ([4.0, 3.0, 3.0], 2, "lower", "not shown"),
        # They ended before they had spent what ours paid.
        ([4.0], 3, "lower", "not shown"),
    ],
)
def test_a_target_that_one_reached_and_the_other_never_decides(
    find: Callable[..., redraw.Finding], theirs: list[float], seeds: int, expect: str, verdict: str
) -> None:
    losses = {
        name: dict.fromkeys(range(seeds), low) for name, low in (("ours", [4.0, 1.0]), ("theirs", theirs))
    }
    assert find(losses, target=2.0, expect=expect).verdict == verdict


OURS_AND_THEIRS = {
    name: {seed: [4.0, low + seed / 100] for seed in range(3)}
    for name, low in (("ours", 1.0), ("theirs", 2.0))
}


@pytest.mark.parametrize("test", [{}, {"target": 1.5}, {"expect": "higher"}])
def test_a_run_that_failed_is_counted_and_in_no_interval(
    find: Callable[..., redraw.Finding], test: Mapping[str, Any]
) -> None:
    decided = find(OURS_AND_THEIRS, **test)
    found = find(OURS_AND_THEIRS, failed={"theirs": {3: "Run failed: the run diverges"}}, **test)
    assert found.text == f"{decided.text}; 1 of 4 runs of theirs died"
    assert found.verdict == decided.verdict


def test_a_run_without_a_last_loss_is_left_out_with_its_pair(find: Callable[..., redraw.Finding]) -> None:
    one_died = {**OURS_AND_THEIRS, "theirs": {**OURS_AND_THEIRS["theirs"], 1: [4.0, nan]}}
    found = find(one_died)
    assert found.text.endswith("2 seeds); 1 of 3 runs of theirs died")
    assert {run.seed for run in found.runs} == {0, 2}


def test_one_seed_decides_nothing(find: Callable[..., redraw.Finding]) -> None:
    alone = {name: {0: runs[0]} for name, runs in OURS_AND_THEIRS.items()}
    assert find(alone) == redraw.Finding("seeds to compare: 1", "not run")


def test_what_runs_do_not_record_is_not_run(find: Callable[..., redraw.Finding]) -> None:
    assert find(OURS_AND_THEIRS, y="stop-loss") == redraw.Finding(
        "stop-loss is in 0 of 3 runs of ours, stop-loss is in 0 of 3 runs of theirs", "not run"
    )


def test_the_other_side_without_a_reason_is_not_shown(find: Callable[..., redraw.Finding]) -> None:
    asked = {"left": "ours", "right": "theirs", "x": "bits", "y": "loss", "expect": "higher"}
    assert find(OURS_AND_THEIRS, expect="higher").verdict == "reversed"
    found = redraw.finding("app", {"figure": "figure"}, asked)
    assert found.verdict == "not shown"
    assert found.text.endswith("3 seeds), on the other side")


def test_the_difference_of_two_leads_is_compared(find: Callable[..., redraw.Finding]) -> None:
    """Ours leads by 1 here and by 0.5 there."""
    losses = {
        **OURS_AND_THEIRS,
        **{
            f"{name} there": {s: [4.0, low + s / 50] for s in range(3)}
            for name, low in (("ours", 1.5), ("theirs", 2.0))
        },
    }
    found = find(losses, x="rounds", at=1, than=["ours there", "theirs there"])
    assert found.text.startswith(
        "loss at rounds 1: ours less theirs -1, ours there less theirs there -0.5 (-0.5 [-0.5, -0.5]"
    )
    assert found.verdict == "shown"


def test_a_list_of_points_is_one_comparison_each(find: Callable[..., redraw.Finding]) -> None:
    test = {"left": "a", "right": "b", "x": "bits", "y": "loss", "expect": "lower", "target": [1.0, 2.0]}
    claim = {"figure": "figure", "test": [test]}
    assert [one["target"] for one in redraw.comparisons(claim)] == [1.0, 2.0]


def test_a_share_of_the_best_plateau_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight evaluations, the last three are in the last quarter of the iterations: the plateau is 0.5."""

    def run(label: str, seed: int, scores: Sequence[float]) -> RecordedRun:
        records = [
            {**record, "iterations": float(at), "central": {"auc": score}}
            for at, (record, score) in enumerate(
                zip(_records([0.0] * len(scores), 1), scores, strict=True), 1
            )
        ]
        return RecordedRun(tmp_path, label, seed, {"run": {"seed": seed}}, records, True)

    ours = [0.125, 0.25, 0.375, 0.4375, 0.4375, 0.5, 0.5, 0.5]
    theirs = [0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.375, 0.375]
    runs = [run(name, seed, scores) for seed in range(3) for name, scores in (("a", ours), ("b", theirs))]
    monkeypatch.setattr(redraw, "HERE", tmp_path)
    monkeypatch.setattr(redraw, "results", redraw.results.__wrapped__)
    monkeypatch.setattr(redraw, "claims", redraw.claims.__wrapped__)
    write_collected(Results(runs, "", "", ("iterations",), ("auc",), "figure"), tmp_path / "app/figure.json")
    test = {
        "left": "a",
        "right": "b",
        "x": "iterations",
        "y": "auc",
        "share": [0.75, 1.0],
        "expect": "lower",
    }
    first, last = (
        redraw.finding("app", {"figure": "figure"}, one) for one in redraw.comparisons({"test": [test]})
    )
    assert first.text.startswith("iterations to auc 0.375 (75% of the best plateau): a 3, b 6 ")
    assert last.text.startswith("iterations to auc 0.5 (100% of the best plateau): a 6, b never")


def test_a_target_of_a_score_is_told_as_a_share_of_the_best_plateau() -> None:
    (claim,) = (one for one in redraw.claims("hsgd")["claim"] if one["id"] == 12)
    texts = [redraw.finding("hsgd", claim, test).text for test in redraw.comparisons(claim)[:3]]
    assert [text[: text.index(" of the best")] for text in texts] == [
        "Mbit to auc 0.7 (90%",
        "Mbit to auc 0.74 (95%",
        "Mbit to auc 0.77 (99%",
    ]


def test_a_devices_work_is_that_of_an_iteration_times_its_iterations() -> None:
    """Of ecg5000, at Q = 2: 0.449 MFLOP a step, 0.152 an exchange, 0.04 MB."""
    found = redraw.results("hsgd/table2-ecg5000")
    rows = [
        row.strip("| ").split(" | ") for row in redraw.work(found, [("auc", 0.7)], "ecg5000").splitlines()
    ]
    assert rows[0] == ["variant", "seeds", "iterations to auc 0.7", "MFLOP to auc 0.7", "MB to auc 0.7"]
    (hsgd,) = (row for row in rows if row[0] == "HSGD")
    iterations, mflop, megabytes = (float(cell.partition(" ")[0]) for cell in hsgd[2:])
    assert (mflop, megabytes) == pytest.approx(
        (iterations * (0.449 + 0.152 / 2), iterations * 0.04), rel=1e-3
    )


@pytest.mark.parametrize(("figure", "factor"), [("fig6a", 0.1), ("fig6b", 10.0)])
def test_recorded_runs_are_read_at_another_computing_time(figure: str, factor: float) -> None:
    """Runs of Fig. 6 on intensive care have the seconds of Fig. 4's, read at their t_c."""
    runs = redraw.results("hsgd/fig4-sepsis2019").variants()
    for label, seeds in redraw.results(f"hsgd/{figure}-sepsis2019").variants().items():
        for seed, run in seeds.items():
            read = redraw.computing(runs[label][seed], factor)
            assert read.costs("sim-seconds") == pytest.approx(run.costs("sim-seconds"), rel=1e-6)
            assert read.series("iterations", "auc") == run.series("iterations", "auc")


@pytest.mark.parametrize(
    ("method", "seconds"),
    [("sd-feel", 118.672), ("fedavg", 153.616), ("hierfavg", 153.616), ("feel", 83.728)],
)
def test_recorded_iterations_are_read_on_the_papers_clock(method: str, seconds: float) -> None:
    """1,000 iterations at (tau1, tau2, alpha) = (2, 1, 5); with a clock of the paper's own ratio the same."""
    settings = {"method": method, "tau1": 2, "tau2": 1, "alpha": 5}
    record = {"round": 500, "iterations": 1000.0, "sim_seconds": 1.0, "central": {"loss": 1.0}}
    run = RecordedRun(ROOT, "one", 0, {"run": settings}, [record], True)
    assert redraw.retimed(run, None) is run
    assert redraw.retimed(run, "paper-text").costs("sim-seconds") == pytest.approx([seconds], rel=1e-6)
    assert redraw.retimed(run, 0.139776 / 0.01384).costs("sim-seconds") == pytest.approx([seconds], rel=1e-6)
