"""Code shared by commands: options, exit codes for bad input and interruptions, reading of results."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.mistakes import machine_lacks
from hedgerow.sim.runs.hooks import shipped_apps
from hedgerow.wire.checks import ORDINARY, is_ordinary
from hedgerow.wire.printable import reason

if TYPE_CHECKING:
    from flwr.app import UserConfig

    from hedgerow.sim.runs.app import AppSpec
    from hedgerow.sim.runs.results import Results

APP_HELP = (
    f"{' or '.join([', '.join([*shipped_apps()][:-1]), [*shipped_apps()][-1]])}; "
    "or a Flower App's folder, or a module inside"
)
AppPath = Annotated[str, typer.Argument(metavar="APP", help=f"{APP_HELP}.")]
RunConfig = Annotated[
    list[str] | None,
    typer.Option("--run-config", "-c", help="'key=value key=value', or a .toml file. Repeatable."),
]
NodeConfig = Annotated[
    list[str] | None,
    typer.Option(
        help="'key=value ...' for every node, '0-3: key=value' for some; {partition-id} stands for its own: "
        "'0-9: data=node-{partition-id}.npz'. Repeatable."
    ),
]
OwnData = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder from `hedgerow deploy split`: each node trains on its own file there.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", help="Log the run live to mlflow, tensorboard or wandb. Each is an extra. Repeatable."
    ),
]


class Engine(StrEnum):
    """The engine that delivers the messages."""

    INPROCESS = "inprocess"
    FLOWER = "flower"


EngineName = Annotated[
    Engine,
    typer.Option("--engine", help="inprocess: in this process, without Ray. flower: through 'flwr run'."),
]


def check_inprocess(engine: Engine, ours: Mapping[str, bool]) -> None:
    """Raise ValueError for an option that only Hedgerow's engine has."""
    for option, given in ours.items():
        if given and engine is Engine.FLOWER:
            raise ValueError(f"{option} must be used with --engine inprocess")


def _default_runs() -> list[Path]:
    from hedgerow.sim.runs.folder import runs_folder

    return [runs_folder("runs")]


Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="[RUN|SWEEP]...",
        default_factory=_default_runs,
        show_default=False,
        help="Folders of runs or sweeps. Default: runs.",
    ),
]
Costs = Annotated[
    list[str] | None,
    typer.Option(
        "--x",
        help="rounds, iterations, sim-seconds, bits, payload-bytes, gradients, communications or "
        "wall-seconds; 'bits client->server' for one link. Repeatable. "
        "Default: what the sweep says, else rounds.",
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--y",
        help="A recorded metric: loss, accuracy, test-loss, consensus-error, ...; one number of a list as "
        "'f1[0]'. Repeatable. "
        "Default: what the sweep says, else loss.",
    ),
]


# Node config keys of this suite's apps, beside those that name own data and those that a deployment sets.
_NODE_KEYS = ("data-dir", "device", "group", "monitor", "noise-source", "policy", "role", "share-state")


