"""Apps whose rounds are not ``Strategy.start``'s: on the legacy server API, or in a loop of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import FitRes, Parameters, Scalar, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg, FedProx, Strategy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import Simulation, read_model, read_rounds, record_round, simulate

NODES = 3


class Fitting(NumPyClient):
    """Moves a model half the way to the node's own point; a proximal term holds it back."""

    def __init__(self, point: float, context: Context) -> None:
        self.point, self.state = point, context.state

    def get_parameters(self, config: dict[str, Scalar]) -> list[NDArray[np.float64]]:
        return [np.zeros(2), np.zeros(1)]

    def fit(self, parameters: list[Any], config: dict[str, Scalar]) -> Any:
        step = 0.5 / (1 + float(config.get("proximal_mu", 0.0)))
        return [one + step * (self.point - one) for one in parameters], 10, {"step": step}

    def evaluate(self, parameters: list[Any], config: dict[str, Scalar]) -> Any:
        return float(np.mean((parameters[0] - self.point) ** 2)), 10, {"near": 1.0}


class KeepsItsBias(Fitting):
    """As FedBN's clients keep batch norms: the second array never leaves the node."""

    def fit(self, parameters: list[Any], config: dict[str, Scalar]) -> Any:
        known = self.state.array_records
        bias = known["own"].to_numpy_ndarrays()[0] if "own" in known else np.zeros(1)
        (weights, bias), count, metrics = super().fit([parameters[0], bias], config)
        known["own"] = ArrayRecord([bias])
        return [weights], count, {**metrics, "bias": float(bias[0])}


class Lines(FedAvg):
    """As Floco's strategy: its own aggregation beside the mean, and metrics of its own."""

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: Any
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        parameters, _ = super().aggregate_fit(server_round, results, failures)
        return parameters, {"clients": len(results), "name": "line"}


def clients(kind: type[Fitting], **options: Any) -> ClientApp:
    def client_fn(context: Context) -> Any:
        return kind(float(context.node_config["partition-id"]), context).to_client()

    return ClientApp(client_fn=client_fn, **options)


def mean(metrics: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
    return {name: float(np.mean([one[name] for _, one in metrics])) for name in metrics[0][1]}  # type: ignore[arg-type]


def distance(server_round: int, parameters: Any, config: Any) -> tuple[float, dict[str, Scalar]]:
    return float(np.mean((parameters[0] - 1.0) ** 2)), {"round-told": server_round}


def run(strategy: Strategy, app: ClientApp, folder: Path) -> Simulation:
    def server_fn(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))

    return simulate(ServerApp(server_fn=server_fn), app, NODES, output_dir=folder, quiet=True)


def fedprox(folder: Path) -> Simulation:
    initial = ndarrays_to_parameters([np.zeros(2), np.zeros(1)])
    strategy = FedProx(
        proximal_mu=1.0,
        initial_parameters=initial,
        min_available_clients=NODES,
        evaluate_fn=distance,
        fit_metrics_aggregation_fn=mean,
        evaluate_metrics_aggregation_fn=mean,
    )
    return run(strategy, clients(Fitting), folder)


def fedbn(folder: Path) -> Simulation:
    strategy = FedAvg(
        initial_parameters=ndarrays_to_parameters([np.zeros(2)]),
        min_available_clients=NODES,
        fit_metrics_aggregation_fn=mean,
    )
    return run(strategy, clients(KeepsItsBias), folder)


def floco(folder: Path) -> Simulation:
    # Without initial parameters Flower asks a node for them.
    return run(Lines(min_available_clients=NODES), clients(Fitting), folder)


def secure_aggregation(folder: Path) -> Simulation:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        legacy = LegacyContext(
            context=context,
            config=ServerConfig(num_rounds=3),
            strategy=FedAvg(
                initial_parameters=ndarrays_to_parameters([np.zeros(2), np.zeros(1)]),
                min_available_clients=NODES,
                evaluate_fn=distance,
            ),
        )
        DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))(
            grid, legacy
        )

    return simulate(app, clients(Fitting, mods=[secaggplus_mod]), NODES, output_dir=folder, quiet=True)


