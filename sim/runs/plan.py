"""Plan a run from the user's options: the app's run config with overrides, the number of nodes, faults.

Overrides have the form of Flower's ``--run-config``: ``'key=value key2=value2'``, or a TOML file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from flwr.app import UserConfig, UserConfigValue

from hedgerow.sim.engine._compat import read_toml
from hedgerow.sim.engine.faults import FaultModel
from hedgerow.sim.engine.workers import check_workers
from hedgerow.sim.runs.app import AppSpec, own_settings
from hedgerow.sim.runs.common_settings import IterationSettings
from hedgerow.sim.runs.folder import read_config, recorded_settings
from hedgerow.sim.runs.kinds import MAX_INT64, MAX_NODES
from hedgerow.sim.runs.settings import SettingsError, meant_key
from hedgerow.wire.checks import plain_name
from hedgerow.wire.printable import quoted, reason, shown

# Options of every run, whether its app has such a key or not.
_OPTIONS = ("output-dir", "seed")
# Keys whose value is a path on the server.
_PATHS = ("output-dir", "registry", "peer-ca", "peer-certificate", "peer-key")
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_PAIR = re.compile(r"""([^\s=]+)\s*=\s*("[^"]*"|'[^']*'|\S+)""")


@dataclass(frozen=True)
class Plan:
    """A run to be made.

    Parameters
    ----------
    run_config : dict
        The app's run config with the user's changes. ``num-clients``, if the app has that key, is the number
        of nodes without those of ``AppSpec.no_clients``.
    num_nodes : int
        Size of the federation.
    faults : FaultModel or None
        From the keys ``fault-*``, which every app accepts.
    seed, output_dir, workers
        The user's options for which the app has no key; None if not given.
    """

    run_config: UserConfig
    num_nodes: int
    faults: FaultModel | None
    seed: int | None = None
    output_dir: str | None = None
    workers: int | None = None

    def check_no_faults(self) -> None:
        """Raise ValueError if the plan has faults, which only the in-process engine injects."""
        if self.faults is not None:
            raise ValueError("fault-* must be used with `hedgerow run --engine inprocess`")


def plan_run(
    spec: AppSpec,
    overrides: Sequence[str] = (),
    *,
    num_nodes: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    output_dir: str | None = None,
    workers: int | None = None,
) -> Plan:
    """Check all options of a run before anything of the app starts.

    Parameters
    ----------
    spec : AppSpec
        The app.
    overrides : sequence of str
        Each ``'key=value key2=value2'`` with TOML values (the quotes of a text may be omitted if the app's
        default is a text), or the path of a ``.toml`` file. Later ones win.
    num_nodes : int or None (default: None)
        Size of the federation, >= 1; ``spec.num_nodes`` if None.
    device : str or None (default: None)
        ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"auto"``: the app's key ``device``.
    seed : int or None (default: None)
        In [0, 2^63).
    output_dir : str or None (default: None)
        Parent folder of the run folder.
    workers : int or None (default: None)
        As in ``InProcessGrid``.

    Raises
    ------
    SettingsError
        With one line for every unknown key, every value of the wrong type, and, for the suite's apps, every
        value out of range.
    """
    changes, errors = _parsed(overrides, spec.config)
    if device is not None:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"device must be cpu, cuda, cuda:N or auto, got {quoted(device)}")
        changes["device"] = device
    if seed is not None and not 0 <= seed <= MAX_INT64:
        raise ValueError(f"seed must be an integer in [0, 2^63), got {quoted(seed)}")
    options = {"seed": seed, "output-dir": output_dir}
    changes |= {key: value for key, value in options.items() if value is not None and key in spec.config}
    own = own_settings(spec)
    # In another project's app a key of this name may have another meaning.
    has_workers = own is not None and "workers" in own.SETTINGS
    if workers is not None:
        check_workers(workers, real_time=False)
        changes |= {"workers": workers} if has_workers else {}
    if num_nodes is not None and not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes must be an integer in [1, {MAX_NODES}], got {num_nodes}")
    undeclared = {key: changes.pop(key) for key in list(changes) if _is_fault(key) and key not in spec.config}
    lengths = own.Settings if own is not None and issubclass(own.Settings, IterationSettings) else None
    rounds = changes.pop("num-rounds", None) if lengths else None
    taken, refused = _checked(changes, spec)
    run_config = {**spec.config, **taken}
    if lengths and rounds is not None:
        run_config["iterations"] = lengths.of_rounds(rounds, run_config)
    errors += refused + _fault_errors({**run_config, **undeclared})
    errors += _size_errors(spec, run_config, taken, num_nodes)
    if not errors:
        size = num_nodes or spec.num_nodes(run_config)
        if "num-clients" in run_config:
            run_config["num-clients"] = size - sum(spec.no_clients(run_config).values())
        faults = FaultModel.from_run_config({**run_config, **undeclared})
        errors += faults.absent(size) if faults else []
    if own is not None and not errors:
        own.read({**run_config, **undeclared})
    elif own is not None:
        said = {key for key in changes if key not in taken or key == "num-clients"}
        known = {key: value for key, value in run_config.items() if key in own.SETTINGS}
        errors += own.Settings.key_problems(known, besides=said).values()
    if errors:
        # If every unknown key has a suggestion, the list of all keys would hide them.
        if not all(meant_key(key, spec.config) for key in changes if key not in spec.config):
            errors.append(f"valid keys: {', '.join(sorted(spec.config)) or 'none'}")
        raise SettingsError("\n".join(errors))
    return Plan(
        {**run_config, **undeclared},
        size,
        faults,
        seed=None if "seed" in spec.config else seed,
        output_dir=None if "output-dir" in spec.config else output_dir,
        workers=None if has_workers else workers,
    )


