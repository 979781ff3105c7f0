"""Run a Flower App on this machine: in this process, or through ``flwr run`` without its pitfalls.

An app is a folder as ``flwr new`` lays it out. Its pyproject.toml names the ServerApp and the ClientApp
(``[tool.flwr.app.components]``) and every run-config key with its default (``[tool.flwr.app.config]``).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context, RecordDict, UserConfig, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from hedgerow.sim.engine._compat import SUPERLINK_NODE_ID, app_pyproject, flower_identity, read_toml
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.engine.faults import FaultModel
from hedgerow.sim.deploy.flower_cli import FlowerRun, environment, healthy
from hedgerow.sim.deploy.processes import Program, free_ports, program, uninterrupted
from hedgerow.sim.runs.recorder import read_config, sigterm_raises

__all__ = [
    "AppSpec",
    "LoadedApp",
    "Plan",
    "absolute_output",
    "find_app",
    "flower_run",
    "follow",
    "load_app",
    "parse_overrides",
    "plan_run",
    "resumed_config",
    "run_app",
    "toml_text",
    "toml_value",
]

T = TypeVar("T")

# Flower's own default since 1.32.
DEFAULT_NODES = 2
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_PAIR = re.compile(r"""([^\s=]+)\s*=\s*("[^"]*"|'[^']*'|\S+)""")


@dataclass(frozen=True)
class AppSpec:
    """What an app's pyproject.toml says.

    Parameters
    ----------
    name : str
        ``[project] name``.
    folder : Path
        The app's folder, absolute.
    config : dict
        The run config's defaults, nested tables flattened to dotted keys.
    components : dict of str to str
        ``serverapp`` and ``clientapp``, as ``module:attribute``.
    num_supernodes : int or None
        ``[tool.hedgerow] num-supernodes``: the size that the app is meant for.
    more_nodes : dict (default: none)
        ``[tool.hedgerow.more-nodes]``: run-config keys that number nodes beside the clients, each with the
        keys and values under which it does: ``num-servers = { edge-servers = "nodes" }``.
    """

    name: str
    folder: Path
    config: UserConfig
    components: Mapping[str, str]
    num_supernodes: int | None
    more_nodes: Mapping[str, UserConfig] = field(default_factory=dict)

    def num_nodes(self, run_config: UserConfig | None = None) -> int:
        """Return the federation's size where the user names none.

        Run-config key ``num-clients`` (where > 0), else ``num_supernodes``, else 2 as in Flower; and the
        nodes that are no clients.
        """
        config = run_config or self.config
        clients = int(config.get("num-clients", 0)) or self.num_supernodes or DEFAULT_NODES
        return clients + sum(self.no_clients(config).values())

    def no_clients(self, run_config: UserConfig) -> dict[str, int]:
        """Return how many nodes are no clients, by the run-config key that says so."""
        return {
            key: count
            for key, conditions in self.more_nodes.items()
            if all(run_config.get(other) == value for other, value in conditions.items())
            and isinstance(count := run_config.get(key), int)
            and count > 0
        }


@dataclass(frozen=True)
class LoadedApp:
    """An app with its components imported."""

    spec: AppSpec
    server_app: ServerApp
    client_app: ClientApp

    @property
    def name(self) -> str:
        """The app's name."""
        return self.spec.name

    @property
    def config(self) -> UserConfig:
        """The run config's defaults."""
        return dict(self.spec.config)


def find_app(path_or_module: str | Path) -> AppSpec:
    """Read the pyproject.toml of an app given by its folder, or by the name of a module inside it.

    Raises
    ------
    ValueError
        If there is no Flower App there.
    """
    folder = Path(path_or_module).expanduser().resolve()
    if not folder.exists():
        # Flower's own command line takes no app whose name has an underscore; folders of before had them.
        folder = folder.with_name(folder.name.replace("_", "-"))
    if not (folder / "pyproject.toml").is_file():
        folder = _folder_of_module(str(path_or_module))
    pyproject, config = app_pyproject(folder)
    ours = pyproject["tool"].get("hedgerow", {})
    num_supernodes, more_nodes = ours.get("num-supernodes"), ours.get("more-nodes", {})
    if num_supernodes is not None and (not isinstance(num_supernodes, int) or num_supernodes < 1):
        raise ValueError(
            f"{folder / 'pyproject.toml'}: [tool.hedgerow] num-supernodes = {num_supernodes!r} "
            "is not an integer >= 1"
        )
    for key, conditions in more_nodes.items():
        unknown = [name for name in (key, *conditions) if name not in config]
        if unknown:
            raise ValueError(
                f"{folder / 'pyproject.toml'}: [tool.hedgerow.more-nodes] {key} = {conditions!r} names "
                f"{unknown[0]!r}; valid are keys of [tool.flwr.app.config]"
            )
    return AppSpec(
        name=pyproject["project"]["name"],
        folder=folder,
        config=config,
        components=pyproject["tool"]["flwr"]["app"]["components"],
        num_supernodes=num_supernodes,
        more_nodes=more_nodes,
    )


