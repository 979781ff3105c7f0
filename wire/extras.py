"""Packages that only some uses need, imported when they are: a device has none of them."""

from importlib import import_module
from typing import Any


class MissingExtraError(ImportError):
    """A package is not installed that one of Hedgerow's extras brings; the message names both."""


def needed(module: str, extra: str) -> Any:
    """Import and return a module.

    Parameters
    ----------
    module : str
        Its name, ``"scipy.optimize"``.
    extra : str
        The extra of this distribution that brings it.

    Raises
    ------
    MissingExtraError
        If its package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"this needs {package}: pip install 'hedgerow[{extra}]'") from error
