"""Records between processes of one machine: pickled, with their arrays in shared memory.

A parcel is one anonymous file in memory (``memfd_create``, Linux). It holds streams (pickled objects) and the
arrays that they reference; an array that several streams reference is stored once. Its file descriptor is
sent over a Unix socket. The receiver maps the file, reads arrays in place, and frees the memory with the last
of them. Parcels are read only from processes forked here, which are as trusted as this one.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

# A stream's place in its parcel: offset and length of the table of arrays, and of the pickle.
Address = tuple[int, int, int, int]
# The alignment of vector registers, cache lines and torch's own memory.
_ALIGN = 64
# Smaller arrays are cheaper inside the stream.
_LEAST = 1024
# Pieces per write call (IOV_MAX).
_PIECES = 512
# A mapping uses one of a process's 1,024 file descriptors; beyond this many, parcels are copied.
_MOST_MAPPED = 256
_HEADER = struct.Struct("=B6q")
_MOST_FILES = 2
_mapped: WeakSet[mmap.mmap] = WeakSet()


class Parcel:
    """Data that one process writes for others: first ``add``, then ``close``, then ``send`` the addresses.

    Parameters
    ----------
    common : Parcel or None (default: None)
        A parcel for arrays that several parcels reference; readers need it too.
    shared : collection of int (default: none)
        The ids of these arrays.
    """

    def __init__(self, common: Parcel | None = None, shared: Collection[int] = ()) -> None:
        self._common, self._shared = common, shared
        self._pieces: list[Any] = []
        self._size = 0
        # By identity of the array, which the piece keeps alive.
        self._places: dict[int, tuple[int, int]] = {}

    @property
    def size(self) -> int:
        """Bytes added so far."""
        return self._size

    def add(self, thing: object, name: Callable[[Any], object] | None = None) -> Address:
        """Add an object.

        Parameters
        ----------
        thing : object
            Anything that can be pickled; read-only arrays, as in records, are not copied into the pickle.
        name : callable or None (default: None)
            Returns the name by which the receiver already knows an object, or None: ``persistent_id`` of
            ``pickle.Pickler``.
        """
        table: list[tuple[int, int]] = []
        stream = io.BytesIO()

        def aside(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _LEAST:
                return True
            table.append(self._put(raw))
            return False

        if name is None:
            pickle.Pickler(stream, 5, buffer_callback=aside).dump(thing)
        else:
            _Naming(stream, aside, name).dump(thing)
        places = self._append(np.array(table, np.int64).tobytes())
        pickled = self._append(stream.getbuffer())
        return *places, *pickled

    def close(self) -> int:
        """Write everything and return the file's descriptor, which the caller must close."""
        return write_file(self._pieces)

    def joined(self) -> NDArray[np.uint8]:
        """Return the contents as one array, for a transport of arrays."""
        whole = np.empty(self._size, np.uint8)
        at = 0
        for piece in self._pieces:
            flat = np.frombuffer(piece, np.uint8)
            whole[at : at + flat.size] = flat
            at += flat.size
        return whole

    def _put(self, raw: memoryview) -> tuple[int, int]:
        key = id(raw.obj)
        if self._common is not None and key in self._shared:
            offset, size = self._common._put(raw)
            return -1 - offset, size
        place = self._places.get(key)
        if place is None or place[1] != raw.nbytes:
            place = self._places[key] = self._append(raw)
        return place

    def _append(self, piece: Any) -> tuple[int, int]:
        if gap := -self._size % _ALIGN:
            self._pieces.append(bytes(gap))
            self._size += gap
        size = memoryview(piece).nbytes
        place = self._size, size
        if size:
            self._pieces.append(piece)
            self._size += size
        return place


class _Naming(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, aside: Callable[..., bool], name: Callable[[Any], object]) -> None:
        super().__init__(stream, 5, buffer_callback=aside)
        self._name = name

    def persistent_id(self, thing: object) -> object:
        return self._name(thing)


class _Named(pickle.Unpickler):
    def __init__(self, stream: Any, buffers: Any, find: Callable[[Any], object]) -> None:
        super().__init__(stream, buffers=buffers)
        self._find = find

    def persistent_load(self, name: Any) -> object:
        return self._find(name)


