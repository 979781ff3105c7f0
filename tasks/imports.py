"""A user's own function by import path, ``"my_package.my_data:load"``."""

import re
import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from pathlib import Path
from traceback import extract_tb
from typing import Any

from .permissions import check_import

__all__ = ["call_imported", "import_callable", "is_import_path"]

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Return whether the name has the form ``module:function``."""
    return isinstance(name, str) and _PATH.fullmatch(name) is not None


def import_callable(key: str, path: str) -> Callable[..., Any]:
    """Return the function that an import path names.

    Parameters
    ----------
    key : str
        The configuration key that holds the path, for messages.
    path : str
        ``module:function``; the module is one that Python finds, or lies in the folder where the program was
        started, which is looked in last. (An app's folder is among those where Python looks.)

    Raises
    ------
    ValueError
        The path is none, the module cannot be imported, or has no callable of that name.
    PermissionError
        The owner of this machine does not allow it, see ``permissions``.
    """
    if not is_import_path(path):
        raise ValueError(f"{key} must be an import path, module:function, got {path!r}")
    check_import(key, path)
    module_name, function_name = path.split(":")
    # Last, so that nothing there can stand for a module that is installed. It stays: a module may import
    # another one later.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
        invalidate_caches()
    try:
        module = import_module(module_name)
    except Exception as error:  # A user's module may fail in any way.
        words = str(error) if isinstance(error, ImportError) else repr(error)
        raise ValueError(f"{key} = {path!r}: cannot import {module_name!r} ({words})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{key} = {path!r}: {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def call_imported(key: str, path: str, *arguments: Any) -> Any:
    """Call the function that an import path names; return what it returns.

    Raises
    ------
    ValueError
        As ``import_callable`` does; and what the function raises, saying where, unless it is a ValueError or
        an OSError itself.
    """
    function = import_callable(key, path)
    try:
        return function(*arguments)
    except (OSError, ValueError):
        raise
    except Exception as error:  # A user's function may fail in any way.
        last = extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
        raise ValueError(f"{key} = {path!r}: raised {error!r} ({where})") from error
