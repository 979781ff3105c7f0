"""Sites of CEPS with a SuperLink each, TLS and authentication: the models of one hub in the engine."""

import json
from base64 import b64decode
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.deployment.leftovers import left_running
from tests.deployment.trials import APPS

from hedgerow.sim import EdgeDeployment, find_app, load, load_app, load_newest, plan_run, read_rounds, run_app
from hedgerow.wire import NODE_RECORD, SEALED_RECORD, PayloadError, SealingKey

pytestmark = pytest.mark.slow

APP = APPS / "ceps"
# Sealed, devices draw their sensing matrices' seeds themselves: other numbers.
CONFIG = (
    "sealed=false topology=ring participation=1.0 iterations=8 interval-low=2 interval-high=3 features=60 "
    "sparsity=3 measurements=90 samples-low=30 samples-high=60 monitor=false checkpoint-every=1 "
    "checkpoint-nodes=always"
)
PARTITIONS = [[0, 1], [2, 3]]


def simulated_models(run: Path) -> dict[int, NDArray[Any]]:
    """Return the models that a simulation's last checkpoint has of its nodes."""
    _, found = load_newest(run / "checkpoint")
    nodes = found.state["parts"]["engine"]["nodes"]
    return {int(i): node["state"]["ceps"]["items"]["w"] for i, node in nodes.items()}


def device_models(run: Path, keys: list[SealingKey]) -> dict[int, NDArray[Any]]:
    """Return the models of devices, whose states in the checkpoint only their own keys open."""
    _, found = load_newest(run / "checkpoint")
    models = {}
    for i, records in found.state["parts"]["nodes"].items():
        assert "ceps" not in records
        sealed, node = records[SEALED_RECORD]["items"], records[NODE_RECORD]["items"]
        about = f"state {sealed['number']} of partition {i} in run {node['run']}"
        for key in keys:
            with suppress(PayloadError):
                state = json.loads(key.unlock(sealed["bytes"].tobytes(), about))
                *_, data = state["ceps"][1]["w"]["array"]
                models[int(i)] = np.load(BytesIO(b64decode(data["bytes"])))
    return models


def test_sites_with_tls_end_with_the_models_of_one_hub_and_are_read_as_one_run(tmp_path: Path) -> None:
    spec = find_app(APP)
    run_app(load_app(APP), plan_run(spec, [CONFIG, f"output-dir={tmp_path / 'hub'} quiet=true"], num_nodes=4))
    (hub,) = (tmp_path / "hub").iterdir()
    out = tmp_path / "sites"
    with EdgeDeployment(spec, PARTITIONS, tls=True, sites=True) as sites:
        plans = [sites.plan(d, CONFIG, output_dir=str(out)) for d in range(2)]
        runs = [sites.submit(d, plan, echo=False) for d, plan in enumerate(plans)]
        for run in runs:
            end = run.wait(400.0)
            assert end.exit_code == 0, f"{end}\n{''.join(run.lines)[-4000:]}"
        keys = [SealingKey.at(file) for file in sites.home.rglob("hedgerow-keys/*.pem")]
        folders = [next((out / f"site{d}").iterdir()) for d in range(2)]
        of_sites = [device_models(folder, keys) for folder in folders]
    assert left_running(sites.home) == []
    expected = simulated_models(hub)
    for own, folder, found in zip(PARTITIONS, folders, of_sites, strict=True):
        assert sorted(found) == own
        for node, model in found.items():
            assert np.linalg.norm(model) > 0
            assert model.tobytes() == expected[node].tobytes()
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["lost-replies"]) == ("completed", {})
        # Payloads crossed over the sites' own links, and none was lost.
        told = [record["train"] for record in read_rounds(folder) if record["round"]]
        assert {(one["lost-sites"], one["lost-payloads"]) for one in told} == {(0, 0)}
        assert summary["by_link"]["peer->peer"]["payload_bytes"] > 0
    # Read as one run they are the hub's events, and what nodes sent each other is the same.
    (joined,) = load([out]).runs
    (alone,) = load([hub]).runs
    for metric in ("receivers", "deliveries", "lost-payloads"):
        assert joined.series("iterations", metric) == pytest.approx(alone.series("iterations", metric))
    assert joined.rounds[-1]["bits"] == alone.rounds[-1]["bits"]
    assert joined.rounds[-1]["by_link"]["node->node"] == alone.rounds[-1]["by_link"]["node->node"]
