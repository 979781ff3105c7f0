"""Records between processes of one machine: pickled, with their arrays in shared memory.

A parcel is one anonymous file in memory (``memfd_create``, Linux). It holds streams (pickled objects) and the
arrays that they reference; an array that several streams reference is stored once. Its file descriptor is
sent over a Unix socket. The receiver maps the file, reads arrays in place, and frees the memory with the last
of them. (``multiprocessing.shared_memory`` needs room in /dev/shm, of which a container has 64 MB, and leaves
its blocks there if a process is killed.) Parcels are read only from processes forked here, which are as
trusted as this one.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

# A stream's place in its parcel: offset and length of the table of arrays, and of the pickle.
Address = tuple[int, int, int, int]
# The alignment of vector registers, cache lines and torch's own memory, on which bits may depend.
_ALIGN = 64
# Smaller arrays are cheaper inside the stream.
_LEAST = 1024
# Bytes that are collected for one write.
_BUFFER = 1 << 16
# The longest packet on a link: a pickled address and size.
_PACKET = 200
# A mapping uses one of a process's 1,024 file descriptors; beyond this many, parcels are copied.
_MOST_MAPPED = 256
_mapped: WeakSet[mmap.mmap] = WeakSet()


class Parcel:
    """Data that one process writes for others: first ``add``, then ``send`` the addresses, then close it."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("hedgerow"), "wb", buffering=_BUFFER)  # noqa: SIM115
        self._size = 0
        # By identity of the array, which is kept alive so that no other gets its identity.
        self._places: dict[int, tuple[tuple[int, int], object]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

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
            place, _ = self._places.get(id(raw.obj)) or (None, None)
            if place is None or place[1] != raw.nbytes:
                place = self._append(raw)
                self._places[id(raw.obj)] = place, raw.obj
            table.append(place)
            return False

        if name is None:
            pickle.Pickler(stream, 5, buffer_callback=aside).dump(thing)
        else:
            _Naming(stream, aside, name).dump(thing)
        places = self._append(np.array(table, np.int64).data)
        pickled = self._append(stream.getbuffer())
        return *places, *pickled

    def send(self, link: socket.socket, at: Address) -> None:
        """Send a stream's address and the parcel over a link; OSError if the link is closed."""
        self._file.flush()
        packet = pickle.dumps((at, self._size))
        socket.send_fds(link, [packet], [self._file.fileno()], socket.MSG_NOSIGNAL)

    def _append(self, piece: memoryview) -> tuple[int, int]:
        gap = -self._size % _ALIGN
        self._file.write(bytes(gap))
        self._file.write(piece)
        begin = self._size + gap
        self._size = begin + piece.nbytes
        return begin, piece.nbytes


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
    """A received parcel: ``whole`` is its contents as uint8, (size,), aligned and read-only."""

    def __init__(self, whole: NDArray[np.uint8]) -> None:
        self._whole = whole

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
        pieces = [self._whole[place : place + count] for place, count in table]
        buffers = [piece.copy() for piece in pieces] if copy else pieces
        stream = self._whole[begin : begin + size].data
        if find is None:
            return pickle.loads(stream, buffers=buffers)
        return _Named(io.BytesIO(stream), buffers, find).load()

    def holds(self, array: NDArray[Any]) -> bool:
        """Return whether an array's memory is in the parcel."""
        return bool(0 <= array.ctypes.data - self._whole.ctypes.data < len(self._whole))


def receive(link: socket.socket) -> tuple[Address, Received] | None:
    """Wait for a stream's address and its parcel; None if the link is closed."""
    try:
        packet, files, _, _ = socket.recv_fds(link, _PACKET, 1)
    except ConnectionError:
        return None
    if not files:
        return None
    try:
        at, size = pickle.loads(packet)
        populate = getattr(mmap, "MAP_POPULATE", 0)
        mapping = mmap.mmap(files[0], size, mmap.MAP_SHARED | populate, mmap.PROT_READ)
    finally:
        os.close(files[0])
    whole = np.frombuffer(mapping, np.uint8)
    if len(_mapped) < _MOST_MAPPED:
        _mapped.add(mapping)
    else:
        whole = whole.copy()
        whole.flags.writeable = False
    return at, Received(whole)
