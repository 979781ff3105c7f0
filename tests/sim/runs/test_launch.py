"""An app folder runs here with one command, and on Flower's engine with the same one."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hedgerow.sim.runs import launch
from hedgerow.sim.cli.main import app as cli
from hedgerow.sim.runs.launch import AppSpec, find_app, flower_run, load_app, plan_run, run_app

PYPROJECT = """
[project]
name = "tiny-app"
version = "1.0.0"
description = "An app for tests"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"
[tool.flwr.app.config]
num-server-rounds = 2
lr = 0.5
fail = false
label = "plain"
output-dir = ""
device = "cpu"
model.width = 3
"""

CLIENT_APP = """
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    step = context.run_config["lr"] * (context.node_config["partition-id"] + 1)
    arrays = [array + step for array in message.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
"""

SERVER_APP = """
import json
from pathlib import Path
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    if config["fail"]:
        raise RuntimeError("asked to fail")
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3)
    initial = ArrayRecord([np.zeros(config["model.width"])])
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=config["num-server-rounds"])
    out = {
        "arrays": result.arrays.to_numpy_ndarrays()[0].tolist(),
        "label": config["label"],
        "device": config["device"],
        "nodes": len(list(grid.get_node_ids())),
    }
    folder = Path(config["output-dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(out))
"""

MakeApp = Callable[..., Path]


@pytest.fixture
def make_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeApp]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    modules = set(sys.modules)

    def make(package: str = "tinyapp", extra: str = "", folder: str = "app") -> Path:
        home = tmp_path / folder
        (home / package).mkdir(parents=True)
        (home / "pyproject.toml").write_text(PYPROJECT.format(package=package) + textwrap.dedent(extra))
        (home / package / "__init__.py").touch()
        (home / package / "client_app.py").write_text(CLIENT_APP)
        (home / package / "server_app.py").write_text(SERVER_APP)
        return home

    yield make
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("tinyapp", "other_app"):
            del sys.modules[name]


def result(folder: Path) -> dict[str, object]:
    out: dict[str, object] = json.loads((folder / "result.json").read_text())
    return out


# Reading an app


def test_an_app_is_found_by_folder(make_app: MakeApp) -> None:
    home = make_app()
    spec = find_app(home)
    assert (spec.name, spec.folder) == ("tiny-app", home)
    assert spec.config["model.width"] == 3
    assert spec.components["clientapp"] == "tinyapp.client_app:app"


def test_an_app_is_found_by_module(make_app: MakeApp) -> None:
    home = make_app()
    sys.path.insert(0, str(home))
    assert find_app("tinyapp").folder == home
    assert find_app("tinyapp.server_app").folder == home


def test_what_is_no_app_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nor an importable module"):
        find_app(tmp_path / "nowhere")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    with pytest.raises(ValueError, match=r"Missing \[tool.flwr.app\]"):
        find_app(tmp_path)


def test_a_component_of_the_wrong_kind_is_refused(make_app: MakeApp) -> None:
    home = make_app()
    pyproject = home / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(text.replace("tinyapp.client_app:app", "tinyapp.server_app:app"))
    with pytest.raises(ValueError, match="is a ServerApp, not a ClientApp"):
        load_app(home)
    pyproject.write_text(text.replace("tinyapp.client_app:app", "tinyapp.client_app:nothing"))
    with pytest.raises(ValueError, match="is a NoneType, not a ClientApp"):
        load_app(home)


def test_two_apps_with_one_package_name_are_not_mixed_up(make_app: MakeApp) -> None:
    load_app(make_app(folder="first"))
    second = make_app(folder="second")
    with pytest.raises(ValueError, match=r"already imported from .*first"):
        load_app(second)


# Planning a run


@pytest.fixture
def spec(make_app: MakeApp) -> AppSpec:
    return find_app(make_app())


def test_overrides_are_toml_and_later_ones_win(spec: AppSpec, tmp_path: Path) -> None:
    (tmp_path / "paper.toml").write_text('label = "paper"\nlr = 0.25\n[model]\nwidth = 7\n')
    plan = plan_run(
        spec,
        ["lr=0.1 fail=true", str(tmp_path / "paper.toml"), 'label="two words" lr=1'],
    )
    assert plan.run_config == {
        **spec.config,
        "fail": True,
        "label": "two words",
        "lr": 1.0,
        "model.width": 7,
    }


def test_a_text_need_not_be_quoted(spec: AppSpec) -> None:
    assert plan_run(spec, ["label=ring output-dir=/a/b"]).run_config["label"] == "ring"


def test_a_whole_number_will_do_for_a_float(spec: AppSpec) -> None:
    lr = plan_run(spec, ["lr=2"]).run_config["lr"]
    assert (lr, type(lr)) == (2.0, float)


def test_one_error_lists_every_bad_override(spec: AppSpec) -> None:
    with pytest.raises(ValueError, match="no such key") as raised:
        plan_run(spec, ["nope=1 lr=true num-server-rounds=2.5 fail=1 fault-dropout=7"])
    text = str(raised.value)
    for line in (
        "nope=1: app 'tiny-app' has no such key",
        "lr=True: a float is needed, like 0.5",
        "num-server-rounds=2.5: a int is needed, like 2",
        "fail=1: a bool is needed, like False",
        "fault-dropout=7: dropout: 7.0 is not in [0, 1]",
        "valid keys: device, fail, label, lr, model.width, num-server-rounds, output-dir",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("lr", "is not 'key=value"),
        ("lr=0.1 oops", "is not 'key=value"),
        ("lr=fast", "lr=fast: a float is needed, like 0.5"),
        ("lr=[1]", "a bool, int, float or text is needed"),
        ("missing.toml", "missing.toml"),
    ],
)
def test_an_override_that_cannot_be_read_is_named(spec: AppSpec, override: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_run(spec, [override])


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "auto"])
def test_the_device_goes_into_the_run_config(spec: AppSpec, device: str) -> None:
    assert plan_run(spec, device=device).run_config["device"] == device


def test_a_device_that_is_none_is_refused(spec: AppSpec) -> None:
    with pytest.raises(ValueError, match="device: 'gpu' is not cpu, cuda, cuda:N or auto"):
        plan_run(spec, device="gpu")


def test_a_device_that_the_app_does_not_ask_for_is_refused(spec: AppSpec) -> None:
    config = {key: value for key, value in spec.config.items() if key != "device"}
    bare = AppSpec(spec.name, spec.folder, config, spec.components, None)
    with pytest.raises(ValueError, match="device='cpu': app 'tiny-app' has no such key"):
        plan_run(bare, device="cpu")
    assert "device" not in plan_run(bare).run_config


def test_the_number_of_nodes_comes_from_user_then_config_then_app_then_flower(spec: AppSpec) -> None:
    def of(clients: int | None, supernodes: int | None) -> AppSpec:
        config = spec.config if clients is None else {**spec.config, "num-clients": clients}
        return AppSpec(spec.name, spec.folder, config, spec.components, supernodes)

    assert plan_run(of(None, None)).num_nodes == 2
    assert plan_run(of(None, 5)).num_nodes == 5
    assert plan_run(of(0, 5)).num_nodes == 5
    assert plan_run(of(7, 5)).num_nodes == 7
    assert plan_run(of(7, 5), ["num-clients=9"]).num_nodes == 9
    assert plan_run(of(7, 5), num_nodes=3).num_nodes == 3
    assert plan_run(of(7, 5), num_nodes=3).run_config["num-clients"] == 3
    with pytest.raises(ValueError, match="num-clients=9: 3 nodes were asked for"):
        plan_run(of(7, 5), ["num-clients=9"], num_nodes=3)
    with pytest.raises(ValueError, match="num_nodes: 0 is not >= 1"):
        plan_run(spec, num_nodes=0)


def test_the_apps_own_size_is_read_from_its_pyproject(make_app: MakeApp) -> None:
    assert find_app(make_app(extra="[tool.hedgerow]\nnum-supernodes = 4")).num_supernodes == 4
    with pytest.raises(ValueError, match="num-supernodes = 0 is not an integer >= 1"):
        find_app(make_app(folder="bad", extra="[tool.hedgerow]\nnum-supernodes = 0"))


def test_an_app_may_have_nodes_beside_its_clients(make_app: MakeApp) -> None:
    more = "relays = 2\n[tool.hedgerow]\nnum-supernodes = 4\n[tool.hedgerow.more-nodes]\n"
    spec = find_app(make_app(extra=f"{more}relays = {{ label = 'mine' }}"))
    assert spec.num_nodes() == 4
    assert spec.num_nodes({**spec.config, "label": "mine"}) == 6
    with pytest.raises(ValueError, match="num_nodes: 2 is not above relays=2, which are nodes too"):
        plan_run(spec, ["label=mine"], num_nodes=2)
    with pytest.raises(ValueError, match=r"more-nodes.*names 'colour'; valid are keys of"):
        find_app(make_app(folder="bad", extra=f"{more}label = {{ colour = 'red' }}"))


def test_faults_need_not_be_declared(spec: AppSpec) -> None:
    plan = plan_run(spec, ["fault-dropout=0.5 fault-delay=uniform:1,2"])
    assert plan.faults is not None
    assert plan.faults.dropout == 0.5
    # They determine the run, so its record must have them.
    assert plan.run_config == {**spec.config, "fault-dropout": 0.5, "fault-delay": "uniform:1,2"}


# Running


def test_an_app_runs_in_process(make_app: MakeApp, tmp_path: Path) -> None:
    loaded = load_app(make_app())
    plan = plan_run(loaded.spec, ["output-dir=out label=mine"], num_nodes=3, device="cuda:1")
    context = run_app(loaded, plan)
    # Two rounds of lr * mean(1, 2, 3).
    out = result(tmp_path / "out")
    np.testing.assert_allclose(out.pop("arrays"), [2.0] * 3)
    assert out == {"label": "mine", "device": "cuda:1", "nodes": 3}
    assert context.run_config["label"] == "mine"


def test_a_plans_faults_reach_the_nodes(make_app: MakeApp, tmp_path: Path) -> None:
    loaded = load_app(make_app())
    run_app(loaded, plan_run(loaded.spec, ["output-dir=out fault-crash=2:1"], num_nodes=4))
    # One of four nodes is dead from the start: mean(1, 2, 4), and then three are left.
    assert result(tmp_path / "out")["nodes"] == 3
    np.testing.assert_allclose(result(tmp_path / "out")["arrays"], [7 / 3] * 3)


def test_the_command_line_runs_an_app(make_app: MakeApp, tmp_path: Path) -> None:
    home = make_app()
    shown = CliRunner().invoke(
        cli, ["run", str(home), "--nodes", "3", "--strict", "-c", "output-dir=out", "-c", "lr=1"]
    )
    assert shown.exit_code == 0, shown.output
    np.testing.assert_allclose(result(tmp_path / "out")["arrays"], [4.0] * 3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-c", "nope=1"], "has no such key"),
        (["--device", "gpu"], "device: 'gpu'"),
        (["--engine", "flower", "--strict"], "no strict mode"),
        (["--engine", "flower", "-c", "fault-dropout=0.1"], "plays no faults"),
        (["--engine", "ray"], "flower"),
    ],
)
def test_bad_options_exit_with_2(make_app: MakeApp, arguments: list[str], text: str) -> None:
    shown = CliRunner().invoke(cli, ["run", str(make_app()), *arguments])
    assert shown.exit_code == 2
    assert text in shown.output


def test_an_app_that_fails_exits_with_1(make_app: MakeApp) -> None:
    shown = CliRunner().invoke(cli, ["run", str(make_app()), "-c", "fail=true"])
    assert shown.exit_code == 1
    assert isinstance(shown.exception, RuntimeError)


def test_help_imports_neither_flower_nor_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from hedgerow.sim.cli.main import app; "
        "shown = CliRunner().invoke(app, ['--help']); assert 'run' in shown.output; "
        "print(sorted({'flwr', 'torch'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


# On Flower's own engine


def test_what_flower_reads_is_what_was_planned(spec: AppSpec, tmp_path: Path) -> None:
    from hedgerow.sim.engine._compat import read_toml

    awkward = {**spec.config, "label": "a \"b\" 'c' \\ ü\n🌱", "lr": 1e-7, "fail": True, "x": float("inf")}
    (tmp_path / "run.toml").write_text(launch.toml_text(awkward), encoding="utf-8")
    assert read_toml(tmp_path / "run.toml") == awkward


@pytest.mark.parametrize(
    ("options", "text"),
    [({"client_cpus": 0}, "client_cpus: 0"), ({"client_gpus": -0.5}, "client_gpus: -0.5")],
)
def test_resources_out_of_range_are_refused(spec: AppSpec, options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        flower_run(spec, **options)  # type: ignore[arg-type]


def superlinks() -> set[str]:
    table = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in table.splitlines() if "flower-superlink" in line}


@pytest.mark.slow
def test_flowers_engine_gives_the_same_numbers_and_leaves_nothing_running(
    make_app: MakeApp, tmp_path: Path
) -> None:
    before = superlinks()
    loaded = load_app(make_app())
    run_app(loaded, plan_run(loaded.spec, ["output-dir=here"], num_nodes=3))
    assert flower_run(loaded.spec, plan_run(loaded.spec, ["output-dir=there"], num_nodes=3)) == 0
    here, there = result(tmp_path / "here"), result(tmp_path / "there")
    # FedAvg sums in the order of the replies, which is not Flower's to promise.
    np.testing.assert_allclose(there.pop("arrays"), here.pop("arrays"), rtol=1e-12)
    assert there == here
    assert superlinks() <= before


@pytest.mark.slow
def test_a_run_that_fails_on_flowers_engine_exits_with_1(make_app: MakeApp) -> None:
    before = superlinks()
    spec = find_app(make_app())
    assert flower_run(spec, plan_run(spec, ["fail=true"])) == 1
    assert superlinks() <= before
