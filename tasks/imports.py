"""A user's own function by import path, ``"my_package.my_data:load"``."""

import re
import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from typing import Any

from .permissions import check_import

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Return whether the name has the form ``module:function``."""
    return isinstance(name, str) and _PATH.fullmatch(name) is not None


def import_callable(key: str, path: str) -> Callable[..., Any]:
    """Return the function of an import path.

    Parameters
    ----------
    key : str
        The configuration key with the path, for messages.
    path : str
        ``module:function``. The module is on Python's path, which includes the app's folder, or in the
        current folder, which is searched last.

    Raises
    ------
    ValueError
        If the path is invalid, the module cannot be imported, or it has no callable of that name.
    PermissionError
        If the owner of this machine does not allow it, see ``permissions``.
    """
    if not is_import_path(path):
        raise ValueError(f"{key} must be an import path, module:function, got {path!r}")
    check_import(key, path)
    module_name, function_name = path.split(":")
    # Last, so that nothing there can shadow an installed module. It stays, because a module may import
    # others later.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
        invalidate_caches()
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # A user's module may fail in any way.
        words = str(error) if isinstance(error, ImportError) else repr(error)
        raise ValueError(f"{key} = {path!r}: cannot import {module_name!r} ({words})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{key} = {path!r}: {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def call_imported(key: str, path: str, *arguments: Any) -> Any:
    """Call the function of an import path and return its result.

    Raises
    ------
    ValueError
        As ``import_callable`` does, and for any error of the function, with its location.
    """
    function = import_callable(key, path)
    try:
        signature(function).bind(*arguments)
    except TypeError:
        words = f"must take {len(arguments)} arguments, got {path.split(':')[1]}{signature(function)}"
        raise ValueError(f"{key} = {path!r} {words}") from None
    except ValueError:  # What is written in C may tell no signature.
        pass
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:  # A user's function may fail in any way.
        if isinstance(error, PermissionError) and error.errno is None:  # The owner's, see ``permissions``.
            raise
        words = str(error) if isinstance(error, ValueError | OSError) else f"raised {error!r}"
        raise ValueError(f"{key} = {path!r}: {words} ({_place(error, function)})") from error


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """Return where an error was raised: the innermost line of the function's module that led to it."""
    frames = extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    place = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{place.filename}, line {place.lineno}"
