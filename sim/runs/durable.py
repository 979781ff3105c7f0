"""Files that are whole after a kill, a power cut or a full disk: the old one, or the new one.

A file is written aside in its own folder, synced and renamed, and its folder is synced. Links are never
written through, and what is no regular file (a pipe, a folder) is refused, not waited for. Every call that
changes the disk goes through the name ``os`` of this module, so that a test can stop after each in turn.
"""

import errno
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, RawIOBase
from pathlib import Path
from typing import IO, Any

__all__ = [
    "Lines",
    "link",
    "make_folder",
    "move",
    "open_file",
    "open_lock",
    "read_file",
    "remove",
    "write_aside",
    "write_file",
]

Fill = Callable[[IO[bytes]], object]

# Bytes that are handed to the disk at once.
BUFFER = 1 << 20
_NEVER_WAIT = os.O_NONBLOCK | os.O_CLOEXEC
# File systems without hard links say one of these.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
# And those that sync no folders one of these.
_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)


def write_file(path: Path, fill: Fill) -> None:
    """Write a file in one step: whoever reads sees the old one or the new one.

    Raises
    ------
    OSError
        If the disk takes no more, with the file's name; the old file is still there.
    """
    move(write_aside(path, fill), path)


def write_aside(path: Path, fill: Fill) -> Path:
    """Write and sync a file beside ``path``, for ``move``, and return where; a failure leaves nothing."""
    aside = _aside(path)
    # What a killed process left.
    remove(aside)
    with _named(path):
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _NEVER_WAIT, 0o666)
    try:
        with _named(path):
            try:
                with BufferedWriter(_Sequential(descriptor), BUFFER) as file:
                    fill(file)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except BaseException:
        with suppress(OSError):
            remove(aside)
        raise
    return aside


def move(path: Path, to: Path) -> None:
    """Give a file of the same folder another name, in place of what had it."""
    with _named(to):
        os.replace(path, to)
        _sync_folder(to.parent)


def link(path: Path, to: Path) -> None:
    """Let a file be ``to`` as well, in place of what was; without hard links it is ``to`` alone."""
    aside = _aside(to)
    remove(aside)
    with _named(to):
        try:
            os.link(path, aside)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.replace(path, to)
        else:
            os.replace(aside, to)
            # Two names of one file are left as they are by a rename.
            remove(aside)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with _named(path), suppress(FileNotFoundError):
        os.unlink(path)


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there.

    Raises
    ------
    OSError
        If something else is, a link to a folder for example.
    """
    with _named(path):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise
        else:
            _sync_folder(path.parent)


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises
    ------
    OSError
        If there is none: FileNotFoundError where nothing is there.
    """
    return os.fdopen(_regular(path, os.O_RDONLY), "rb")


def read_file(path: Path) -> bytes:
    """Return what a regular file holds, as ``open_file``."""
    with open_file(path) as file:
        return file.read()


def open_lock(path: Path) -> int:
    """Open a file that is there only to be locked, made if it is not there, and return its descriptor."""
    return _regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


class Lines:
    """A file that grows at its end, by whole pieces; closed when nobody holds it any more.

    Parameters
    ----------
    path : Path
        The file, which is made if it is not there.

    Raises
    ------
    OSError
        If it is a link or no regular file, or the disk takes no more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        with _named(path):
            _sync_folder(path.parent)

    def append(self, piece: bytes) -> None:
        """Write a piece; a kill of this process leaves it, a power cut may not."""
        with _named(self.path):
            _write(self._descriptor, piece)

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        with _named(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; more than once is once."""
        self._close()


class _Sequential(RawIOBase):
    """A descriptor as a file that is only ever written on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        return os.write(self._descriptor, piece)


def _write(descriptor: int, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _regular(path: Path, flags: int) -> int:
    with _named(path):
        descriptor = os.open(path, flags | _NEVER_WAIT, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file")
        return descriptor


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let errors of the disk name the file that a user knows."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
