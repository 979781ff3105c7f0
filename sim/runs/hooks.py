"""The suite's apps, and hooks with which an app extends Hedgerow's commands, which know no method.

The suite's apps come with the package: one folder per method, not listed anywhere.

An app names its hooks in its pyproject.toml:

    [tool.hedgerow]
    hooks = "my_app.hooks:HOOKS"
    data-sets = "my_app.data:SETS"  # of the suite's apps only: a DataSource by name

A module is imported when a command first needs it, isolated from other copies of the app in the process.
It must therefore import its own package's modules at the top, never inside a function.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hedgerow.sim.runs.diagram import DrawnNetwork
    from hedgerow.sim.runs.results import RecordedRun

_LIBRARY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Verdict:
    """Whether a ClientApp works with a strategy.

    Parameters
    ----------
    strategy : str
        The strategy's name.
    serves : {"yes", "partly", "no", "unknown"}
        The result.
    lacks : str (default: "")
        What is missing.
    mend : str (default: "")
        The line of code that adds it.
    """

    strategy: str
    serves: str
    lacks: str = ""
    mend: str = ""


@dataclass(frozen=True)
class Hooks:
    """An app's extensions of Hedgerow's commands; all are optional.

    Parameters
    ----------
    plan : callable or None
        The command ``hedgerow plan APP``. Its parameters are Typer options, its docstring is the help. It
        yields rich tables and lines, and raises ValueError on bad input. Numbers are checked before to be
        finite and of ordinary size.
    check : callable or None
        For ``hedgerow check``: sends the nodes of an app, a ``CheckedNodes``, the messages of the method's
        server, and returns verdicts.
    network : callable or None
        For ``hedgerow report``: returns the graph of a recorded run, or None if unknown.
    node_keys : callable (default: none)
        Returns the additional keys that the method's nodes read from their node configs.
    """

    plan: Callable[..., Iterable[Any]] | None = None
    # Of a ``CheckedNodes``, which knows apps and so their hooks.
    check: Callable[[Any], Iterable[Verdict]] | None = None
    network: Callable[[RecordedRun], DrawnNetwork | None] | None = None
    node_keys: Callable[[], Collection[str]] = tuple


@cache
def hooks_of(folder: Path) -> Hooks:
    """Return the hooks of the app in a folder (none by default); ValueError if they are not a ``Hooks``."""
    reference = hedgerow_table(folder).get("hooks", "")
    if not reference:
        return Hooks()
    hooks, why = _named(folder, str(reference))
    if not isinstance(hooks, Hooks):
        raise ValueError(
            f"{folder / 'pyproject.toml'}: [tool.hedgerow] hooks must be module:attribute of a "
            f"hedgerow.sim.Hooks, got {reference!r}{why}"
        )
    return hooks


def data_sets() -> dict[str, Any]:
    """Return the sources of the data sets in ``[tool.hedgerow] data-sets`` of the suite's apps, by name."""
    found: dict[str, Any] = {}
    for folder in shipped_apps().values():
        if reference := hedgerow_table(folder).get("data-sets"):
            found |= _named(folder, str(reference))[0]
    return found


def _named(folder: Path, reference: str) -> tuple[Any, str]:
    """Return the object ``module:attribute`` of an app, or None and why there is none."""
    module, _, attribute = reference.partition(":")
    try:
        with _apart(folder, module.partition(".")[0]):
            return getattr(import_module(module), attribute, None), ""
    except ImportError as error:
        return None, f" ({error})"


def all_hooks(*more: Path) -> list[Hooks]:
    """Return the hooks of the suite's apps and of the apps in other folders."""
    return [hooks_of(folder) for folder in dict.fromkeys([*shipped_apps().values(), *more])]


def drawn_network(run: RecordedRun) -> DrawnNetwork | None:
    """Return the graph of a run of one of the suite's apps or of a copy; None if it is unknown."""
    name = shipped_app(str(run.config.get("copy-of", run.config.get("app", ""))))
    draw = None if name is None else hooks_of(shipped_apps()[name]).network
    return None if draw is None else draw(run)


def changed_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings in a run's ``config.json`` that differ from the defaults; None if not known.

    A copy of one of the suite's apps is compared with that app.
    """
    name = shipped_app(str(config.get("copy-of", config.get("app", ""))))
    if name is None:
        return None
    defaults = _pyproject(shipped_apps()[name])["tool"]["flwr"]["app"]["config"]
    settings: Mapping[str, Any] = config.get("run", {})
    return {key: value for key, value in settings.items() if key not in defaults or value != defaults[key]}


@contextmanager
def _apart(folder: Path, package: str) -> Iterator[None]:
    """Import a folder's package in isolation from others of that name, and unload it afterwards."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == package]

    path, before = list(sys.path), {name: sys.modules.pop(name) for name in loaded()}
    sys.path.insert(0, str(folder))
    invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)


def shipped_apps() -> dict[str, Path]:
    """Return the folders of the suite's apps by name: ``hedgerow/apps``, or ``flower_apps`` in a checkout."""
    for home in (_LIBRARY / "apps", _LIBRARY / "flower_apps"):
        if found := {file.parent.name: file.parent for file in sorted(home.glob("*/pyproject.toml"))}:
            return found
    return {}


def shipped_app(name: str) -> str | None:
    """Return the suite's app with a name in any form (``MY_APP`` for ``my-app``); None if there is none."""
    from hedgerow.wire.checks import plain_name  # noqa: PLC0415  # Imports NumPy, which help texts need not.

    return next((app for app in shipped_apps() if plain_name(app) == plain_name(name)), None)


def descriptions() -> dict[str, str]:
    """Return a one-line description of each of the suite's apps, by name."""
    return {name: _pyproject(app)["project"]["description"] for name, app in shipped_apps().items()}


def hedgerow_table(folder: Path) -> dict[str, Any]:
    """Return ``[tool.hedgerow]`` of an app's pyproject.toml."""
    table = _pyproject(folder).get("tool", {}).get("hedgerow", {})
    return table if isinstance(table, dict) else {}


def _pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
