"""One call runs a federation of any Flower code, and brings back what it came to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedMedian, FedYogi, Result, Strategy
from numpy.typing import NDArray
from tests.sim.runs import quickstarts as apps

from hedgerow.clients import compress_reply, introduce
from hedgerow.sim import (
    CheckpointError,
    FaultModel,
    load,
    read_config,
    read_rounds,
    server_app,
    simulate,
)
from hedgerow.sim.runs.foreign import AllLostError
from hedgerow.strategies import Compressed, SDFeel

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedYogi": lambda: FedYogi(eta=0.1),
    "FedMedian": FedMedian,
}
NODES = 4


def run(rounds: int = 3, make: Callable[[], Strategy] = FedAvg, **options: Any) -> Any:
    options = {"initial_arrays": apps.numpy_arrays(), "num_rounds": rounds, **options}
    return simulate(make, apps.numpy_app(), NODES, quiet=True, **options)


def weights(result: Result | None) -> NDArray[Any]:
    assert result is not None
    return result.arrays.to_numpy_ndarrays()[0]


def assert_same(one: Any, other: Any) -> None:
    """Flower's FedAvg draws its nodes from Python's global generator, and sums in the order drawn."""
    np.testing.assert_allclose(weights(one.result), weights(other.result), rtol=1e-12)


def loss_at(server_round: int, model: ArrayRecord) -> MetricRecord:
    return MetricRecord({"loss": 1.0 / (1 + server_round)})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_quickstart_app_is_run_recorded_resumed_and_read_back(strategy: str, tmp_path: Path) -> None:
    make = STRATEGIES[strategy]
    whole = run(4, make, output_dir=tmp_path)
    half = run(2, make, output_dir=tmp_path, checkpoint_every=1)
    rest = run(4, make, resume=half.folder)
    assert [end["round"] for end in rest.rounds] == [end["round"] for end in whole.rounds] == [1, 2, 3, 4]
    losses = [end["evaluate"]["loss"] for end in whole.rounds]
    assert losses[-1] < losses[0]
    assert sorted(rest.result.train_metrics_clientapp) == [3, 4]
    assert losses == [end["evaluate"]["loss"] for end in rest.rounds]
    read = load([whole.folder, rest.folder])
    assert [run.finished for run in read.runs] == [True, True]
    assert [point.y for point in read.runs[0].series("payload-bytes", "loss")] == losses


def test_the_folder_holds_what_a_run_folder_holds(tmp_path: Path) -> None:
    done = run(output_dir=tmp_path, run_config={"lr": 0.1}, evaluate_fn=loss_at, checkpoint_every=2)
    config = read_config(done.folder)
    assert config["app"] == "FedAvg"
    assert config["run"] == {"seed": 0, "lr": 0.1}
    assert config["nodes"] == NODES
    assert config["environment"]["engine"] == "inprocess"
    assert config["seed"] == 0
    # config.json is written before the strategy is known, which may be one that cannot go on.
    assert "checkpoint/, which is written only if the strategy can be resumed" in config["resumes"]
    assert read_rounds(done.folder) == done.rounds
    assert [end["central"]["loss"] for end in done.rounds] == [1.0, 1 / 2, 1 / 3, 1 / 4]
    np.testing.assert_array_equal(np.load(done.folder / "model.npz")["0"], weights(done.result))
    assert (done.folder / "checkpoint" / "latest.safetensors").is_file()
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["by_link"] == done.rounds[-1]["by_link"]


def test_traffic_is_every_message_and_its_records_bytes() -> None:
    first, second = run(2).rounds
    arrays = 16 + 128 + 1  # two float64, the header of the .npy file, the key "0"
    up = arrays + len("arrays") + len("metrics")
    trained = up + sum(len(name) + 8 for name in ("num-examples", "train_loss", "visits"))
    assert first["by_type"]["train"]["node->hub"] == {
        "messages": NODES,
        "nominal_bits": 8 * NODES * trained,
        "payload_bytes": NODES * trained,
    }
    legs = [second["by_type"][kind][leg] for kind in ("train", "evaluate") for leg in second["by_link"]]
    assert second["payload_bytes"] == sum(leg["payload_bytes"] for leg in legs)
    assert second["by_link"]["hub->node"]["messages"] == 4 * NODES
    assert (second["sent"], second["accepted"], second["rejected"]) == (2 * NODES, 2 * NODES, {})


def test_lost_replies_are_told_by_reason() -> None:
    lost = run(1, timeout=5.0, faults={0: FaultModel(dropout=1.0)}).rounds
    assert lost[0]["rejected"] == {"no reply": 2}
    assert lost[0]["sim_seconds"] == 10.0
    dead = run(1, timeout=100.0, faults={0: FaultModel(crash_at={0: 1})}).rounds
    assert dead[0]["rejected"] == {"error 5": 1}


def test_an_app_that_introduces_itself_by_a_mod_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    strategy = SDFeel(num_servers=1, topology="complete", num_clients=NODES)
    arrays = apps.numpy_arrays()
    done = simulate(strategy, apps.numpy_app([introduce]), NODES, initial_arrays=arrays, num_rounds=1)
    assert done.rounds[-1]["accepted"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_server_app_is_watched_through_its_own_main(tmp_path: Path) -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        asked = [
            Message(RecordDict({"arrays": apps.numpy_arrays()}), node_id, "evaluate")
            for node_id in grid.get_node_ids()
        ]
        assert len(list(grid.send_and_receive(asked))) == NODES
        rounds = int(context.run_config["num-server-rounds"])
        FedAvg().start(grid=grid, initial_arrays=apps.numpy_arrays(), num_rounds=rounds)

    config: Any = {"num-server-rounds": 2}
    done = simulate(app, apps.numpy_app(), NODES, run_config=config, output_dir=tmp_path, quiet=True)
    assert_same(done, run(2))
    # What it asked before belongs to its first round.
    assert [end["sent"] for end in done.rounds] == [3 * NODES, 2 * NODES]
    assert done.context.run_config == config


def test_an_app_without_a_strategy_gets_a_line_an_exchange(tmp_path: Path) -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for _ in range(2):
            question = RecordDict({"arrays": apps.numpy_arrays()})
            messages = [Message(question, node_id, "evaluate") for node_id in grid.get_node_ids()]
            grid.send_and_receive(messages)
        ids = grid.push_messages(messages)
        grid.pull_messages(ids)

    done = simulate(app, apps.numpy_app(), NODES, output_dir=tmp_path, quiet=True)
    assert done.result is None
    assert [(end["round"], end["kind"], end["accepted"]) for end in done.rounds] == [
        (1, "exchange", NODES),
        (2, "exchange", NODES),
        (3, "exchange", NODES),
    ]
    assert done.folder is not None
    assert not (done.folder / "model.npz").exists()
    assert load([done.folder]).runs[0].costs("payload-bytes")[-1] == done.rounds[-1]["payload_bytes"]
    with pytest.raises(CheckpointError, match="No checkpoint"):
        simulate(app, apps.numpy_app(), NODES, resume=done.folder, quiet=True)


def test_two_strategies_of_one_main_are_one_record_that_goes_on_from_the_first(tmp_path: Path) -> None:
    def app_of(fails: bool) -> ServerApp:
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            first = FedAvg().start(grid, apps.numpy_arrays(), 2, evaluate_fn=loss_at)
            second = Failing() if fails else FedMedian()
            second.start(grid, first.arrays, 2, evaluate_fn=loss_at)

        return app

    class Failing(FedMedian):
        def configure_train(self, server_round: int, *args: Any, **kwargs: Any) -> Any:
            if server_round == 2:
                raise RuntimeError("the power is out")
            return super().configure_train(server_round, *args, **kwargs)

    options: dict[str, Any] = {"checkpoint_every": 1, "quiet": True}
    whole = simulate(app_of(False), apps.numpy_app(), NODES, output_dir=tmp_path / "whole", **options)
    assert [end["round"] for end in whole.rounds] == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="the power is out"):
        simulate(app_of(True), apps.numpy_app(), NODES, output_dir=tmp_path / "half", **options)
    (half,) = (tmp_path / "half").iterdir()
    assert [end["round"] for end in read_rounds(half)] == [0, 1, 2, 3]
    rest = simulate(app_of(False), apps.numpy_app(), NODES, resume=half, **options)
    assert [end["round"] for end in rest.rounds] == [0, 1, 2, 3, 4]
    assert_same(rest, whole)


def test_a_strategy_that_knows_its_state_goes_on_with_it(tmp_path: Path) -> None:
    def strategy() -> SDFeel:
        return SDFeel(topology="ring", num_servers=2)

    whole = run(4, strategy)
    half = run(2, strategy, output_dir=tmp_path, checkpoint_every=1)
    rest = run(4, strategy, resume=half.folder)
    np.testing.assert_array_equal(weights(rest.result), weights(whole.result))
    # Its own record is what is written: it knows the links of its system.
    assert "edge->edge" in rest.rounds[-1]["by_link"]
    assert [end["round"] for end in rest.rounds] == [0, 1, 2, 3, 4]


def test_a_compressed_strategy_of_flowers_is_evaluated_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    done = simulate(
        Compressed(FedAvg(), "topk(0.5)"),
        apps.numpy_app([compress_reply]),
        NODES,
        output_dir=tmp_path,
        checkpoint_every=1,
        quiet=True,
        initial_arrays=apps.numpy_arrays(),
        num_rounds=2,
        evaluate_fn=loss_at,
    )
    assert [end["round"] for end in done.rounds] == [0, 1, 2]
    assert all("loss" in end["central"] for end in done.rounds)
    assert not (done.folder / "checkpoint").exists()


def test_a_run_in_which_no_reply_is_accepted_is_an_error_and_not_finished(tmp_path: Path) -> None:
    with pytest.raises(AllLostError, match=r"none of \d+ replies was accepted \(\d+ x "):
        run(2, output_dir=tmp_path, faults=FaultModel(dropout=1.0))
    assert not list(tmp_path.glob("*/summary.json"))


def test_simulations_inside_one_another_are_kept_apart() -> None:
    inner = []

    def evaluate(server_round: int, model: ArrayRecord) -> MetricRecord:
        inner.append(run(1))
        return MetricRecord({"loss": 0.0})

    outer = run(2, evaluate_fn=evaluate)
    assert [len(done.rounds) for done in inner] == [1, 1, 1]
    assert [end["sent"] for end in outer.rounds] == [0, 2 * NODES, 2 * NODES]


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(TypeError, match="server_app must be a ServerApp or a Strategy"):
        simulate(dict, ClientApp(), 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_rounds must be used with a strategy"):
        simulate(ServerApp(), ClientApp(), 2, num_rounds=3)
    with pytest.raises(ValueError, match="checkpoint_every must be an integer >= 1, got 0"):
        simulate(FedAvg, ClientApp(), 2, checkpoint_every=0)
    own = server_app("mine", lambda _: {}, ClientApp(), lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="by its run-config key 'resume'"):
        simulate(own, ClientApp(), 2, resume="runs/old")
