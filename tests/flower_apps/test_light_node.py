"""What a device need not have: packages of the extras, without which an app imports, trains and evaluates."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from hedgerow.tasks import write_group_split
from hedgerow.wire.extras import MissingExtraError, needed

APPS = Path(__file__).parents[2] / "flower_apps"
# Nothing that is no dependency of flwr or torch, but threadpoolctl and safetensors.
EXTRAS = ("PIL", "datasets", "matplotlib", "mlxtend", "pandas", "pyarrow", "ray", "scipy", "sklearn")

CODE = """
import json, sys
from importlib import import_module

absent, apps, runs = json.loads(sys.argv[1])

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
for folder, module in apps:
    sys.path.insert(0, folder)
    import_module(module)
print("A ClientApp imports:", sorted({"networkx", "scipy"} & set(sys.modules)))

from hedgerow.sim import load_app, plan_run, read_rounds, run_app
from hedgerow.sim.deploy.supernode import read_split

for folder, split, settings in runs:
    app, own = load_app(folder), read_split(split)
    told = [f"{key}={json.dumps(value)}" for key, value in own.run_config.items()]
    run_app(app, plan_run(app.spec, [*told, settings]), node_configs=own.node_configs)
"""
RUNS = {
    "sd-feel": "num-servers=2 topology=path tau1=1 tau2=1 iterations=2 model=mlp",
    "fedmud": "num-rounds=1 clients-per-round=2 model=mlp skip-front=0 ratio=0.5",
    "hsgd": "iterations=4 participation=0.5 evaluate-every=1",
}


@pytest.mark.parametrize("app", ["sd-feel", "similarity-free", "fedmud", "ceps", "hsgd"])
def test_a_device_that_installs_an_app_gets_what_a_node_needs(app: str) -> None:
    project = tomllib.loads((APPS / app / "pyproject.toml").read_text())["project"]
    asked = {one.name: one for one in map(Requirement, project["dependencies"])}
    ours = tomllib.loads((APPS.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    (flwr,) = (one for one in map(Requirement, ours) if one.name == "flwr")
    assert asked.keys() == {"flwr", "hedgerow"}
    # No engine: Ray is asked for by who simulates with it.
    assert asked["flwr"] == flwr
    assert asked["hedgerow"].extras == ({"math"} if app == "ceps" else set())


def test_an_app_runs_where_no_extra_is_installed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(2):
        table = np.column_stack([rng.normal(size=(40, 6)), rng.integers(0, 2, 40)])
        header = "a,b,c,d,e,f,label"
        np.savetxt(tmp_path / f"{i}.csv", table, "%g", delimiter=",", header=header, comments="")
    manifest = {
        "node-config": [{"data": "0.csv"}, {"data": "1.csv"}],
        "run-config": {"partition": "own", "num-clients": 2},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    write_group_split("breast-cancer", tmp_path / "groups", 1, "iid", people=20)
    out = f" quiet=true output-dir={tmp_path / 'runs'}"
    runs = [
        (str(APPS / app), str(tmp_path / "groups" if app == "hsgd" else tmp_path), config + out)
        for app, config in RUNS.items()
    ]
    folders = sorted(path.parent for path in APPS.glob("*/pyproject.toml"))
    apps = [(str(folder), f"{folder.name.replace('-', '_')}.client_app") for folder in folders]
    arguments = json.dumps([EXTRAS, apps, runs])
    shown = subprocess.run(
        [sys.executable, "-c", CODE, arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert shown.returncode == 0, shown.stderr[-3000:]
    assert "A ClientApp imports: []" in shown.stdout
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == len(RUNS)


def test_what_needs_an_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingExtraError, match=r"needs scipy: pip install 'hedgerow\[math\]'"):
        needed("scipy.stats", "math")