def load_app(path_or_module: str | Path) -> LoadedApp:
    """Import an app's components, with its folder first on ``sys.path`` (and left there, as Flower does).

    Raises
    ------
    ValueError
        If there is no Flower App there, a component is not what pyproject.toml says, or a module of that
        name is already imported from another place.
    """
    spec = find_app(path_or_module)
    if str(spec.folder) not in sys.path:
        sys.path.insert(0, str(spec.folder))
        importlib.invalidate_caches()
    server_app = _component(spec, "serverapp", ServerApp)
    client_app = _component(spec, "clientapp", ClientApp)
    return LoadedApp(spec, server_app, client_app)


@dataclass(frozen=True)
class Plan:
    """Everything that a run of an app was asked to be.

    Parameters
    ----------
    run_config : dict
        The app's run config with the user's changes; ``num-clients``, where the app has that key, is the
        number of nodes without those of ``AppSpec.no_clients``.
    num_nodes : int
        Size of the federation.
    faults : FaultModel or None
        What the keys ``fault-*`` say. They may be given whether the app declares them or not.
    """

    run_config: UserConfig
    num_nodes: int
    faults: FaultModel | None


def plan_run(
    spec: AppSpec, overrides: Sequence[str] = (), *, num_nodes: int | None = None, device: str | None = None
) -> Plan:
    """Check all that the user asks of a run, before anything of the app is started.

    Parameters
    ----------
    spec : AppSpec
        The app.
    overrides : sequence of str
        Each ``'key=value key2=value2'`` with TOML values (a text need not be quoted where the app's
        default is a text), or the path of a ``.toml`` file. Later ones win.
    num_nodes : int or None (default: None)
        Size of the federation, >= 1. None: ``spec.num_nodes``.
    device : str or None (default: None)
        ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"auto"``: the app's key ``device``.

    Raises
    ------
    ValueError
        With one line for every key that the app lacks and every value of the wrong type.
    """
    changes = parse_overrides(overrides, spec.config)
    if device is not None:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"device: {device!r} is not cpu, cuda, cuda:N or auto")
        changes["device"] = device
    if num_nodes is not None and num_nodes < 1:
        raise ValueError(f"num_nodes: {num_nodes} is not >= 1")
    others = spec.no_clients({**spec.config, **changes})
    no_clients = sum(others.values())
    if num_nodes is not None and num_nodes <= no_clients:
        named = " and ".join(f"{key}={count}" for key, count in others.items())
        raise ValueError(f"num_nodes: {num_nodes} is not above {named}, which are nodes too")
    if num_nodes is not None and changes.get("num-clients", num_nodes - no_clients) != num_nodes - no_clients:
        raise ValueError(f"num-clients={changes['num-clients']!r}: {num_nodes} nodes were asked for")
    undeclared = {key: changes.pop(key) for key in list(changes) if _is_fault(key) and key not in spec.config}
    run_config = {
        **spec.config,
        **_checked(changes, spec, _fault_errors({**spec.config, **changes, **undeclared})),
    }
    faults = FaultModel.from_run_config({**run_config, **undeclared})
    num_nodes = num_nodes or spec.num_nodes(run_config)
    if "num-clients" in run_config:
        run_config["num-clients"] = num_nodes - no_clients
    return Plan({**run_config, **undeclared}, num_nodes, faults)


def _is_fault(key: str) -> bool:
    return key.startswith("fault-")


def _fault_errors(run_config: UserConfig) -> list[str]:
    try:
        FaultModel.from_run_config(run_config)
    except ValueError as error:
        return str(error).splitlines()
    return []