@pytest.mark.parametrize("app", [fedprox, fedbn, floco, secure_aggregation], ids=lambda one: one.__name__)
def test_an_app_on_the_legacy_server_api_leaves_a_folder_that_every_instrument_reads(
    app: Callable[[Path], Simulation], tmp_path: Path
) -> None:
    folder = app(tmp_path / "runs").folder
    assert folder is not None
    rounds = read_rounds(folder)
    evaluated_first = app in (fedprox, secure_aggregation)
    assert [one["round"] for one in rounds] == ([0, 1, 2, 3] if evaluated_first else [1, 2, 3])
    assert {one["kind"] for one in rounds} == {"round"}
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    assert all(one["accepted"] == one["sent"] >= 2 * NODES for one in rounds if one["round"])
    assert all(one["evaluate"]["loss"] > 0 for one in rounds if one["round"])
    assert read_model(folder)["0"].shape == (2,)
    for command in (["table"], ["plot", "--out", tmp_path / "a.svg"], ["report", "-o", tmp_path / "a.html"]):
        shown = hedgerow(command[0], folder, *command[1:], "--y", "loss")
        assert shown.exit_code == 0, shown.output


def test_what_legacy_strategies_make_of_metrics_is_recorded(tmp_path: Path) -> None:
    rounds = fedprox(tmp_path).rounds
    # A quarter of the way to the nodes' mean, 1, in every round.
    assert [one["central"]["loss"] for one in rounds] == pytest.approx([1, 0.75**2, 0.75**4, 0.75**6])
    assert [one["central"]["round-told"] for one in rounds] == [0, 1, 2, 3]
    assert [one["train"] for one in rounds] == [{}, *[{"step": 0.25}] * 3]
    assert rounds[-1]["evaluate"]["near"] == 1
    assert [one["train"] for one in floco(tmp_path).rounds] == [{"clients": NODES}] * 3
    # One node's share of what each remembers: 0.875 of the way after three rounds.
    assert fedbn(tmp_path).rounds[-1]["train"]["bias"] == pytest.approx(0.875)


def test_a_legacy_app_cannot_resume_and_writes_no_checkpoint(tmp_path: Path) -> None:
    folder = fedprox(tmp_path).folder
    assert folder is not None
    assert not (folder / "checkpoint").exists()


def looping(record: bool) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        model = np.zeros(2)

        def ask(kind: str) -> list[RecordDict]:
            content = RecordDict({"arrays": ArrayRecord([model])})
            messages = [Message(content, dst_node_id=node, message_type=kind) for node in grid.get_node_ids()]
            return [reply.content for reply in grid.send_and_receive(messages)]

        ask("query")
        for number in (1, 2, 3):
            if record:
                with record_round(grid, number) as metrics:
                    model = np.mean([one["arrays"].to_numpy_ndarrays()[0] for one in ask("train")], axis=0)
                    metrics.arrays = ArrayRecord([model])
                    metrics.train = {"sent-by": NODES}
                    metrics.central["loss"] = float(abs(model - 1).mean())
            else:
                ask("train")

    return app


def half_way() -> ClientApp:
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        (model,) = message.content["arrays"].to_numpy_ndarrays()
        model = model + (context.node_config["partition-id"] - model) / 2
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord([model]), "metrics": metrics}), reply_to=message)

    app.train()(answer)
    app.query()(answer)
    return app


def test_an_app_with_a_loop_of_its_own_says_what_its_rounds_are(tmp_path: Path) -> None:
    done = simulate(looping(record=True), half_way(), NODES, output_dir=tmp_path, quiet=True)
    assert [one["round"] for one in done.rounds] == [1, 2, 3]
    assert [one["central"]["loss"] for one in done.rounds] == [0.5, 0.25, 0.125]
    assert done.rounds[0]["train"] == {"sent-by": NODES}
    # What was asked before the first round belongs to it.
    assert [one["sent"] for one in done.rounds] == [2 * NODES, NODES, NODES]
    assert done.folder is not None
    np.testing.assert_array_equal(read_model(done.folder)["0"], [0.875] * 2)
    # Of a loop that says nothing each exchange is a round.
    silent = simulate(looping(record=False), half_way(), NODES, output_dir=tmp_path, quiet=True)
    assert [one["kind"] for one in silent.rounds] == ["exchange"] * 4


def test_rounds_of_ones_own_go_up() -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        with record_round(grid, 2):
            pass
        with record_round(grid, 2):
            pass

    with pytest.raises(ValueError, match="number must be above 2, the last recorded round, got 2"):
        simulate(app, half_way(), NODES, quiet=True)


def test_where_nobody_records_a_round_is_what_it_would_be_without_record_round() -> None:
    class Nobody:
        pass

    with record_round(Nobody(), 1) as metrics:  # type: ignore[arg-type]
        metrics.central["loss"] = 1.0
    assert metrics.central == {"loss": 1.0}


def test_the_initial_parameters_come_from_a_node_where_the_strategy_has_none(tmp_path: Path) -> None:
    rounds = floco(tmp_path).rounds
    # A message for them, and fit and evaluation of three nodes each.
    assert [one["sent"] for one in rounds] == [2 * NODES + 1, 2 * NODES, 2 * NODES]