@contextmanager
def bad_options(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of bad input, ``kinds`` or by default OSError and ValueError, into exit code 2."""
    caught = kinds or (OSError, ValueError)
    try:
        yield
    except caught as error:
        typer.echo(f"Error: {machine_lacks(error) or reason(error)}", err=True)
        raise typer.Exit(2) from error
    except RuntimeError as error:
        # pathlib's error for "~nosuchuser"
        if "home directory" not in str(error):
            raise
        typer.echo(f"Error: {error} Valid after ~ in a path is / or a user's name.", err=True)
        raise typer.Exit(2) from error


@contextmanager
def interruptible(message: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a message and exit code 130 or 143."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != 128 + signal.SIGTERM:
            raise
        typer.echo(message(), err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None


def check_ordinary(**numbers: float | None) -> None:
    """Raise one ValueError for all inputs so large or small that a formula would overflow.

    The names are those of the options, with ``_`` for ``-``; None means not given.
    """
    wrong = [
        f"--{key.replace('_', '-')} must be {ORDINARY}, got {value!r}"
        for key, value in numbers.items()
        if value is not None and not is_ordinary(value)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def known_node_keys(*apps: Path) -> list[str]:
    """Return the node config keys that this suite's apps read, and those of apps given by their folders."""
    from hedgerow.sim.runs.hooks import all_hooks
    from hedgerow.tasks import NODE_DATA_KEYS

    return sorted(
        {*_NODE_KEYS, *NODE_DATA_KEYS, *(key for one in all_hooks(*apps) for key in one.node_keys())}
    )


def read_node_configs(
    spec: AppSpec, texts: list[str] | None, num_nodes: int, own: Sequence[UserConfig] = ()
) -> list[UserConfig]:
    """Return each node's config from ``--node-config`` and ``own``, with absolute paths of data.

    ValueError for keys that no node of this suite's apps reads, or if the number of nodes is not that of the
    own data.
    """
    from hedgerow.sim.deploy.supernode import node_configs
    from hedgerow.sim.runs.app import own_settings
    from hedgerow.sim.runs.settings import check_node_keys
    from hedgerow.tasks import is_import_path

    configs = node_configs(texts or [], num_nodes)
    if own and len(own) != num_nodes:
        raise ValueError(f"num-clients must be {len(own)}, the nodes of --own-data, got {num_nodes}")
    if own:
        configs = [{**mine, **more} for mine, more in zip(own, configs, strict=True)]
    if own_settings(spec) is not None:
        check_node_keys(configs, known_node_keys(spec.folder))
        for config in configs:
            for key in ("data", "policy"):
                path = config.get(key)
                if isinstance(path, str) and path and not (key == "data" and is_import_path(path)):
                    # Made absolute, because a SuperNode has another working directory.
                    config[key] = str(Path(path).expanduser().absolute())
    return configs


def for_own_nodes(configs: Sequence[UserConfig], run_config: UserConfig) -> list[UserConfig]:
    """Return configs for nodes that the same user starts, and which therefore trust the run config.

    They use its ``data-dir``, made absolute, and may import every ``module:function`` that it names, which a
    device's owner would list in ``allow-imports``.
    """
    from hedgerow.tasks import is_import_path

    ours: UserConfig = {}
    if isinstance(folder := run_config.get("data-dir"), str) and folder:
        ours["data-dir"] = str(Path(folder).expanduser().absolute())
    texts = {value for value in run_config.values() if isinstance(value, str)}
    if paths := sorted(filter(is_import_path, texts)):
        ours["allow-imports"] = ",".join(paths)
    return [{**ours, **config} for config in configs]


def with_holdout(configs: Sequence[UserConfig], run_config: UserConfig) -> list[UserConfig]:
    """Return configs with the run's ``holdout`` and seed, for nodes whose data the same user owns.

    A device takes neither from a run.
    """
    if run_config.get("partition") != "own" or "holdout" not in run_config:
        return list(configs)
    ours: UserConfig = {"holdout": run_config["holdout"], "holdout-seed": run_config["seed"]}
    return [{**ours, **config} if "data" in config else config for config in configs]


def read_own_data(
    spec: AppSpec, folder: Path | None, nodes: int | None
) -> tuple[list[str], list[UserConfig]]:
    """Return the run-config overrides and node configs of ``--own-data``; empty without it.

    ValueError if the app or the number of nodes does not fit the folder.
    """
    from hedgerow.sim.deploy.supernode import read_split
    from hedgerow.sim.runs.plan import toml_value

    if folder is None:
        return [], []
    split = read_split(folder)
    lacking = sorted(split.run_config.keys() - spec.config.keys())
    if lacking:
        raise ValueError(
            f"--own-data {folder}: its files need the run-config key {', '.join(lacking)}, which app "
            f"{spec.name!r} does not have. Split the data for this app: `hedgerow deploy split --nodes` for "
            "apps that learn from samples, --groups for hospitals and devices"
        )
    if nodes not in (None, len(split.node_configs)):
        raise ValueError(f"--nodes must be {len(split.node_configs)}, the nodes of {folder}, got {nodes}")
    return [f"{key}={toml_value(value)}" for key, value in split.run_config.items()], split.node_configs


def name_and_number(option: str, text: str) -> tuple[str, float]:
    """Return name and number of ``--budget`` or ``--target``; ValueError for another form."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ValueError(f"{option} must be name=number, got {text!r}") from None


def load_results(paths: list[Path], ys: Sequence[str] | None = ()) -> Results:
    """Read runs and sweeps, and print their warnings on stderr.

    Runs that lack one of ``ys`` are excluded if others have it; None for the metrics compared by default.
    """
    from hedgerow.sim.runs.results import load

    results = load(paths)
    results = results.measuring(results.ys if ys is None else ys)
    for warning in results.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    return results