def _size_errors(
    spec: AppSpec, run_config: UserConfig, changes: UserConfig, num_nodes: int | None
) -> list[str]:
    """Return the errors in the numbers of clients and of other nodes."""
    clients = changes.get("num-clients")
    # An app with the default 0 leaves the number to the federation.
    if isinstance(clients, int) and clients < min(1, int(spec.config.get("num-clients", 1))):
        return [f"num-clients must be an integer >= 1, got {quoted(clients)}"]
    if num_nodes is None:
        return []
    others = spec.no_clients(run_config)
    no_clients = sum(others.values())
    if num_nodes <= no_clients:
        named = " and ".join(f"{key}={count}" for key, count in others.items())
        return [f"num_nodes must be above {named}, which are nodes too, got {num_nodes}"]
    if clients not in (None, num_nodes - no_clients):
        return [f"num-clients must be {num_nodes - no_clients} with {num_nodes} nodes, got {quoted(clients)}"]
    return []


def _is_fault(key: str) -> bool:
    return key.startswith("fault-")


def _fault_errors(run_config: UserConfig) -> list[str]:
    try:
        FaultModel.from_run_config(run_config)
    except ValueError as error:
        return str(error).splitlines()
    return []


def resumed_config(spec: AppSpec, folder: str) -> list[str]:
    """Return the overrides that resume an earlier run of an app: its settings and its folder.

    Raises
    ------
    RunFolderError
        If the folder is not a run folder.
    ValueError
        If the app has no key ``resume``, or the run is of another app.
    """
    if "resume" not in spec.config:
        raise ValueError(f"--resume: app {spec.name!r} has no run-config key 'resume'")
    earlier = recorded_settings(folder)
    app = str(read_config(folder).get("app") or spec.name)
    unknown = [key for key in earlier if key not in spec.config and not _is_fault(key)]
    # A renamed copy of an app has the same keys.
    if unknown and plain_name(app) != plain_name(spec.name):
        raise ValueError(f"--resume: {folder} is a run of app {app!r}, not of {spec.name!r}")
    known = {key: value for key, value in earlier.items() if key in spec.config or _is_fault(key)}
    known["resume"] = str(Path(folder).expanduser().resolve())
    return [f"{key}={toml_value(value)}" for key, value in known.items()]


def recorded_config(spec: AppSpec, folder: str, *places: str) -> list[str]:
    """Return the overrides with which an earlier run's model is made, errors as in ``resumed_config``.

    ``resume``, ``registry`` and the keys ``places`` have their defaults: their files may be gone.
    """
    gone = [key for key in ("resume", "registry", *places) if key in spec.config]
    return [*resumed_config(spec, folder), *(f"{key}={toml_value(spec.config[key])}" for key in gone)]