def run_app(
    app: LoadedApp, plan: Plan | None = None, *, strict: bool = False, max_in_flight: int | None = None
) -> Context:
    """Run an app in this process and return the ServerApp's context.

    Parameters
    ----------
    app : LoadedApp
        The app.
    plan : Plan or None (default: None)
        From ``plan_run``. None: the app's defaults. Key ``seed`` of its run config keys node ids and faults.
    strict, max_in_flight
        As in ``InProcessGrid``.

    Raises
    ------
    Exception
        Whatever the ServerApp raises.
    """
    plan = plan or plan_run(app.spec)
    grid = InProcessGrid(
        app.client_app,
        plan.num_nodes,
        run_config=plan.run_config,
        faults=plan.faults,
        strict=strict,
        seed=_seed(plan.run_config),
        max_in_flight=max_in_flight,
    )
    context = Context(
        run_id=grid.run.run_id,
        node_id=SUPERLINK_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(plan.run_config),
    )
    with flower_identity(grid.run.run_id):
        app.server_app(grid, context)
    return context


def _seed(run_config: UserConfig) -> int:
    """Return the key of node ids and faults; a bad seed is for the app to refuse, with its other settings."""
    seed = run_config.get("seed", 0)
    return seed if isinstance(seed, int) and seed >= 0 else 0


def flower_run(
    spec: AppSpec, plan: Plan | None = None, *, client_cpus: int = 1, client_gpus: float = 0.0
) -> int:
    """Run an app on Flower's own engine, through ``flwr run``, and return the run's true exit status.

    The run gets a SuperLink of its own, on a free port and with a home of its own, in the current
    directory; it is stopped when the run ends or is interrupted. Nothing is installed for the run: it
    sees this environment. The logs are printed as they come. A relative ``output-dir`` is made absolute.

    Parameters
    ----------
    spec : AppSpec
        The app.
    plan : Plan or None (default: None)
        From ``plan_run``, without faults. None: the app's defaults.
    client_cpus : int (default: 1)
        CPUs that Ray reserves for each client, >= 1.
    client_gpus : float (default: 0.0)
        Share of a GPU that Ray reserves for each client, >= 0.

    Returns
    -------
    int
        0 if Flower says that the run completed, 1 if not.

    Raises
    ------
    ValueError
        If the plan has faults, which Flower's engine cannot play, or a parameter is out of range.
    RuntimeError
        If Flower's programs are missing, or the SuperLink does not start.
    """
    if client_cpus < 1:
        raise ValueError(f"client_cpus: {client_cpus} is not an integer >= 1")
    if not client_gpus >= 0:
        raise ValueError(f"client_gpus: {client_gpus} is not >= 0")
    plan = plan or plan_run(spec)
    if plan.faults is not None:
        raise ValueError("fault-*: Flower's engine plays no faults; use the engine inprocess")
    run_config = absolute_output(plan.run_config)
    federation = (
        f"num-supernodes={plan.num_nodes} client-resources-num-cpus={client_cpus} "
        f"client-resources-num-gpus={float(client_gpus)}"
    )
    with sigterm_raises(), _superlink() as (home, env):
        overrides = home / "run-config.toml"
        overrides.write_text(toml_text(run_config), encoding="utf-8")
        arguments = [str(spec.folder), "--federation-config", federation]
        if run_config:
            arguments += ["--run-config", str(overrides)]
        print("$", shlex.join(["flwr", "run", *arguments, "--stream"]), flush=True)
        return follow(FlowerRun(arguments, env))


# Overrides


def parse_overrides(overrides: Sequence[str], defaults: UserConfig) -> UserConfig:
    """Return the changes that the texts of ``--run-config`` ask for, later ones winning.

    Raises
    ------
    ValueError
        If a text is neither key=value pairs nor a readable TOML file.
    """
    changes: UserConfig = {}
    for override in overrides:
        path = Path(override).expanduser()
        if override.endswith(".toml") and ("=" not in override or path.is_file()):
            try:
                changes.update(read_toml(path))
            except (OSError, ValueError) as error:
                raise ValueError(f"run config {override}: {error}") from error
        else:
            pairs = _PAIR.findall(override)
            if not pairs or _PAIR.sub("", override).strip():
                raise ValueError(f"run config {override!r} is not 'key=value key=value ...' or a .toml file")
            changes.update({key: _value(key, text, defaults) for key, text in pairs})
    return changes


def _value(key: str, text: str, defaults: UserConfig) -> UserConfigValue:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if not isinstance(defaults.get(key, ""), str):
            default = defaults[key]
            raise ValueError(
                f"{key}={text}: a {type(default).__name__} is needed, like {default!r}"
            ) from None
        return text
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{key}={text}: a bool, int, float or text is needed")
    return value


