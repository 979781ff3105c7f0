"""Find the suite's apps, which come with the package: one folder per method, not listed anywhere."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

__all__ = ["descriptions", "hedgerow_table", "shipped_app", "shipped_apps"]

_LIBRARY = Path(__file__).resolve().parents[2]


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
