"""A user's own function by import path, ``"my_package.my_data:load"``."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["import_callable", "is_import_path"]

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Return whether the name has the form ``module:function``."""
    return _PATH.fullmatch(name) is not None


def import_callable(key: str, path: str) -> Callable[..., Any]:
    """Return the function that an import path names.

    Parameters
    ----------
    key : str
        The configuration key that holds the path, for messages.
    path : str
        ``module:function``; the module must be importable from where the program runs.

    Raises
    ------
    ValueError
        The module cannot be imported, or has no callable of that name.
    """
    module_name, function_name = path.split(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{key} = {path!r}: cannot import {module_name!r} ({error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{key} = {path!r}: {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]