def _checked(changes: UserConfig, spec: AppSpec, errors: list[str]) -> UserConfig:
    """Hold changes to Flower's rule: only keys that the app declares, each of the declared type."""
    out: UserConfig = {}
    for key, value in changes.items():
        default = spec.config.get(key)
        if default is None:
            errors.append(f"{key}={value!r}: app {spec.name!r} has no such key")
        elif isinstance(default, float) and type(value) is int:
            out[key] = float(value)
        elif type(value) is not type(default):
            errors.append(f"{key}={value!r}: a {type(default).__name__} is needed, like {default!r}")
        else:
            out[key] = value
    if errors:
        raise ValueError("\n".join([*errors, f"valid keys: {', '.join(sorted(spec.config)) or 'none'}"]))
    return out


# Components


def _folder_of_module(module: str) -> Path:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise ValueError(
            f"app: {module!r} is neither a folder with a pyproject.toml nor an importable module"
        )
    for folder in Path(found.origin).resolve().parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    raise ValueError(f"app: no pyproject.toml above {found.origin}")


def _component(spec: AppSpec, name: str, kind: type[T]) -> T:
    reference = spec.components[name]
    module_name, _, attributes = reference.partition(":")
    package = module_name.partition(".")[0]
    own = next((p for p in (spec.folder / package, spec.folder / f"{package}.py") if p.exists()), None)
    component: Any = importlib.import_module(module_name)
    origin = getattr(component, "__file__", None)
    if own is not None and origin is not None and spec.folder not in Path(origin).resolve().parents:
        raise ValueError(
            f"{name}: module {module_name!r} of {spec.folder} is already imported from {origin}; "
            "run the apps in separate processes"
        )
    for attribute in attributes.split("."):
        component = getattr(component, attribute, None)
    if not isinstance(component, kind):
        raise ValueError(
            f"{name} = {reference!r} in {spec.folder / 'pyproject.toml'} is a {type(component).__name__}, "
            f"not a {kind.__name__}"
        )
    return component


# Flower's programs


@contextmanager
def _superlink(patience: float = 60.0) -> Iterator[tuple[Path, dict[str, str]]]:
    """Keep a SuperLink for one run; yields its home and the environment that leads to it."""
    port, control_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="hedgerow-flwr-", ignore_cleanup_errors=True) as home:
        env = {
            **environment(Path(home)),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control_port),
        }
        command = [program("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        superlink = Program("the SuperLink", command, env, Path(home) / "superlink.log")
        try:
            superlink.start()
            superlink.wait_until(lambda: healthy(port), patience)
            yield Path(home), env
        finally:
            # An interrupted run's simulation and its Ray would outlive their SuperLink.
            with uninterrupted():
                superlink.stop()


def absolute_output(run_config: UserConfig) -> UserConfig:
    """Return the run config with an absolute ``output-dir``: Flower's programs may work elsewhere."""
    output = run_config.get("output-dir")
    if not isinstance(output, str) or not output:
        return dict(run_config)
    return {**run_config, "output-dir": str(Path(output).expanduser().absolute())}


def follow(run: FlowerRun) -> int:
    """Follow a run to its end and return its true exit code; say on stderr how it failed."""
    try:
        end = run.wait()
    finally:
        run.close()
    if end.exit_code:
        print(f"Run {end.run_id}: {end.status} {end.details}".rstrip(), file=sys.stderr)
    return end.exit_code


def resumed_config(spec: AppSpec, folder: str) -> list[str]:
    """Return the overrides that go on with an earlier run of an app: its settings, and where it lies.

    Raises
    ------
    RunFolderError
        If the folder is not that of a run.
    ValueError
        If the app has no key ``resume``.
    """
    if "resume" not in spec.config:
        raise ValueError(f"--resume: app {spec.name!r} has no run-config key 'resume'")
    earlier = read_config(folder)["run"]
    known = {key: value for key, value in earlier.items() if key in spec.config or _is_fault(key)}
    known["resume"] = str(Path(folder).expanduser().resolve())
    return [f"{key}={toml_value(value)}" for key, value in known.items()]


def toml_text(values: UserConfig) -> str:
    """Return a flat run config as TOML, which ``--run-config`` reads back unchanged."""
    return "".join(f"{json.dumps(key)} = {toml_value(value)}\n" for key, value in values.items())


def toml_value(value: UserConfigValue) -> str:
    """Return a value as TOML."""
    # JSON's texts, numbers and booleans are TOML's too; its own inf and nan are not TOML's; Python's are.
    return repr(value) if type(value) is float else json.dumps(value, ensure_ascii=False)
