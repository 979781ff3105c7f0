"""Atomic writes that survive a kill, a power cut or a full disk.

A file is written under a temporary name in its folder, synced and renamed; then the folder is synced. All
changes of the disk go through this module's name ``os``, so that a test can stop after each change.
"""

import errno
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Errors of file systems that cannot sync a folder.
_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)


def write_file(path: Path, fill: Callable[[IO[bytes]], object], mode: int = 0o666) -> None:
    """Write a file atomically, with a mode as of ``open``; an OSError names it and leaves the old one."""
    move(write_aside(path, fill, mode), path)


def write_aside(path: Path, fill: Callable[[IO[bytes]], object], mode: int = 0o666) -> Path:
    """Write and sync a temporary file beside ``path``, for ``move``; a failure leaves no file."""
    aside = path.with_name(path.name + ".partial")
    try:
        # A link or pipe of this name, in a folder that others may have written, is replaced and not followed.
        remove(aside)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _named(path), open(os.open(aside, flags, mode), "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
    except Exception:
        with suppress(OSError):
            remove(aside)
        raise
    return aside


def move(path: Path, to: Path) -> None:
    """Rename a file within its folder, replacing an existing one."""
    with _named(to):
        os.replace(path, to)
        _sync_folder(to.parent)


def remove(path: Path) -> None:
    """Remove a file if it exists."""
    with _named(path), suppress(FileNotFoundError):
        os.unlink(path)


def make_folder(path: Path) -> None:
    """Create a folder unless it exists."""
    with _named(path):
        if not path.is_dir():
            os.mkdir(path)
            _sync_folder(path.parent)


class Lines:
    """A file to append to, created if missing and closed when garbage-collected."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _named(path):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._descriptor = os.open(path, flags, 0o666)
            self._close = weakref.finalize(self, os.close, self._descriptor)
            _sync_folder(path.parent)

    def append(self, piece: bytes) -> None:
        """Append bytes; they survive a kill of this process, but not necessarily a power cut."""
        rest = memoryview(piece)
        with _named(self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        with _named(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make OSErrors name the file that the user knows instead of the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
