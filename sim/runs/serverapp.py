"""Common structure of the suite's ServerApps: settings, engine, run folder, checkpoints, progress, table."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from logging import INFO
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.global_draws import seed_global_draws
from hedgerow.sim.engine._compat import is_simulation
from hedgerow.sim.engine.generators import WHICH_ARE_LATE, Generators, Unrepeated
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.engine.nodes import RemoteState
from hedgerow.sim.runs.checkpoint import keep_model, save_node_models
from hedgerow.sim.runs.common_settings import LENGTHS, RunSettings
from hedgerow.sim.runs.folder import (
    RunFolderError,
    lost_replies,
    new_run_folder,
    read_config,
    recorded_settings,
)
from hedgerow.sim.runs.live import LiveProgress, round_table, run_end
from hedgerow.sim.runs.packing_grid import PackingGrid
from hedgerow.sim.runs.recorder import RunRecorder, Stateful, code_folder, environment
from hedgerow.sim.runs.trackers import Tracking
from hedgerow.wire.budget import Budget
from hedgerow.wire.checks import plain_name
from hedgerow.wire.failures import RunFailedError
from hedgerow.wire.records import to_state_dict

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Measure = Callable[[dict[str, Tensor]], Mapping[str, Any]]
# The engine's name for nodes that are programs of their own.
_DEPLOYMENT = "flower-deployment"
# Key of a run's record for the description of the nodes' own data.
_OWN_DATA = "own-data"
# Apps made by ``server_app``: the function that reads their settings and the one that makes the experiment.
_OWN: WeakKeyDictionary[ServerApp, tuple[Callable[..., Any], Callable[..., Any]]] = WeakKeyDictionary()


S = TypeVar("S", bound=RunSettings)


class _Strategy(Stateful, Protocol):
    budget: Budget | None
    idle_every: int

    @property
    def privacy_record(self) -> Mapping[str, Any] | None:
        """What nodes may have disclosed, for the run's record."""

    @property
    def out_of_budget(self) -> bool:
        """Whether the run has reached ``budget``."""

    @property
    def start(self) -> Callable[..., Result]:
        """As in Flower's ``Strategy``."""