def absolute_output(run_config: UserConfig) -> UserConfig:
    """Return the run config with absolute paths: Flower's processes may have another working folder."""
    paths = {key: path for key in _PATHS if isinstance(path := run_config.get(key), str) and path}
    return {**run_config, **{key: str(Path(path).expanduser().absolute()) for key, path in paths.items()}}


def parse_overrides(overrides: Sequence[str], defaults: UserConfig) -> UserConfig:
    """Return the values of ``--run-config`` options; later options win.

    Raises
    ------
    ValueError
        If an option is neither key=value pairs nor a readable TOML file, or gives a key two values: one error
        for all of them.
    """
    changes, errors = _parsed(overrides, defaults)
    if errors:
        raise ValueError("\n".join(errors))
    return changes


def _parsed(overrides: Sequence[str], defaults: UserConfig) -> tuple[UserConfig, list[str]]:
    changes: UserConfig = {}
    errors: list[str] = []
    for override in overrides:
        if _is_file(override):
            try:
                changes.update(read_toml(Path(override).expanduser()))
            except (OSError, ValueError, RuntimeError) as error:
                errors.append(f"run config {shown(override)}: {shown(reason(error, file=False), 300)}")
            continue
        pairs = _PAIR.findall(override)
        if not pairs or _PAIR.sub("", override).strip():
            errors.append(
                f"run config must be 'key=value key=value ...' or a .toml file, got {quoted(override)}"
            )
        given: dict[str, str] = {}
        for key, text in pairs:
            if given.setdefault(key, text) != text:
                errors.append(f"{shown(key)} must be given once, got {shown(given[key])} and {shown(text)}")
            try:
                changes[key] = _value(key, text, defaults)
            except ValueError as error:
                errors.append(str(error))
    return changes, errors


def _is_file(override: str) -> bool:
    if not override.endswith(".toml"):
        return False
    try:
        return "=" not in override or Path(override).expanduser().is_file()
    except RuntimeError:
        return False


def _value(key: str, text: str, defaults: UserConfig) -> UserConfigValue:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    # Not only TOMLDecodeError: Python refuses integers of more than 4,300 digits.
    except (ValueError, RecursionError):
        if not isinstance(defaults.get(key, ""), str):
            raise ValueError(_wrong_type(key, defaults[key], shown(text))) from None
        return text
    if isinstance(defaults.get(key), str) and isinstance(value, bool | int | float):
        return text  # A text without its quotes, such as classes=2.
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{shown(key)} must be true, false, a number or a text, got {shown(text)}")
    return value


def _wrong_type(key: str, default: UserConfigValue, got: str) -> str:
    return f"{shown(key)} must be {_KINDS[type(default)]}, like {toml_value(default)}, got {got}"


def _checked(changes: UserConfig, spec: AppSpec) -> tuple[UserConfig, list[str]]:
    """Apply Flower's rule: only keys that the app declares, with values of the declared type.

    Returns the changes that keep it, and the errors of the others.
    """
    out: UserConfig = {}
    errors = []
    for key, value in changes.items():
        default = spec.config.get(key)
        if default is None:
            meant = f"use --{key}" if key in _OPTIONS else meant_key(key, spec.config)
            errors.append(
                f"{shown(key)}={quoted(value)}: app {spec.name!r} has no such key"
                f"{f' ({meant})' if meant else ''}"
            )
        elif type(value) is int and abs(value) > MAX_INT64:
            errors.append(f"{shown(key)} must be an integer in [-2^63, 2^63), got {quoted(value)}")
        elif isinstance(default, float) and type(value) is int:
            out[key] = float(value)
        elif type(value) is not type(default):
            errors.append(_wrong_type(key, default, quoted(value)))
        else:
            out[key] = value
    return out, errors


def toml_text(values: UserConfig) -> str:
    """Return a flat run config as TOML, which ``--run-config`` reads back unchanged."""
    return tomli_w.dumps(values)


def toml_value(value: UserConfigValue) -> str:
    """Return a value as TOML, on one line."""
    # tomli_w writes only whole documents.
    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")
