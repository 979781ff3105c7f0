"""The SD-FEEL app: its settings, its runs in this process, and what the paper's formulas say of them."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hedgerow.sim._compat import read_toml
from hedgerow.sim.launch import AppSpec, LoadedApp, find_app, load_app, plan_run, run_app
from hedgerow.sim.recording import read_rounds
from hedgerow.sim.settings import SettingsError
from hedgerow.strategies import FedAvg, Feel, HierFAvg, SDFeel
from hedgerow.strategies.sd_feel_theory import PRESETS, latency, preset, traffic
from sd_feel import settings

FOLDER = Path(__file__).parents[2] / "flower_apps" / "sd_feel"
METHODS = ("sd-feel", "hierfavg", "feel", "fedavg")
SPEC: AppSpec = find_app(FOLDER)
DEFAULTS: dict[str, Any] = dict(SPEC.config)

BAD: dict[str, Any] = {
    "method": "sgd",
    "iterations": 0,
    "num-clients": 0,
    "num-servers": 0,
    "topology": "moebius",
    "tau1": 0,
    "tau2": -1,
    "alpha": -1,
    "participation": 0.0,
    "clients-per-round": 0,
    "exact-if-complete": 1,
    "dataset": "mnist-9",
    "data-dir": 3,
    "partition": "dirichlet(-1)",
    "model": "resnet-9000",
    "learning-rate": 0.0,
    "batch-size": 0,
    "seed": -1,
    "latency-preset": "hopeful",
    "evaluate-every": 0,
    "train-loss-samples": -1,
    "round-timeout": 0,
    "min-replies": -1,
    "engine": "ray",
    "device": "abacus",
    "training-mode": "magic",
    "stack-nodes": -1,
    "output-dir": 1,
    "checkpoint-every": 0,
    "resume": 3,
    "quiet": 1,
}


def problems(**changes: Any) -> list[str]:
    with pytest.raises(SettingsError) as error:
        settings.read({**DEFAULTS, **changes})
    first, *rest = str(error.value).splitlines()
    assert first == "Bad settings:"
    return [line.removeprefix("  - ") for line in rest]


# Settings


def test_the_declared_keys_are_the_settings() -> None:
    declared = tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert list(declared) == list(settings.SETTINGS)


def test_the_defaults_are_valid() -> None:
    assert settings.read(DEFAULTS) == DEFAULTS


def test_the_federation_is_as_large_as_the_app_wants_it() -> None:
    assert SPEC.num_supernodes == DEFAULTS["num-clients"]


def test_the_papers_settings_are_valid_and_the_papers() -> None:
    paper = settings.read({**DEFAULTS, **read_toml(FOLDER / "paper.toml")})
    assert (paper["num-clients"], paper["num-servers"], paper["topology"]) == (50, 10, "ring")
    assert (paper["learning-rate"], paper["batch-size"], paper["partition"]) == (0.01, 10, "dirichlet(0.5)")


def test_the_papers_settings_are_keys_of_the_app() -> None:
    plan = plan_run(SPEC, [str(FOLDER / "paper.toml")])
    assert plan.num_nodes == plan.run_config["num-clients"] == 50


def test_every_setting_has_a_bad_value_here() -> None:
    assert list(BAD) == list(settings.SETTINGS)


@pytest.mark.parametrize("key", BAD)
def test_a_bad_value_is_named_with_its_key_and_what_is_valid(key: str) -> None:
    (problem,) = problems(**{key: BAD[key]})
    assert re.match(rf"{key} (=|is) {re.escape(repr(BAD[key]))}; valid is \S", problem)


def test_all_bad_values_are_in_one_error() -> None:
    # The topology is judged last, together with the number of servers.
    bad = {key: value for key, value in BAD.items() if key != "topology"}
    assert [problem.split(" = ")[0] for problem in problems(**bad)] == list(bad)


def test_settings_that_do_not_fit_together_are_in_one_error() -> None:
    first, second, third = problems(**{"num-servers": 21, "iterations": 301, "topology": "regular(50)"})
    assert first == "num-servers = 21; valid is 1 to num-clients = 20"
    assert second == "iterations = 301; valid is a multiple of 10 (tau1 tau2)"
    assert third.startswith("topology is 'regular(50)' on 21 nodes; valid is ")


def test_feel_schedules_no_more_clients_than_there_are() -> None:
    (problem,) = problems(**{"method": "feel", "clients-per-round": 21})
    assert problem == "clients-per-round = 21; valid is 1 to num-clients = 20"


def test_the_rounds_of_feel_are_tau1_iterations() -> None:
    assert settings.read({**DEFAULTS, "method": "feel", "iterations": 305})["iterations"] == 305
    (problem,) = problems(method="feel", iterations=301)
    assert problem == "iterations = 301; valid is a multiple of 5 (tau1)"


@pytest.mark.parametrize("method", ["feel", "fedavg"])
def test_methods_without_edge_servers_do_not_ask_for_their_number(method: str) -> None:
    settings.read({**DEFAULTS, "method": method, "num-clients": 3, "num-servers": 4, "clients-per-round": 2})


@pytest.mark.parametrize("method", ["hierfavg", "feel", "fedavg"])
def test_methods_without_gossip_do_not_ask_for_a_topology(method: str) -> None:
    settings.read({**DEFAULTS, "method": method, "topology": "moebius"})


def test_the_engines_faults_may_stand_beside_the_apps_settings() -> None:
    assert settings.read({**DEFAULTS, "fault-dropout": 0.5}) == DEFAULTS


@pytest.mark.parametrize("key", ["dataset", "model"])
def test_a_users_own_data_and_model_go_by_import_path(key: str) -> None:
    assert settings.read({**DEFAULTS, key: "mine.things:make"})[key] == "mine.things:make"


# Strategies


def strategy_of(**changes: Any) -> Any:
    values = settings.read({**DEFAULTS, **changes})
    return settings.build_strategy(values, num_params=10, flops_per_iteration=100.0)


@pytest.mark.parametrize(
    ("method", "kind"), [*zip(METHODS, (SDFeel, HierFAvg, Feel, FedAvg), strict=True)], ids=METHODS
)
def test_each_method_builds_its_strategy(method: str, kind: type) -> None:
    strategy = strategy_of(method=method)
    assert type(strategy) is kind
    assert strategy.num_clients == 20


def test_the_settings_reach_the_strategy() -> None:
    changes = {"topology": "complete", "exact-if-complete": True, "participation": 0.25, "seed": 9}
    strategy = strategy_of(**changes, **{"min-replies": 3})
    assert (strategy.num_servers, strategy.local_steps, strategy.tau2, strategy.alpha) == (4, 5, 2, 2)
    assert strategy.exact_if_complete
    assert strategy.graph.number_of_edges() == 6
    assert strategy.participation == 0.25
    assert strategy.settings.seed == 9
    assert strategy.settings.min_train_nodes == 3
    assert strategy_of(method="feel", **{"clients-per-round": 7}).clients_per_round == 7


def test_a_round_of_fedavg_is_a_block_of_sd_feel() -> None:
    assert strategy_of(method="fedavg").local_steps == 10


@pytest.mark.parametrize("name", PRESETS)
def test_the_clock_is_that_of_the_preset(name: str) -> None:
    expected = preset(name, num_params=10, flops_per_iteration=100.0)
    assert strategy_of(**{"latency-preset": name}).system == expected


# Runs

LOGISTIC_PARAMETERS = 7_850
LOGISTIC_MACS = 7_840
SMALL: dict[str, Any] = {
    "num-clients": 6,
    "num-servers": 3,
    "clients-per-round": 4,
    "tau1": 2,
    "tau2": 2,
    "iterations": 8,
    "model": "logistic",
    "evaluate-every": 1,
}
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def loaded() -> LoadedApp:
    return load_app(FOLDER)


@pytest.fixture
def run(loaded: LoadedApp, tmp_path: Path) -> Run:
    """Run the app with changed settings; return its rounds, without what they took in real seconds."""

    def go(strict: bool = False, **changes: Any) -> list[dict[str, Any]]:
        before = set(tmp_path.iterdir())
        overrides = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, **changes}.items()]
        plan = plan_run(SPEC, [*overrides, f"output-dir={json.dumps(str(tmp_path))}"])
        run_app(loaded, plan, strict=strict)
        (folder,) = set(tmp_path.iterdir()) - before
        rounds = read_rounds(folder)
        assert all(record.pop("wall_seconds") >= 0 for record in rounds)
        return rounds

    return go


def losses(rounds: list[dict[str, Any]]) -> list[float]:
    return [record["central"]["loss"] for record in rounds if record["central"]]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_a_folder_and_prints_a_table(
    run: Run, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = run(method=method)
    (folder,) = tmp_path.iterdir()
    assert {"config.json", "rounds.jsonl", "summary.json"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.rglob("*.partial"))
    config = json.loads((folder / "config.json").read_text())
    expected = {**DEFAULTS, **SMALL, "method": method, "output-dir": str(tmp_path)}
    assert (config["app"], config["run"]) == ("sd_feel", expected)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["lost-replies"]) == ("completed", {})
    assert summary["last"]["round"] == rounds[-1]["round"] == (2 if method == "fedavg" else 4)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{method} on mnist-5k (simulated seconds: preset honest)")
    assert f"{rounds[-1]['central']['loss']:.4f}" in printed
    assert f"Run folder: {folder}" in printed


@pytest.mark.parametrize("method", METHODS)
def test_training_learns(run: Run, method: str) -> None:
    first, *_, last = run(method=method, **{"learning-rate": 0.05, "iterations": 40})
    assert last["central"]["accuracy"] > 0.6 > first["central"]["accuracy"]
    assert last["central"]["loss"] < first["central"]["loss"] / 2


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_bits_twice(run: Run, method: str) -> None:
    changes = {"method": method, "participation": 0.7, "seed": 5}
    assert run(**changes) == run(**changes)


@pytest.mark.parametrize("method", METHODS)
def test_another_seed_gives_another_run(run: Run, method: str) -> None:
    one, other = losses(run(method=method, seed=5)), losses(run(method=method, seed=6))
    assert all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("changes", [{"strict": True}, {"engine": "inprocess"}], ids=str)
def test_how_messages_travel_does_not_move_a_bit(run: Run, changes: dict[str, Any]) -> None:
    assert run(**changes) == run()


def test_the_loop_and_the_stack_learn_the_same(run: Run) -> None:
    loop, stack = (losses(run(**{"training-mode": mode})) for mode in ("loop", "stack"))
    assert loop == pytest.approx(stack, rel=1e-4)


def test_fedavg_is_hierfavg_with_an_exchange_after_every_round(run: Run) -> None:
    hierarchical = losses(run(method="hierfavg", tau2=1))
    assert losses(run(method="fedavg", tau2=1)) == pytest.approx(hierarchical, rel=1e-5)


def test_one_sd_feel_server_is_fedavg(run: Run) -> None:
    one_server = losses(run(method="sd-feel", tau2=1, **{"num-servers": 1}))
    assert losses(run(method="fedavg", tau2=1)) == pytest.approx(one_server, rel=1e-5)


@pytest.mark.parametrize(("every", "evaluated"), [(1, [0, 1, 2, 3, 4]), (3, [0, 3, 4]), (9, [0, 4])])
def test_evaluations_come_first_last_and_as_often_as_asked(
    run: Run, every: int, evaluated: list[int]
) -> None:
    rounds = run(**{"evaluate-every": every})
    assert [record["round"] for record in rounds if record["central"]] == evaluated


@pytest.mark.parametrize("latency_preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_simulated_seconds_are_the_papers_latency(run: Run, method: str, latency_preset: str) -> None:
    # Forward and backward of a batch of ten: three times the multiply-accumulates of a forward pass.
    flops = 3 * 10 * LOGISTIC_MACS
    system = preset(latency_preset, num_params=LOGISTIC_PARAMETERS, flops_per_iteration=flops)
    expected = latency(method, system, K=8, tau1=2, tau2=2, alpha=DEFAULTS["alpha"])
    rounds = run(method=method, **{"latency-preset": latency_preset})
    assert rounds[0]["sim_seconds"] == 0
    assert rounds[-1]["sim_seconds"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_bits_are_the_closed_form_of_the_traffic(run: Run, method: str) -> None:
    models = traffic(
        method,
        K=8,
        tau1=2,
        tau2=2,
        alpha=DEFAULTS["alpha"],
        num_clients=SMALL["clients-per-round"] if method == "feel" else SMALL["num-clients"],
        num_servers=SMALL["num-servers"],
        num_edges=3,
    )
    rounds = run(method=method)
    assert rounds[0]["bits"] == 0
    assert rounds[-1]["bits"] == 32 * LOGISTIC_PARAMETERS * sum(models.values())


def test_payloads_are_the_models_bytes_and_their_headers(run: Run) -> None:
    last = run()[-1]
    models = last["bits"] // (32 * LOGISTIC_PARAMETERS)
    headers = last["payload_bytes"] - last["bits"] // 8
    assert 2 * 100 < headers / models < 2 * 160  # two arrays a model: a .npy header and a key each


def test_fewer_participants_send_fewer_bits_in_the_same_time(run: Run) -> None:
    every, some = run()[-1], run(participation=0.5)[-1]
    assert some["bits"] < every["bits"]
    assert some["sim_seconds"] == every["sim_seconds"]


def test_lost_replies_are_counted_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    rounds = run(iterations=16, **{"fault-corrupt": "nan", "fault-corrupt-rate": 0.3, "seed": 1})
    lost = sum(record["sent"] - record["accepted"] for record in rounds)
    assert lost > 0
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["lost-replies"] == {"non-finite": lost}


def test_bad_settings_stop_a_run_before_it_writes_anything(
    loaded: LoadedApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"tau1 = 0; valid is an integer >= 1\n.*batch-size = -1"):
        run_app(loaded, plan_run(SPEC, ["tau1=0 batch-size=-1"]))
    assert not list(tmp_path.iterdir())