class _OwnNodes(Protocol):
    """The interface of ``hedgerow.strategies.OwnNodes`` that is used here."""

    def strategy(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a factory of the strategy for these nodes."""

    def about(self) -> Mapping[str, Any]:
        """Return a description of their data for the run's record."""

    @property
    def samples(self) -> Mapping[str, str]:
        """On what they measure, as in ``Experiment``."""


@dataclass(frozen=True)
class Experiment:
    """An app's part of a run, made from its settings.

    Parameters
    ----------
    title, realism : str
        The title of the final table, and a statement of what is emulated and what is real.
    strategy : Callable[..., Strategy]
        Makes the strategy, given ``on_round_end``: callbacks after each round.
    initial_arrays : ArrayRecord
        The initial model.
    num_rounds : int
        Number of rounds, >= 1.
    measure : Callable[[dict[str, Tensor]], Mapping[str, float or list]]
        Maps the global model's state dict to its metrics. If it has ``in_run``, a function of Flower's grid
        and the strategy, the run measures by what this returns.
    train_config : Mapping[str, Any] (default: none)
        The config of every train message.
    num_nodes : int or None (default: None)
        Size of the federation, if not ``num-clients``.
    together : Callable[[NDArray, Sequence[float]], (NDArray, Mapping)] or None (default: None)
        For runs of several edge servers without a cloud: maps their models (D, M) and cluster sizes to the
        global model (M,) and its metrics. The run then keeps the models that it evaluates (``trained.py``).
    node_models : Callable[[], Mapping[str, Mapping[str, NDArray]]] or None (default: None)
        Returns the nodes' own models at the end, by name, where the server sees them.
    module : nn.Module or None (default: None)
        The architecture whose state dict the model files hold.
    predict : Callable[[Mapping[str, NDArray]], Mapping[str, Any]] or None (default: None)
        Maps a model's arrays to its metrics without a run, where ``measure`` does not.
    samples : Mapping[str, str] or None (default: None)
        On what each metric of ``measure`` is measured, such as "on the test samples of mnist-5k"; "*" stands
        for all others. None takes ``measure.samples``, if there is one.
    about : Mapping[str, Any] (default: nothing)
        Additional entries of the run's ``config.json``.
    """

    title: str
    realism: str
    strategy: Callable[..., _Strategy]
    initial_arrays: ArrayRecord
    num_rounds: int
    measure: Measure
    train_config: Mapping[str, Any] = field(default_factory=dict)
    num_nodes: int | None = None
    together: Callable[[NDArray[Any], Sequence[float]], tuple[NDArray[Any], Mapping[str, Any]]] | None = None
    node_models: Callable[[], Mapping[str, Mapping[str, NDArray[Any]]]] | None = None
    module: nn.Module | None = None
    predict: Callable[[Mapping[str, NDArray[Any]]], Mapping[str, Any]] | None = None
    samples: Mapping[str, str] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LearntExperiment:
    """An experiment on the nodes' own data, which is made after the nodes have described their data.

    Parameters
    ----------
    values : RunSettings
        The app's settings, with ``standardise``.
    gather : Callable[..., OwnNodes]
        ``OwnNodes.gather``, which queries the nodes.
    features : Callable[[tuple[int, ...]], int]
        Maps a sample's shape to its number of separately standardised features.
    make : Callable[[OwnNodes], Experiment]
        Makes the experiment from the nodes' reports.
    num_nodes : int or None (default: None)
        Size of the federation, if not ``num-clients``.
    quorum : int or None (default: None)
        Number of nodes required to start, if not ``min-available-nodes``.
    """

    values: RunSettings
    gather: Callable[..., _OwnNodes]
    features: Callable[[tuple[int, ...]], int]
    make: Callable[[Any], Experiment]
    num_nodes: int | None = None
    quorum: int | None = None

    def learn(self, grid: Grid, earlier: Mapping[str, Any]) -> Experiment:
        """Query the nodes and make the experiment; ``earlier`` is the config of a resumed run, or empty."""
        values = self.values
        nodes = self.gather(
            grid,
            self.num_nodes or values.num_clients,
            values.round_timeout,
            quorum=self.quorum or values.min_available_nodes or None,
            features=self.features if values.of("standardise") == "federated" else None,
            earlier=earlier.get(_OWN_DATA),
        )
        made = self.make(nodes)
        return replace(
            made,
            strategy=nodes.strategy(made.strategy),
            samples={**nodes.samples, **(made.samples or {})},
            about={_OWN_DATA: nodes.about()},
        )


def server_app(
    name: str,
    read: Callable[[Mapping[str, UserConfigValue]], S],
    client_app: ClientApp,
    experiment: Callable[[S], Experiment | LearntExperiment],
) -> ServerApp:
    """Return the ServerApp that runs an experiment with the settings of the run config.

    It writes or resumes a run folder and prints a table at the end. With ``engine = "inprocess"`` the nodes
    run in its own process.

    Parameters
    ----------
    name : str
        The app's name, for the run folder; an app that is a copy is called by its pyproject.toml's.
    read : Callable[[run config], values]
        Checks the run config and returns the app's ``RunSettings``.
    client_app : ClientApp
        The app's ClientApp, for the in-process engine.
    experiment : Callable[[values], Experiment or LearntExperiment]
        Makes the experiment.
    """
    app = ServerApp()
    _OWN[app] = read, experiment

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            complete(grid, context)
        except RunFailedError as error:
            # Flower prints the traceback of every error; here the message is enough.
            raise error.with_traceback(None) from None

    def complete(grid: Grid, context: Context) -> None:
        values = read(context.run_config)
        _check_length(values)
        # For draws of the user's own model, data and aggregators; the suite's code has its own generators.
        seed_global_draws(values.seed, later=True)
        made = experiment(values)
        if values.engine == "inprocess":
            grid = InProcessGrid.inside(
                grid,
                client_app,
                context,
                num_nodes=made.num_nodes,
                workers=values.workers,
            )
        engine = _engine(grid)
        if engine == _DEPLOYMENT:
            grid = cast(Grid, PackingGrid(grid))
        if isinstance(made, LearntExperiment):
            made = made.learn(grid, read_config(values.resume) if values.resume else {})
        code = code_folder(experiment)
        begun = environment(engine=engine, app=code)
        called = _name_of(code, name)
        config = {
            "app": called,
            **({} if called == name else {"copy-of": name}),
            "realism": made.realism,
            "run": {**context.run_config, **values.run_config},
            "environment": begun,
            "measured": dict(getattr(made.measure, "samples", {}) if made.samples is None else made.samples),
            **made.about,
        }
        if getattr(grid, "real_time", False):
            config["time"] = "real"
        recorder = RunRecorder(
            Path(values.resume) if values.resume else new_run_folder(values.output_dir, called),
            config,
            checkpoint_every=values.checkpoint_every,
            defaults=values.defaults(),
        )
        with closing(recorder):
            _run(made, grid, values, recorder, config)

    return app


def _name_of(code: Path | None, name: str) -> str:
    """Return an app's name: ``name``, unless the pyproject.toml beside its code has another one."""
    for folder in () if code is None else (code, *code.parents[:1]):
        if (folder / "pyproject.toml").is_file():
            own = str(
                tomllib.loads((folder / "pyproject.toml").read_text("utf-8")).get("project", {}).get("name")
            )
            return name if plain_name(own) == plain_name(name) else own
    return name


def _check_length(values: RunSettings) -> None:
    """Raise RunFolderError if a resumed run has another length on which its earlier rounds depend."""
    if not values.resume or not (why := values.needs_length):
        return
    before, now = recorded_settings(values.resume), values.run_config
    for key in LENGTHS:
        if key in now and before.get(key, now[key]) != now[key]:
            raise RunFolderError(f"{key} must be {before[key]}, as before, got {now[key]}: {why}")


def records_itself(app: ServerApp) -> bool:
    """Return whether a ServerApp was made by ``server_app`` and thus writes its own run folder."""
    return app in _OWN


def experiment_of(app: ServerApp, config: Mapping[str, UserConfigValue]) -> Experiment | LearntExperiment:
    """Return the experiment of an app made by ``server_app``; ValueError for another app."""
    if app not in _OWN:
        raise ValueError("the app must be made by server_app")
    read, experiment = _OWN[app]
    return experiment(read(config))  # type: ignore[no-any-return]


def _run(
    experiment: Experiment, grid: Grid, values: RunSettings, recorder: RunRecorder, config: Mapping[str, Any]
) -> None:
    log(INFO, "Run folder: %s", recorder.folder)
    num_rounds = experiment.num_rounds
    live = LiveProgress(num_rounds, values.quiet)

    def tracked(_: object) -> None:
        tracking.on_round_end(recorder.rounds[-1])

    strategy = experiment.strategy(on_round_end=[recorder.on_round_end, tracked, live])
    strategy.budget = Budget.parse(values.stop_after)
    unrepeated = Unrepeated(values.seed, config["run"])
    if getattr(grid, "real_time", False):
        unrepeated.add(WHICH_ARE_LATE)
    keepers = _keepers_of_node_state(grid, values)
    strategy.idle_every = values.checkpoint_every if "nodes" in keepers else 0
    parts = {"strategy": strategy, "generators": Generators(), **keepers}
    recorder.keep_state(**parts)
    before = 0
    if values.resume:
        recorder.resume()
        before = len(recorder.rounds)
    in_run = getattr(experiment.measure, "in_run", None)
    tracking = Tracking(config, recorder.folder, recorder.rounds[-1]["round"] if recorder.rounds else -1)
    with tracking:
        with recorder.guard(), live, recorder.privacy(strategy):
            result = strategy.start(
                grid=grid,
                initial_arrays=experiment.initial_arrays,
                num_rounds=num_rounds,
                timeout=values.round_timeout,
                train_config=ConfigRecord(dict(experiment.train_config)),
                evaluate_config=None,
                evaluate_fn=central_evaluation(
                    experiment.measure if in_run is None else in_run(grid, strategy),
                    every=values.evaluate_every,
                    is_last=lambda number: number == num_rounds or strategy.out_of_budget,
                    folder=recorder.folder if experiment.together else None,
                ),
            )
        of_nodes = experiment.node_models() if experiment.node_models else {}
        save_node_models(recorder.folder, of_nodes)
        recorder.finish(
            {**run_summary(recorder.rounds), **unrepeated.summary()},
            {key: array.numpy() for key, array in result.arrays.items()},
        )
    print(round_table(recorder.rounds, experiment.title))
    if not len(result.arrays):
        where = "each node's is in the folder 'nodes'" if of_nodes else "each node keeps its own"
        print(f"No model.npz: the server has no model; {where}.")
    if before and len(recorder.rounds) == before:
        print("The run was already finished: nothing was left to do.")
    print(run_end(recorder.rounds, recorder.folder), flush=True)


def central_evaluation(
    measure: Measure, *, every: int, is_last: Callable[[int], bool], folder: Path | None = None
) -> EvaluateFn:
    """Return the central evaluation: before the first round, every ``every`` rounds and after the last.

    ``measure`` maps a model's state dict to its metrics. With a ``folder`` each evaluated model is saved
    there.
    """

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every and not is_last(server_round):
            return None
        if folder is not None:
            keep_model(folder, server_round, {key: array.numpy() for key, array in arrays.items()})
        return MetricRecord(dict(measure(to_state_dict(arrays))))

    return evaluate


def _engine(grid: Grid) -> str:
    """Return the name of the engine that runs the nodes, from the grid."""
    if isinstance(grid, InProcessGrid):
        return "inprocess"
    return "flower-simulation" if is_simulation(grid) else _DEPLOYMENT


def _keepers_of_node_state(grid: Grid, values: RunSettings) -> dict[str, object]:
    """Return the part that saves the nodes' state: our engine, or queries to the nodes if allowed."""
    if isinstance(grid, InProcessGrid):
        return {"engine": grid}
    setting = values.checkpoint_nodes
    if setting == "always" or (setting == "auto" and is_simulation(grid)):
        return {"nodes": RemoteState(grid, values.round_timeout)}
    return {}


def run_summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a run's summary: its last round, traffic by link, and lost replies by reason."""
    return {
        "status": "completed",
        "last": rounds[-1] if rounds else {},
        "by_link": rounds[-1].get("by_link", {}) if rounds else {},
        "lost-replies": lost_replies(rounds),
        "wall-seconds": sum(record["wall_seconds"] for record in rounds),
    }
