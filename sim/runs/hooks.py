"""What an app registers with Hedgerow's commands about its method; the commands know no method themselves.

An app names its hooks in its pyproject.toml:

    [tool.hedgerow]
    hooks = "my_app.hooks:HOOKS"

The module is imported when a command first needs it, apart from other copies of the app that the process may
have imported. So what it needs from its own package it imports at its top, never inside a function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hedgerow.sim.runs.shipped import hedgerow_table, shipped_app, shipped_apps

if TYPE_CHECKING:
    from hedgerow.sim.cli.checked import CheckedNodes, Verdict
    from hedgerow.sim.runs.diagram import DrawnNetwork
    from hedgerow.sim.runs.results import RecordedRun

__all__ = ["Hooks", "all_hooks", "drawn_network", "hooks_of"]


@dataclass(frozen=True)
class Hooks:
    """What an app adds to Hedgerow's commands; each may be left out.

    Parameters
    ----------
    plan : callable or None
        The command ``hedgerow plan APP``. Its parameters are options as Typer reads them, its docstring is
        the help. It yields what is shown: tables of rich, and lines. It raises ValueError on bad input; that
        numbers are finite and of ordinary size is checked before.
    check : callable or None
        For ``hedgerow check``: asks an app's nodes what the method's server asks, and returns verdicts.
    network : callable or None
        For ``hedgerow report``: returns the graph of a recorded run, or None where it is not known.
    node_keys : callable (default: none)
        Returns the keys that the method's nodes read from their own node configs, beside the common ones.
    """

    plan: Callable[..., Iterable[Any]] | None = None
    check: Callable[[CheckedNodes], Iterable[Verdict]] | None = None
    network: Callable[[RecordedRun], DrawnNetwork | None] | None = None
    node_keys: Callable[[], Collection[str]] = tuple


@cache
def hooks_of(folder: Path) -> Hooks:
    """Return the hooks of the app in a folder; without any where its pyproject.toml names none.

    Raises
    ------
    ValueError
        If what is named is no ``Hooks``.
    """
    reference = hedgerow_table(folder).get("hooks", "")
    if not reference:
        return Hooks()
    module, _, attribute = str(reference).partition(":")
    hooks, why = None, ""
    try:
        with _apart(folder, module.partition(".")[0]):
            hooks = getattr(import_module(module), attribute, None)
    except ImportError as error:
        why = f" ({error})"
    if not isinstance(hooks, Hooks):
        raise ValueError(
            f"{folder / 'pyproject.toml'}: [tool.hedgerow] hooks must be module:attribute of a "
            f"hedgerow.sim.Hooks, got {reference!r}{why}"
        )
    return hooks


def all_hooks(*more: Path) -> list[Hooks]:
    """Return the hooks of the suite's apps, and of other apps by their folders."""
    return [hooks_of(folder) for folder in dict.fromkeys([*shipped_apps().values(), *more])]


def drawn_network(run: RecordedRun) -> DrawnNetwork | None:
    """Return the graph of a run that an app of the suite made; None of any other, and where it is unknown."""
    name = shipped_app(str(run.config.get("app", "")))
    draw = None if name is None else hooks_of(shipped_apps()[name]).network
    return None if draw is None else draw(run)


@contextmanager
def _apart(folder: Path, package: str) -> Iterator[None]:
    """Import a package of a folder as if no other of that name were there, and forget it afterwards."""

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
