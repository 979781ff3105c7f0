"""Addresses for orchestrators of a test: free ports of this machine, and a wire that can be cut."""

import random
import socket
import threading
import time
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self


def addresses(count: int) -> list[str]:
    """Return so many addresses that nobody listens on now.

    Their ports are below those that systems give to outgoing connections, one of which could else take the
    port of a site that is down for a while.
    """
    draw, found = random.SystemRandom(), list[str]()
    with ExitStack() as held:
        while len(found) < count:
            port, one = draw.randrange(15000, 32000), held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(f"127.0.0.1:{port}")
    return found


class Wire:
    """A connection to an address over one of its own, until it is cut; it can be mended.

    Parameters
    ----------
    target : str
        Where it leads.
    delay : float (default: 0.0)
        Seconds that what comes in at once is kept before it goes on.
    """

    def __init__(self, target: str, delay: float = 0.0) -> None:
        self._delay = delay
        # Bytes that still pass before nothing does; None for any number.
        self._left: int | None = None
        self.held = threading.Event()
        self._let_go = threading.Event()
        host, _, port = target.partition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._whole = True
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._listener.close()

    def hold_after(self, count: int) -> None:
        """Let so many bytes more pass, and then nothing until the wire is cut; ``held`` says when."""
        with self._lock:
            self._left = count

    def cut(self) -> None:
        self._let_go.set()
        with self._lock:
            self._whole = False
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            self._open.clear()

    def mend(self) -> None:
        with self._lock:
            self._whole = True

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                try:
                    if not self._whole:
                        raise OSError
                    there = socket.create_connection(self._target)
                except OSError:
                    here.close()
                    continue
                self._open += [here, there]
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self._delay)
                passing = self._passing(data)
                sink.sendall(passing)
                if len(passing) < len(data):
                    self.held.set()
                    self._let_go.wait()
                    break
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _passing(self, data: bytes) -> bytes:
        with self._lock:
            if self._left is None:
                return data
            passing = data[: self._left]
            self._left -= len(passing)
            return passing
