"""A Flower App on disk: its pyproject.toml, its components and its settings.

An app is a folder as ``flwr new`` lays it out. Its pyproject.toml names the ServerApp and the ClientApp
(``[tool.flwr.app.components]``) and every run-config key with its default (``[tool.flwr.app.config]``).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flwr.app import UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from hedgerow.sim.engine._compat import app_pyproject
from hedgerow.sim.runs.hooks import shipped_app, shipped_apps
from hedgerow.wire.checks import did_you_mean
from hedgerow.wire.printable import quoted

T = TypeVar("T")

# Flower's default since 1.32.
DEFAULT_NODES = 2


@dataclass(frozen=True)
class AppSpec:
    """The contents of an app's pyproject.toml.

    Parameters
    ----------
    name : str
        ``[project] name``.
    folder : Path
        The app's folder, absolute.
    config : dict
        Defaults of the run config, with nested tables flattened to dotted keys.
    components : dict of str to str
        ``serverapp`` and ``clientapp``, as ``module:attribute``.
    num_supernodes : int or None
        ``[tool.hedgerow] num-supernodes``: the app's default number of nodes.
    more_nodes : dict (default: none)
        ``[tool.hedgerow.more-nodes]``: run-config keys that count nodes other than clients, each with the
        settings under which it counts: ``num-servers = { edge-servers = "nodes" }``.
    """

    name: str
    folder: Path
    config: UserConfig
    components: Mapping[str, str]
    num_supernodes: int | None
    more_nodes: Mapping[str, UserConfig] = field(default_factory=dict)

    def num_nodes(self, run_config: UserConfig | None = None) -> int:
        """Return the default size of the federation.

        The run config's ``num-clients`` if > 0, else ``num_supernodes``, else 2 as in Flower; plus the nodes
        that are not clients.
        """
        config = run_config or self.config
        clients = int(config.get("num-clients", 0)) or self.num_supernodes or DEFAULT_NODES
        return clients + sum(self.no_clients(config).values())

    def no_clients(self, run_config: UserConfig) -> dict[str, int]:
        """Return the number of nodes that are not clients, by run-config key."""
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
    """Read the pyproject.toml of an app, given by its folder or by the name of a module inside it.

    The suite's apps are also found by name, in any of the forms ``my-app``, ``MY-APP``, ``my_app`` and
    ``myapp``, unless a folder or a module has that name. ValueError if there is no Flower App.
    """
    folder = Path(path_or_module).expanduser().resolve()
    if not folder.exists():
        # Folders of earlier versions had an underscore, which Flower's command line refuses.
        folder = folder.with_name(folder.name.replace("_", "-"))
    if not folder.exists():
        folder = shipped_apps().get(str(path_or_module), folder)
    if not (folder / "pyproject.toml").is_file():
        folder = _folder_of_module(str(path_or_module))
    pyproject, config = app_pyproject(folder)
    ours = pyproject["tool"].get("hedgerow", {})
    num_supernodes, more_nodes = ours.get("num-supernodes"), ours.get("more-nodes", {})
    if num_supernodes is not None and (type(num_supernodes) is not int or num_supernodes < 1):
        raise ValueError(
            f"{folder / 'pyproject.toml'}: [tool.hedgerow] num-supernodes must be an integer >= 1, got "
            f"{num_supernodes!r}"
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
        If there is no Flower App, a component has the wrong type, or a module of that name is already
        imported from another place.
    """
    spec = find_app(path_or_module)
    server_app = _component(spec, "serverapp", ServerApp)
    client_app = _component(spec, "clientapp", ClientApp)
    return LoadedApp(spec, server_app, client_app)


def settings_module(spec: AppSpec) -> ModuleType:
    """Import the module ``settings`` beside an app's ServerApp; ValueError if it has no ``SETTINGS``."""
    package = spec.components["serverapp"].partition(":")[0].rpartition(".")[0]
    if not package:  # The app is one module.
        raise ValueError(
            f"app {spec.name!r} has no package with a settings module; its keys are in its pyproject.toml"
        )
    name = f"{package}.settings"
    try:
        module = _import(spec, name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"app {spec.name!r} has no module {name}; its keys are in its pyproject.toml"
        ) from error
    if not hasattr(module, "SETTINGS"):
        raise ValueError(f"module {name} of app {spec.name!r} has no SETTINGS")
    return module


def own_settings(spec: AppSpec) -> ModuleType | None:
    """Import an app's module with ``SETTINGS`` and ``read``, which checks them; None if it has none."""
    if "serverapp" not in spec.components:
        return None
    package, path = spec.components["serverapp"].partition(":")[0].partition(".")[0], list(sys.path)
    here = {name for name in sys.modules if name.partition(".")[0] == package}
    try:
        module = settings_module(spec)
    except ValueError:
        return None
    finally:
        # This process may run another copy of the app, whose modules have the same names.
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            if name not in here:
                del sys.modules[name]
    return module if hasattr(module, "read") else None


def _folder_of_module(module: str) -> Path:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        apps = shipped_apps()
        if (name := shipped_app(module)) is not None:
            return apps[name]
        meant = did_you_mean(module, apps)
        raise ValueError(
            f"app must be {', '.join(apps)}, a folder with a pyproject.toml or an importable module, got "
            f"{quoted(module)}{f' ({meant})' if meant else ''}"
        )
    for folder in Path(found.origin).resolve().parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    raise ValueError(f"app must have a pyproject.toml in a folder above {found.origin}")


def _component(spec: AppSpec, name: str, kind: type[T]) -> T:
    reference = spec.components[name]
    module_name, _, attributes = reference.partition(":")
    component: Any = _import(spec, module_name)
    for attribute in attributes.split("."):
        component = getattr(component, attribute, None)
    if not isinstance(component, kind):
        raise ValueError(
            f"{name} = {reference!r} in {spec.folder / 'pyproject.toml'} must be a {kind.__name__}, got a "
            f"{type(component).__name__}"
        )
    return component


def _import(spec: AppSpec, name: str) -> ModuleType:
    """Import a module of an app from the app's folder, which stays first on ``sys.path`` as in Flower."""
    if str(spec.folder) not in sys.path:
        sys.path.insert(0, str(spec.folder))
        importlib.invalidate_caches()
    package = name.partition(".")[0]
    own = next((p for p in (spec.folder / package, spec.folder / f"{package}.py") if p.exists()), None)
    module = importlib.import_module(name)
    origin = getattr(module, "__file__", None)
    if own is not None and origin is not None and spec.folder not in Path(origin).resolve().parents:
        raise ValueError(
            f"app {spec.name!r}: module {name!r} of {spec.folder} is already imported from {origin}; "
            "run the apps in separate processes"
        )
    return module
