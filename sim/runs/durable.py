"""Files that are whole after a kill, a power cut or a full disk: the old one, or the new one.

A file is written aside in its own folder, synced and renamed, and its folder is synced. What changes the disk
goes through the name ``os`` of this module, so that a test can stop after each change in turn.
"""

import errno
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["Lines", "make_folder", "move", "remove", "write_aside", "write_file"]

# What file systems that cannot sync a folder say.
_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)


def write_file(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file in one step: whoever reads sees the old one or the new one.

    Raises
    ------
    OSError
        If the disk takes no more, with the file's name; the old file is still there.
    """
    move(write_aside(path, fill), path)


def write_aside(path: Path, fill: Callable[[IO[bytes]], object]) -> Path:
    """Write and sync a file beside ``path``, for ``move``, and return where; a failure leaves nothing."""
    aside = path.with_name(path.name + ".partial")
    try:
        with _named(path), open(aside, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
    except Exception:
        with suppress(OSError):
            remove(aside)
        raise
    return aside


def move(path: Path, to: Path) -> None:
    """Give a file of the same folder another name, in place of what had it."""
    with _named(to):
        os.replace(path, to)
        _sync_folder(to.parent)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with _named(path), suppress(FileNotFoundError):
        os.unlink(path)


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there."""
    with _named(path):
        if not path.is_dir():
            os.mkdir(path)
            _sync_folder(path.parent)


class Lines:
    """A file that grows at its end, by whole pieces; closed when nobody holds it any more.

    Parameters
    ----------
    path : Path
        The file, which is made if it is not there.

    Raises
    ------
    OSError
        If the disk takes no more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _named(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._close = weakref.finalize(self, os.close, self._descriptor)
            _sync_folder(path.parent)

    def append(self, piece: bytes) -> None:
        """Write a piece; a kill of this process leaves it, a power cut may not."""
        rest = memoryview(piece)
        with _named(self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        with _named(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; more than once is once."""
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
    """Let errors of the disk name the file that a user knows."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
