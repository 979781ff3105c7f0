"""What a user asks of a run is checked whole before anything starts, and reaches Flower unchanged."""

import json
from pathlib import Path

import pytest
from tests.flower_apps.cases import CASES, AppCase
from tests.sim.tiny_app import MakeApp

from hedgerow.sim import AppSpec, find_app, plan_run, read_rounds, run_app
from hedgerow.sim.engine._compat import read_toml
from hedgerow.sim.runs.plan import toml_text


def test_overrides_are_toml_and_later_ones_win(tiny: AppSpec, tmp_path: Path) -> None:
    (tmp_path / "paper.toml").write_text('label = "paper"\nlr = 0.25\n[model]\nwidth = 7\n')
    plan = plan_run(tiny, ["lr=0.1 fail=true", str(tmp_path / "paper.toml"), 'label="two words" lr=1'])
    assert plan.run_config == {**tiny.config, "fail": True, "label": "two words", "lr": 1.0, "model.width": 7}


def test_one_error_lists_every_bad_override(tiny: AppSpec) -> None:
    with pytest.raises(ValueError, match="no such key") as raised:
        plan_run(tiny, ["nope=1 lr=true num-server-rounds=2.5 fail=1 fault-dropout=7"])
    text = str(raised.value)
    for line in (
        "nope=1: app 'tiny-app' has no such key",
        "lr must be a number, like 0.5, got True",
        "num-server-rounds must be an integer, like 2, got 2.5",
        "fail must be true or false, like false, got 1",
        "fault-dropout=7: dropout must be a number in [0, 1], got 7.0",
        "valid keys: device, fail, label, lr, model.width, num-server-rounds, output-dir",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("lr", "run config must be 'key=value"),
        ("lr=0.1 oops", "run config must be 'key=value"),
        ("lr=fast", "lr must be a number, like 0.5, got fast"),
        ("lr=[1]", "lr must be true, false, a number or a text"),
        ("missing.toml", "missing.toml"),
    ],
)
def test_an_override_that_cannot_be_read_is_named(tiny: AppSpec, override: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_run(tiny, [override])


def test_a_device_that_the_app_does_not_ask_for_is_refused(tiny: AppSpec) -> None:
    config = {key: value for key, value in tiny.config.items() if key != "device"}
    bare = AppSpec(tiny.name, tiny.folder, config, tiny.components, None)
    with pytest.raises(ValueError, match="device='cpu': app 'tiny-app' has no such key"):
        plan_run(bare, device="cpu")
    assert "device" not in plan_run(bare).run_config


def test_the_number_of_nodes_comes_from_user_then_config_then_app_then_flower(tiny: AppSpec) -> None:
    def of(clients: int | None, supernodes: int | None) -> AppSpec:
        config = tiny.config if clients is None else {**tiny.config, "num-clients": clients}
        return AppSpec(tiny.name, tiny.folder, config, tiny.components, supernodes)

    assert plan_run(of(None, None)).num_nodes == 2
    assert plan_run(of(None, 5)).num_nodes == 5
    assert plan_run(of(0, 5)).num_nodes == 5
    assert plan_run(of(7, 5)).num_nodes == 7
    assert plan_run(of(7, 5), ["num-clients=9"]).num_nodes == 9
    assert plan_run(of(7, 5), num_nodes=3).num_nodes == 3
    assert plan_run(of(7, 5), num_nodes=3).run_config["num-clients"] == 3
    with pytest.raises(ValueError, match="num-clients must be 3 with 3 nodes, got 9"):
        plan_run(of(7, 5), ["num-clients=9"], num_nodes=3)
    with pytest.raises(ValueError, match=r"num_nodes must be an integer in \[1, \d+\], got 0"):
        plan_run(tiny, num_nodes=0)


@pytest.mark.parametrize("clients", [0, -3])
def test_no_clients_are_refused_unless_the_app_says_so_itself(tiny: AppSpec, clients: int) -> None:
    def of(default: int) -> AppSpec:
        return AppSpec(tiny.name, tiny.folder, {**tiny.config, "num-clients": default}, tiny.components, 5)

    with pytest.raises(ValueError, match=f"num-clients must be an integer >= 1, got {clients}"):
        plan_run(of(7), [f"num-clients={clients}"])
    assert plan_run(of(0), ["num-clients=0"]).num_nodes == 5


def test_an_app_may_have_nodes_beside_its_clients(make_app: MakeApp) -> None:
    more = "relays = 2\n[tool.hedgerow]\nnum-supernodes = 4\n[tool.hedgerow.more-nodes]\n"
    tiny = find_app(make_app(extra=f"{more}relays = {{ label = 'mine' }}"))
    assert tiny.num_nodes() == 4
    assert tiny.num_nodes({**tiny.config, "label": "mine"}) == 6
    with pytest.raises(ValueError, match="num_nodes must be above relays=2, which are nodes too, got 2"):
        plan_run(tiny, ["label=mine"], num_nodes=2)
    with pytest.raises(ValueError, match=r"more-nodes.*names 'colour'; valid are keys of"):
        find_app(make_app(folder="bad", extra=f"{more}label = {{ colour = 'red' }}"))


def test_faults_need_not_be_declared(tiny: AppSpec) -> None:
    plan = plan_run(tiny, ["fault-dropout=0.5 fault-delay=uniform:1,2"])
    assert plan.faults is not None
    assert plan.faults.dropout == 0.5
    # They determine the run, so its record must have them.
    assert plan.run_config == {**tiny.config, "fault-dropout": 0.5, "fault-delay": "uniform:1,2"}


def test_what_flower_reads_is_what_was_planned(tiny: AppSpec, tmp_path: Path) -> None:
    awkward = {**tiny.config, "label": "a \"b\" 'c' \\ ü\n🌱", "lr": 1e-7, "fail": True, "x": float("inf")}
    (tmp_path / "run.toml").write_text(toml_text(awkward), encoding="utf-8")
    assert read_toml(tmp_path / "run.toml") == awkward


@pytest.mark.parametrize(
    ("app", "overrides", "iterations"),
    [
        ("sd-feel", "num-rounds=6 tau1=7 tau2=3", 42),
        ("sd-feel", "num-rounds=6 method=fedavg tau1=7 tau2=3", 126),
        # Nodes with intervals of 2 and 3 communicate at 2, 3, 4, 6, 8 and 9.
        ("ceps", "num-rounds=6 interval-low=2 interval-high=3", 10),
        ("ceps", "num-rounds=6 method=d-psgd local-steps=5", 31),
        ("hsgd", "num-rounds=6 local-interval=2 global-interval=4", 24),
    ],
)
def test_every_app_takes_communication_rounds(app: str, overrides: str, iterations: int) -> None:
    assert plan_run(find_app(app), [overrides]).run_config["iterations"] == iterations


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_so_many_rounds_are_made_and_recorded(case: AppCase, tmp_path: Path) -> None:
    small = {key: value for key, value in case.small.items() if key not in ("iterations", "num-rounds")}
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in small.items())
    plan = plan_run(case.spec, [f"{settings} num-rounds=4 quiet=true output-dir={json.dumps(str(tmp_path))}"])
    run_app(case.loaded, plan)
    (folder,) = tmp_path.iterdir()
    assert [record["round"] for record in read_rounds(folder)] == [0, 1, 2, 3, 4]


def test_rounds_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="num-rounds must be an integer >= 1, got 0"):
        plan_run(find_app("ceps"), ["num-rounds=0"])


def test_rounds_that_do_not_fit_the_periods_are_refused() -> None:
    with pytest.raises(ValueError, match=r"iterations must be a multiple of 21 \(tau1 tau2\), got 28"):
        plan_run(find_app("sd-feel"), ["num-rounds=4 tau1=7 tau2=3"])


@pytest.mark.parametrize("text", ["2", "true", "1.50", "two", '"2"'])
def test_a_text_needs_no_quotes(tiny: AppSpec, text: str) -> None:
    assert plan_run(tiny, [f"label={text}"]).run_config["label"] == text.strip('"')


def test_a_key_has_one_value_in_an_option(tiny: AppSpec) -> None:
    assert plan_run(tiny, ["lr=0.5 lr=0.5", "lr=0.25"]).run_config["lr"] == 0.25
    with pytest.raises(ValueError, match=r"lr must be given once, got 0\.5 and 0\.25"):
        plan_run(tiny, ["lr=0.5 lr=0.25"])
