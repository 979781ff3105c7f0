"""What code that reads data may import and open: everything, unless the machine's owner restricts it.

A server's run config names modules and files. A node's policy is checked here, where a name becomes an import
or a path, whatever its key.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Permissions:
    """The checks: each raises PermissionError if the owner does not allow it.

    Parameters
    ----------
    check_import : Callable[[str, str], None]
        Takes a configuration key and its import path, before anything is imported.
    check_file : Callable[[str, Path], None]
        Takes a configuration key and its file or folder, before any access to it.
    """

    check_import: Callable[[str, str], None]
    check_file: Callable[[str, Path], None]


# Per process, not per thread, so that the threads of a handler are checked too.
_now: Permissions | None = None


@contextmanager
def permitted(permissions: Permissions) -> Iterator[None]:
    """Apply these checks for a ``with`` block."""
    global _now  # noqa: PLW0603
    before, _now = _now, permissions
    try:
        yield
    finally:
        _now = before


def check_import(key: str, path: str) -> None:
    """Raise PermissionError if the import path may not be used."""
    if _now is not None:
        _now.check_import(key, path)


def check_file(key: str, path: Path) -> None:
    """Raise PermissionError if the file or folder may not be read."""
    if _now is not None:
        _now.check_file(key, path)
