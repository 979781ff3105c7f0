"""What the ServerApps of the suite have in common: settings of a run, its folder, its engine, its table."""

from collections.abc import Callable, Mapping, Sequence
from logging import INFO
from math import inf
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from hedgerow.sim.engine._compat import is_simulation
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.live import LiveProgress
from hedgerow.sim.runs.recorder import RunRecorder, new_run_folder, round_table
from hedgerow.sim.engine.remote_state import RemoteState
from hedgerow.sim.runs.settings import Setting, choice, flag, number, text, whole
from hedgerow.wire.records import to_state_dict

__all__ = ["RUN_SETTINGS", "central_evaluation", "run_strategy"]

# Keys of a run config that mean the same in every app.
RUN_SETTINGS: Mapping[str, Setting] = {
    "evaluate-every": whole(1),
    "train-loss-samples": whole(0),
    "round-timeout": number("a number of seconds > 0", lambda v: 0 < v < inf),
    "min-replies": whole(0),
    "engine": choice("flower", "inprocess"),
    "output-dir": text("a folder"),
    "checkpoint-every": whole(1),
    "checkpoint-nodes": choice("auto", "always", "never"),
    "resume": text("the folder of an earlier run, or empty"),
    "quiet": flag(),
}

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class _Strategy(Protocol):
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        """As in Flower's ``Strategy``."""

    def state_dict(self) -> Mapping[str, Any]:
        """All that the next round depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""


def central_evaluation(
    measure: Callable[[dict[str, Tensor]], Mapping[str, float]], *, every: int, last: int
) -> EvaluateFn:
    """Return the central evaluation: before the first round, every ``every`` rounds and after the last.

    ``measure`` maps a model's state dict to its metrics.
    """

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every and server_round != last:
            return None
        return MetricRecord(dict(measure(to_state_dict(arrays))))

    return evaluate


def run_strategy(
    grid: Grid,
    context: Context,
    *,
    name: str,
    realism: str,
    title: str,
    values: Mapping[str, Any],
    build: Callable[[Sequence[Callable[[Any], None]]], _Strategy],
    client_app: ClientApp,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    train_config: Mapping[str, Any],
    measure: Callable[[dict[str, Tensor]], Mapping[str, float]],
) -> RunRecorder:
    """Run a strategy as the settings say: record, show, checkpoint, resume; print a table at the end.

    Parameters
    ----------
    grid, context : Grid, Context
        What Flower hands the ServerApp. With ``engine = "inprocess"`` the nodes run here instead.
    name, realism, title : str
        The app's name, what is emulated and what is real, and the table's title.
    values : Mapping[str, Any]
        The app's settings, those of ``RUN_SETTINGS`` among them.
    build : Callable[[Sequence[callback]], Strategy]
        Makes the strategy, given whom to tell of each round.
    client_app : ClientApp
        The app's own, for the engine.
    initial_arrays, num_rounds, train_config
        For ``Strategy.start``.
    measure : Callable[[dict[str, Tensor]], Mapping[str, float]]
        The global model's metrics.
    """
    recorder = RunRecorder(
        Path(values["resume"]) if values["resume"] else new_run_folder(values["output-dir"], name),
        {"app": name, "realism": realism, "run": {**context.run_config, **values}},
        checkpoint_every=values["checkpoint-every"],
    )
    log(INFO, "Run folder: %s", recorder.folder)
    live = LiveProgress(num_rounds, values["quiet"])
    strategy = build([recorder.on_round_end, live])
    if values["engine"] == "inprocess":
        grid = InProcessGrid.inside(grid, client_app, context)
    recorder.keep_state(strategy=strategy, **_keepers_of_node_state(grid, values))
    if values["resume"]:
        recorder.resume()
    with recorder.guard(), live:
        result = strategy.start(
            grid=grid,
            initial_arrays=initial_arrays,
            num_rounds=num_rounds,
            timeout=values["round-timeout"],
            train_config=ConfigRecord(dict(train_config)),
            evaluate_config=None,
            evaluate_fn=central_evaluation(measure, every=values["evaluate-every"], last=num_rounds),
        )
    recorder.finish(_summary(recorder.rounds), {key: array.numpy() for key, array in result.arrays.items()})
    print(round_table(recorder.rounds, title))
    print(f"Run folder: {recorder.folder}", flush=True)
    return recorder


def _keepers_of_node_state(grid: Grid, values: Mapping[str, Any]) -> dict[str, object]:
    """Return who knows what nodes keep: our engine, or the nodes themselves where they may be asked."""
    if isinstance(grid, InProcessGrid):
        return {"engine": grid}
    asked = values["checkpoint-nodes"]
    if asked == "always" or (asked == "auto" and is_simulation(grid)):
        return {"nodes": RemoteState(grid, values["round-timeout"])}
    return {}


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the run came to: its last round, and all replies that were lost, by reason."""
    lost: dict[str, int] = {}
    for record in rounds:
        for reason, count in record["rejected"].items():
            lost[reason] = lost.get(reason, 0) + count
    wall = sum(record["wall_seconds"] for record in rounds)
    return {"status": "completed", "last": rounds[-1], "lost-replies": lost, "wall-seconds": wall}
