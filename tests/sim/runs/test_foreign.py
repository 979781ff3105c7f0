"""``hedgerow run`` gives a stranger's app the run folder that the suite's own apps have."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from tests.sim.cli.command_line import SD_FEEL, hedgerow
from tests.sim.tiny_app import MakeApp

from hedgerow.sim import InProcessGrid, load_app, plan_run, read_config, read_rounds, run_app, simulate
from hedgerow.sim.runs.foreign import Earlier, earlier_run
from hedgerow.sim.runs.launch import Records


def folder_of_the_run(parent: Path) -> Path:
    (config,) = parent.glob("*/config.json")
    return config.parent


def test_a_run_of_a_foreign_app_goes_on(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app()
    loaded = load_app(app)
    plan = plan_run(loaded.spec, ["output-dir=out lr=0.25 num-server-rounds=3"], num_nodes=3)
    calls = 0

    def send(self: InProcessGrid, messages: Iterable[Message], **options: Any) -> list[Message]:
        nonlocal calls
        calls += 1
        # FedAvg sends twice a round, here to nobody the second time.
        if calls == 4:
            raise KeyboardInterrupt
        return whole(self, messages, **options)

    whole = InProcessGrid.send_and_receive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessGrid, "send_and_receive", send)
        with pytest.raises(KeyboardInterrupt):
            run_app(loaded, plan, records=Records(output_dir=tmp_path / "out", quiet=True))
    folder = folder_of_the_run(tmp_path / "out")
    assert [end["round"] for end in read_rounds(folder)] == [1]
    assert earlier_run(folder, loaded.spec.config) == Earlier(plan.run_config, 3, read_config(folder)["seed"])
    shown = hedgerow("run", app, "--resume", folder)
    assert shown.exit_code == 0, shown.output
    assert [end["round"] for end in read_rounds(folder)] == [1, 2, 3]
    np.testing.assert_allclose(np.load(folder / "model.npz")["0"], [1.5] * 3)
    longer = hedgerow("run", app, "--resume", folder, "-c", "num-server-rounds=4", "--quiet")
    assert longer.exit_code == 0, longer.output
    np.testing.assert_allclose(np.load(folder / "model.npz")["0"], [2.0] * 3)
    refused = hedgerow("run", app, "--resume", folder, "-c", "lr=0.5")
    assert refused.exit_code == 2
    assert "lr was 0.25 and is 0.5" in refused.output


SMALL = "num-clients=4 num-servers=2 iterations=10 batch-size=4 evaluate-every=10"


def test_an_app_of_the_suite_is_simulated_and_records_itself(tmp_path: Path) -> None:
    app = load_app(SD_FEEL)
    config = plan_run(app.spec, [SMALL]).run_config
    done = simulate(app.server_app, app.client_app, 4, run_config=config, output_dir=tmp_path, quiet=True)
    assert done.result is not None
    assert done.rounds == read_rounds(folder_of_the_run(tmp_path))
