"""Optional packages for some data, imported on use: a device needs none of them."""

from importlib import import_module
from typing import Any


def needed(module: str, extra: str, what: str) -> Any:
    """Import and return a module.

    Parameters
    ----------
    module : str
        Its name, ``"sklearn.datasets"``.
    extra : str
        The extra of this distribution that installs it.
    what : str
        What it is needed for, such as a file's path.

    Raises
    ------
    ValueError
        If its package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{what} needs the package {module.partition('.')[0]}, which is not installed: "
            f"pip install 'hedgerow[{extra}]'"
        ) from error
