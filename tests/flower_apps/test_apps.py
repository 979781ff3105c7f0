"""What holds of every app: its settings, its run folder, its bits."""

import json
from functools import partial
from pathlib import Path

import pytest
from tests.flower_apps.cases import CASES, SIMILARITY_FREE, AppCase, Run, losses
from tests.flower_apps.test_settings import problems

from hedgerow.sim import find_app, load, plan_run, plan_sweep, read_config, read_sweep
from hedgerow.sim.runs.compare import where
from hedgerow.sim.runs.settings_files import pyproject_with
from hedgerow.wire import HUB_TO_NODE, NODE_TO_HUB

every_app = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
# Apps whose rounds are known beforehand, and whose nodes train a model that a server averages.
every_averaging_app = pytest.mark.parametrize(
    "case", [case for case in CASES if case.rounds], ids=[case.name for case in CASES if case.rounds]
)


@pytest.fixture
def run(case: AppCase, tmp_path: Path) -> Run:
    return partial(case.run, tmp_path)


# Settings


@every_app
def test_the_apps_pyproject_has_the_defaults_of_its_settings(case: AppCase) -> None:
    text = (case.folder / "pyproject.toml").read_text()
    assert pyproject_with(case.settings.SETTINGS, text) == text, f"hedgerow settings {case.folder} --write"


@every_app
def test_the_federation_is_as_large_as_the_app_wants_it(case: AppCase) -> None:
    assert case.spec.num_supernodes == case.defaults["num-clients"]


@pytest.mark.parametrize(
    ("case", "preset"),
    [
        (case, file)
        for case in CASES
        for file in sorted(case.folder.glob("*.toml"))
        if file.stem != "pyproject"
    ],
    ids=lambda one: one.stem if isinstance(one, Path) else one.name,
)
def test_a_file_of_settings_has_valid_keys_of_the_app(case: AppCase, preset: Path) -> None:
    plan = plan_run(case.spec, [str(preset)])
    assert case.settings.read(plan.run_config).run_config == plan.run_config
    assert plan.num_nodes == plan.run_config["num-clients"]


@every_app
def test_more_replies_than_there_can_be_are_refused(case: AppCase) -> None:
    asked = case.defaults["num-clients"] + 1
    (problem,) = problems(case, **{"min-replies": asked})
    assert problem.startswith("min-replies must be at most ")
    assert problem.endswith(f", got {asked}")


@every_app
@pytest.mark.parametrize("key", ["dataset", "model"])
def test_a_users_own_data_and_model_go_by_import_path(case: AppCase, key: str) -> None:
    assert case.settings.read({**case.defaults, key: "mine.things:make"}).of(key) == "mine.things:make"


@pytest.mark.parametrize(
    ("case", "figure"),
    [(case, file) for case in CASES for file in sorted(case.folder.glob("figures/*.toml"))],
    ids=lambda value: value.stem if isinstance(value, Path) else value.name,
)
def test_every_run_of_a_figure_is_one_that_the_app_accepts(
    case: AppCase, figure: Path, tmp_path: Path
) -> None:
    sweep = read_sweep(figure)
    plan = plan_sweep(sweep, tmp_path)
    for job in plan:
        # Of every variant one seed: the others differ in nothing else.
        if job.seed == plan[0].seed:
            app = find_app(job.variant.app or sweep.app).folder
            (its,) = (one for one in CASES if one.folder == app)
            assert its.settings.read(job.settings).seed == job.seed


# Runs


@every_app
def test_a_run_prints_a_table_and_tells_its_folder_its_engine_and_the_traffic_of_each_link(
    case: AppCase, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = run()
    (folder,) = tmp_path.iterdir()
    printed = capsys.readouterr().out
    config = read_config(folder)
    # The run config says what an app under ``flwr run`` does; the environment says what was.
    assert (config["run"]["engine"], config["environment"]["engine"]) == ("flower", "inprocess")
    assert config["environment"]["app-git"] == config["environment"]["git"]
    (one,) = load([folder]).runs
    assert all(where(one, y) and "not say" not in where(one, y) for y in one.metrics)
    links = json.loads((folder / "summary.json").read_text())["by_link"]
    assert links == rounds[-1]["by_link"]
    modelled = [traffic for link, traffic in links.items() if link not in (HUB_TO_NODE, NODE_TO_HUB)]
    for key, total in (("nominal_bits", "bits"), ("payload_bytes", "payload_bytes")):
        assert sum(traffic[key] for traffic in modelled) == rounds[-1][total]
    assert "hub MB" in printed
    assert printed.startswith(f"{case.method} on {case.learnt}, ")
    assert f"{rounds[-1]['central']['loss']:.4f}" in printed
    assert f"Run folder: {folder}" in printed
    # Of CEPS and its baselines models stay on the nodes.
    on_nodes = case.name == "ceps"
    assert (
        "No model.npz: the server has no model; each node's is in the folder 'nodes'." in printed
    ) == on_nodes


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.rounds and "training-mode" in case.defaults],
    ids=lambda case: case.name,
)
def test_the_loop_and_the_stack_learn_the_same(case: AppCase, run: Run) -> None:
    loop, stack = (losses(run(**{"training-mode": mode})) for mode in ("loop", "stack"))
    assert loop == pytest.approx(stack, rel=1e-4)


@every_averaging_app
def test_evaluations_come_first_last_and_as_often_as_asked(case: AppCase, run: Run) -> None:
    rounds = run(**{"evaluate-every": 2})
    last = case.rounds[case.method]
    expected = [k for k in range(last + 1) if k % 2 == 0 or k == last]
    assert [record["round"] for record in rounds if record["central"]] == expected


def test_lost_replies_are_counted_in_the_summary(tmp_path: Path) -> None:
    faults = {"fault-corrupt": "nan", "fault-corrupt-rate": 0.3, "seed": 1, "min-replies": 1}
    rounds = SIMILARITY_FREE.run(tmp_path, **faults)
    lost = sum(record["sent"] - record["accepted"] for record in rounds)
    assert lost > 0
    (folder,) = tmp_path.iterdir()
    told = json.loads((folder / "summary.json").read_text())["lost-replies"]
    # Who rests after three of them was sent nothing.
    assert sum(told.values()) - told.get("quarantined", 0) - told.get("offline", 0) == lost
