"""``hedgerow check``: verdicts on apps that speak some of the strategies' languages, and on our own."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sim.cli.command_line import APPS, hedgerow
from tests.sim.tiny_app import MakeApp

SD_FEEL = "SDFeel, HierFAvg, Feel, FedAvg"
WHO = "(introductions)"
SUMS = "secure_sum=True"
Foreign = Callable[..., Path]

SERVER = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    FedAvg(fraction_evaluate=0.0).start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": np_array((3, 2)), "b": np_array((3,))}),
        train_config=ConfigRecord({"lr": 0.5}),
        num_rounds=1,
    )
    raise SystemExit("went on after the first train message")

def np_array(shape):
    from flwr.app import Array
    return Array(np.zeros(shape, np.float32))
"""
CLIENT = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict, Array
from flwr.clientapp import ClientApp
from hedgerow.clients import compress_reply, introduce

app = ClientApp(mods=[{mods}])

@app.train()
def train(message, context):
    config = message.content["config"]
    steps = {steps}
    {first}
    arrays = {{
        key: Array(array.numpy() + np.float32(config["lr"] * steps))
        for key, array in message.content["arrays"].items()
    }}
    metrics = MetricRecord({{"num-examples": 5{metrics}}})
    return Message(RecordDict({{"arrays": ArrayRecord(arrays), "metrics": metrics}}), reply_to=message)
{more}
"""
PUBLISH = """
@app.query("publish")
def publish(message, context):
    payload = ConfigRecord({"bytes": b"state"})
    return Message(RecordDict({"payload": payload}), reply_to=message)
"""


@pytest.fixture
def foreign(make_app: MakeApp) -> Foreign:
    """Writes a plain NumPy app under Flower's FedAvg, with some of the lines of the contract."""

    def make(
        mods: str = "", steps: str = "1", metrics: str = "", first: str = "pass", more: str = ""
    ) -> Path:
        home = make_app()
        lines = CLIENT.format(mods=mods, steps=steps, metrics=metrics, first=first, more=more)
        (home / "tinyapp" / "client_app.py").write_text(lines)
        (home / "tinyapp" / "server_app.py").write_text(SERVER)
        return home

    return make


def verdicts(home: Path, *options: str) -> dict[str, tuple[str, str, str]]:
    """Return each strategy's verdict, what is lacking and the line that mends it."""
    shown = hedgerow("check", home, *options)
    assert shown.exit_code == 0, shown.output
    found: dict[str, tuple[str, str, str]] = {}
    name = ""
    for line in shown.stdout.splitlines()[3:]:
        if line.startswith(" "):
            serves, lacks, _ = found[name]
            found[name] = serves, lacks, line.strip().removeprefix("-> ")
        else:
            name, serves, lacks = (*re.split(r" {2,}", line, maxsplit=2), "")[:3]
            found[name] = serves, lacks, ""
    return found


def test_a_plain_app_serves_none_and_is_told_why(foreign: Foreign) -> None:
    found = verdicts(foreign(), "--nodes", "3")
    assert {serves for serves, _, _ in found.values()} == {"no"}
    assert found[WHO][2].startswith("app = ClientApp(mods=[introduce])")
    assert found[SD_FEEL][1] == "nodes train the same model for 1 and 4 local-steps"
    assert "config['local-steps']" in found[SD_FEEL][2]
    for name, client in (
        ("SimilarityFree", "similarity_free_client"),
        ("FedMUD and its family", "fedmud_client"),
    ):
        assert client in found[name][2]
    assert "the ClientApp ignores operator, local-step, local-iters" in found["SimilarityFree"][1]
    assert "not compressed" in found["Compressed"][1]
    assert "mods=[compress_reply]" in found["Compressed"][2]
    assert "'hello'" in found["CEPS"][1]
    assert "ceps_client" in found["CEPS"][2]
    assert "'pair'" in found["HSGD"][1]
    assert "'publish'" in found["Router"][1]
    assert "num-examples" in found[SUMS][1]
    assert "sd_feel_client" in found[SUMS][2]


def test_a_sum_of_too_few_nodes_is_unknown(foreign: Foreign) -> None:
    assert verdicts(foreign())[SUMS] == ("unknown", "a sum needs 3 nodes", "hedgerow check APP --nodes 3")


def test_the_lines_that_are_told_mend_what_they_are_told_for(foreign: Foreign) -> None:
    found = verdicts(
        foreign(
            mods="introduce, compress_reply",
            steps="config.get('local-steps', 1)",
            metrics=", 'num-steps': steps",
            more=PUBLISH,
        )
    )
    for name in (WHO, SD_FEEL, "Compressed", "Router"):
        assert found[name] == ("yes", "", "")
    for name in ("SimilarityFree", "FedMUD and its family", "CEPS", "HSGD"):
        assert found[name][0] == "no"


def test_steps_that_are_told_and_not_taken_are_found_out(foreign: Foreign) -> None:
    found = verdicts(foreign(metrics=", 'num-steps': config.get('local-steps', 1)"))
    assert found[SD_FEEL][1].endswith("although they report num-steps")


def test_an_app_whose_models_never_repeat_is_not_judged_by_them(foreign: Foreign) -> None:
    found = verdicts(foreign(steps="np.random.default_rng().random()"))
    assert found[SD_FEEL][0] == "unknown"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"first": "raise RuntimeError('no data here')"}, "failed: RuntimeError: no data here"),
        ({"mods": "nobody"}, "raised NameError: name 'nobody' is not defined (/"),
    ],
)
def test_an_app_that_does_not_run_is_an_error(foreign: Foreign, changes: dict[str, str], text: str) -> None:
    shown = hedgerow("check", foreign(**changes))
    assert shown.exit_code == 1
    assert text in shown.stderr
    assert shown.stdout == ""


def test_a_server_that_wants_more_nodes_is_told_how(make_app: MakeApp) -> None:
    home = make_app()
    shown = hedgerow("check", home, "-c", "fail=true")
    assert shown.exit_code == 1
    assert "RuntimeError: asked to fail" in shown.stderr
    assert hedgerow("check", home, "--nodes", "3").exit_code == 0


SMALL = {
    "sd-feel": "model=logistic num-clients=4",
    "similarity-free": "model=logistic num-clients=10",
    "fedmud": "model=mlp num-clients=4 local-epochs=1 skip-front=0 skip-back=0",
    "ceps": "features=40 sparsity=4 samples-low=20 samples-high=30 num-clients=4",
    "hsgd": "iterations=4",
}
OWN = {
    "sd-feel": {SD_FEEL, "Compressed", SUMS},
    "similarity-free": {"SimilarityFree"},
    "fedmud": {"FedMUD and its family"},
    "ceps": {"CEPS"},
    "hsgd": {"HSGD"},
}


@pytest.mark.parametrize("app", OWN)
def test_each_app_of_the_suite_serves_its_own_strategy(
    app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = verdicts(APPS / app, "-c", SMALL[app])
    assert {name for name, (serves, _, _) in found.items() if serves == "yes"} - {WHO} == OWN[app]
    assert found[WHO][0] == "yes"
    assert not list(tmp_path.iterdir())
