"""What every app's run folder tells beside its rounds: who ran the nodes, and the traffic of each link."""

import json
from pathlib import Path

import pytest
from tests.flower_apps.cases import CASES, AppCase

from hedgerow.sim import read_config, read_rounds
from hedgerow.wire import HUB_TO_NODE, NODE_TO_HUB

every_app = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@every_app
def test_a_run_tells_its_engine_and_the_traffic_of_each_link(
    case: AppCase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.run(tmp_path)
    (folder,) = tmp_path.iterdir()
    config = read_config(folder)
    # The run config says what an app under ``flwr run`` does; the environment says what was.
    assert config["run"]["engine"] == "flower"
    assert config["environment"]["engine"] == "inprocess"
    assert config["environment"]["app-git"] == config["environment"]["git"]

    rounds = read_rounds(folder)
    links = json.loads((folder / "summary.json").read_text())["by_link"]
    assert links == rounds[-1]["by_link"]
    assert {HUB_TO_NODE, NODE_TO_HUB} <= links.keys()
    modelled = [traffic for link, traffic in links.items() if link not in (HUB_TO_NODE, NODE_TO_HUB)]
    assert sum(traffic["nominal_bits"] for traffic in modelled) == rounds[-1]["bits"]
    assert sum(traffic["payload_bytes"] for traffic in modelled) == rounds[-1]["payload_bytes"]
    assert all(traffic["messages"] > 0 for traffic in links.values())
    assert "hub MB" in capsys.readouterr().out
