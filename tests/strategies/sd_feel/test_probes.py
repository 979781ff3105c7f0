"""What clients' gradients say of L, sigma^2 and kappa^2, on quadratics whose constants are known."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from tests.strategies.quadratic import Quadratics, run
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.strategies import RoundEnd, SDFeel

SIZES, CENTRES, CURVATURES = [30, 20, 10, 20, 15, 5], [1.0, 2, 3, 4, 5, 6], [1.0, 0.5, 2, 1, 0.25, 4]
M = np.array(SIZES) / sum(SIZES)

Lie = Callable[[int, RecordDict], RecordDict]


def honest(client: int, reply: RecordDict) -> RecordDict:
    return reply


def told(problem: Quadratics, lie: Lie = honest) -> Any:
    app = problem.client_app()

    @app.train("gradient")
    def gradient(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        w = message.content["arrays"]["w"].numpy()
        metrics = {"num-examples": SIZES[client], "curvature": CURVATURES[client], "gradient-variance": 0.5}
        arrays = ArrayRecord({"w": Array(problem.gradient(client, 0, w))})
        reply = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(lie(client, reply), reply_to=message)

    return app


def strategy(**options: Any) -> SDFeel:
    return SDFeel(
        num_servers=3, topology="ring", tau1=2, min_available_nodes=6, fraction_evaluate=0.0, **options
    )


def probed(rounds: int, lie: Lie = honest, **options: Any) -> tuple[float, list[RoundEnd], RecordingGrid]:
    problem = Quadratics(SIZES, CENTRES, CURVATURES)
    grid = RecordingGrid(told(problem, lie), 6)
    u, ends = run(strategy(**options), problem, rounds, grid=grid)
    return float(u[0]), ends, grid


def test_the_constants_of_quadratics_are_found_at_the_models_of_the_run() -> None:
    _, ends, grid = probed(3, probe_rounds=2)
    for number in (1, 2):
        (u,) = {float(c["arrays"]["w"].numpy()[0]) for kind, _, c in grid.sent if kind == "train.gradient"
                and c["config"]["server-round"] == number}  # fmt: skip
        gradients = np.array(CURVATURES) * (u - np.array(CENTRES))
        whole = M @ gradients
        seen = ends[number].train
        assert (seen["curvature"], seen["gradient-variance"]) == (4.0, 0.5)
        assert seen["gradient-dissimilarity"] == pytest.approx(max((gradients - whole) ** 2))
        assert seen["gradient2"] == pytest.approx(whole**2)
        assert seen["sum-m2"] == pytest.approx(M @ M)
        assert (seen["probed-clients"], seen["probe-lost"], seen["parameters"]) == (6, 0, 1)
    assert "curvature" not in ends[3].train
    assert sum(kind == "train.gradient" for kind, _, _ in grid.sent) == 2 * 6


def test_a_probe_moves_no_bit_of_the_model_and_no_simulated_second() -> None:
    with_probes, ends, _ = probed(4, probe_rounds=4)
    without, plain, _ = probed(4)
    assert with_probes == without
    assert [end.sim_seconds for end in ends] == [end.sim_seconds for end in plain]
    assert [end.bits for end in ends] == [end.bits for end in plain]
    assert ends[-1].payload_bytes > plain[-1].payload_bytes


def rewritten(client: int, **changes: Any) -> Lie:
    def lie(own: int, reply: RecordDict) -> RecordDict:
        if own == client:
            reply["metrics"].update(changes)
        return reply

    return lie


def endless(own: int, reply: RecordDict) -> RecordDict:
    if own == 5:
        reply["arrays"] = ArrayRecord({"w": Array(np.array([np.inf]))})
    return reply


@pytest.mark.parametrize(
    "lie",
    [
        rewritten(5, curvature=float("nan")),
        rewritten(5, curvature=-1.0),
        rewritten(5, **{"gradient-variance": [1.0]}),
        endless,
    ],
)
def test_garbage_of_one_client_is_counted_and_in_no_estimate(lie: Lie) -> None:
    _, ends, _ = probed(1, lie, probe_rounds=1)
    seen = ends[1].train
    assert (seen["probed-clients"], seen["probe-lost"], seen["curvature"]) == (5, 1, 2.0)


def test_clients_that_tell_no_gradient_train_all_the_same() -> None:
    # Clients that do not know the message.
    problem = Quadratics(SIZES, CENTRES, CURVATURES)
    _, ends = run(strategy(probe_rounds=1), problem, 1)
    assert ends[1].train["probe-lost"] == 6
    assert "curvature" not in ends[1].train
    assert ends[1].accepted == 6
