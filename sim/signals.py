"""What signals do to a run: end it in good order, and once it ends, not again."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

__all__ = ["sigterm_raises", "uninterrupted"]

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that what is open is closed; only in the main thread."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    with _handled({signal.SIGTERM: stop}):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM: a second one must not stop the stopping. Only in the main thread."""
    with _handled({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sign: signal.signal(sign, handler) for sign, handler in handlers.items()}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