class Received:
    """A received parcel.

    Parameters
    ----------
    whole : ndarray of uint8, (size,)
        The contents, aligned to 64 bytes, read-only.
    common : ndarray of uint8, (size,), or None (default: None)
        The contents of its common parcel.
    """

    def __init__(self, whole: NDArray[np.uint8], common: NDArray[np.uint8] | None = None) -> None:
        self._whole, self._common = whole, common

    def read(self, at: Address, *, copy: bool = False, find: Callable[[Any], object] | None = None) -> Any:
        """Return the object at an address.

        Parameters
        ----------
        at : Address
            As ``Parcel.add`` returned it.
        copy : bool (default: False)
            Copy each array, so that it does not keep the parcel in memory.
        find : callable or None (default: None)
            Returns the object for a name from ``add``.
        """
        first, length, begin, size = at
        table = self._whole[first : first + length].view(np.int64).reshape(-1, 2).tolist()
        pieces = [self._piece(place, count) for place, count in table]
        buffers = [piece.copy() for piece in pieces] if copy else pieces
        stream = self._whole[begin : begin + size].data
        if find is None:
            return pickle.loads(stream, buffers=buffers)
        return _Named(io.BytesIO(stream), buffers, find).load()

    def holds(self, array: NDArray[Any]) -> bool:
        """Return whether an array's memory is in the parcel."""
        parts = [part for part in (self._whole, self._common) if part is not None]
        return any(0 <= array.ctypes.data - part.ctypes.data < len(part) for part in parts)

    def _piece(self, place: int, count: int) -> NDArray[np.uint8]:
        if place >= 0:
            return self._whole[place : place + count]
        if self._common is None:
            raise ValueError("the parcel's common parcel is missing")
        return self._common[-1 - place : -1 - place + count]


def send(link: socket.socket, kind: int, at: Address, *files: tuple[int, int]) -> None:
    """Send a stream's address over a link, with a ``kind`` (0 to 255) that the two ends agree on.

    ``files`` are descriptor and size of the parcel and of its common parcel, if any. OSError if the link is
    closed.
    """
    sizes = [size for _, size in files] + [0] * (_MOST_FILES - len(files))
    header = _HEADER.pack(kind, *at, *sizes)
    socket.send_fds(link, [header], [file for file, _ in files], socket.MSG_NOSIGNAL)


def receive(link: socket.socket) -> tuple[int, Address, Received] | None:
    """Wait for a parcel; None if the link is closed."""
    with receive_files(link) as received:
        if received is None:
            return None
        kind, at, files = received
        return kind, at, Received(*(file_bytes(file, size) for file, size in files))


@contextmanager
def receive_files(link: socket.socket) -> Iterator[tuple[int, Address, list[tuple[int, int]]] | None]:
    """Wait for a parcel and yield its files, with descriptor and size."""
    files: list[int] = []
    try:
        try:
            header, files, _, _ = socket.recv_fds(link, _HEADER.size, _MOST_FILES)
        except ConnectionError:
            header = b""
        if not header or not files:
            yield None
            return
        kind, first, length, begin, size, *sizes = _HEADER.unpack(header)
        yield kind, (first, length, begin, size), list(zip(files, sizes, strict=False))
    finally:
        for file in files:
            os.close(file)


def file_bytes(file: int, size: int) -> NDArray[np.uint8]:
    """Return an anonymous file's contents, read-only: mapped, or copied if too many are mapped."""
    if len(_mapped) < _MOST_MAPPED:
        mapping = mmap.mmap(file, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), mmap.PROT_READ)
        _mapped.add(mapping)
        return np.frombuffer(mapping, np.uint8)
    whole = np.empty(size, np.uint8)
    _read(file, whole.data)
    whole.flags.writeable = False
    return whole


def write_file(pieces: Sequence[Any]) -> int:
    """Write pieces into an anonymous file in memory; the caller must close its descriptor."""
    file = os.memfd_create("hedgerow", os.MFD_CLOEXEC)
    try:
        for at in range(0, len(pieces), _PIECES):
            _write(file, pieces[at : at + _PIECES])
    except BaseException:
        os.close(file)
        raise
    return file


def _write(file: int, pieces: Sequence[Any]) -> None:
    rest = [memoryview(piece).cast("B") for piece in pieces]
    while rest:
        written = os.writev(file, rest)
        while rest and written >= rest[0].nbytes:
            written -= rest.pop(0).nbytes
        if rest:
            rest[0] = rest[0][written:]


def _read(file: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        done += os.preadv(file, [into[done:]], done)
