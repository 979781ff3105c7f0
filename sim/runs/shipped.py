"""The suite's own apps on disk, which come with the package: one folder a method."""

from __future__ import annotations

from pathlib import Path

from hedgerow.wire.checks import plain_name

__all__ = ["shipped_app", "shipped_apps"]

_LIBRARY = Path(__file__).resolve().parents[2]


def shipped_apps() -> dict[str, Path]:
    """Return the folders of the suite's apps by name.

    In an installed package they are ``hedgerow/apps``; a checkout, of which that is a copy, has them as
    ``flower_apps``.
    """
    for home in (_LIBRARY / "apps", _LIBRARY / "flower_apps"):
        if found := {file.parent.name: file.parent for file in sorted(home.glob("*/pyproject.toml"))}:
            return found
    return {}


def shipped_app(name: str) -> str | None:
    """Return the name of the suite's app that is meant, as ``sd-feel`` by ``SD_FEEL``; None if it is none."""
    return next((app for app in shipped_apps() if plain_name(app) == plain_name(name)), None)
