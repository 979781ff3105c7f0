"""What holds for a whole process: whether its nodes are simulated, and the threads of matrix products.

A simulated node has nothing to protect: whoever runs the simulation has all its data. The criteria are in the
process itself and not in a message, run config or node config, so that no server can make a device believe
that it is simulated:

- an engine of this suite is calling a handler (``simulated``);
- the process is a Ray actor that has imported ``flwr.simulation``, like those that Flower starts. A SuperNode
  handles a message in a separate process, ``flwr-clientapp``, which is not an actor.

Otherwise the node is a device. Code from a server could fake both, but a device that runs such code is
compromised anyway, see docs/privacy.md.

The last bits of NumPy's matrix products depend on the number of BLAS's threads, so these are limited to one.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from threadpoolctl import ThreadpoolController

# Open blocks of ``simulated``. Per process, not per thread, because a handler may start threads.
_open = 0
_name = ""


@contextmanager
def simulated(name: str = "") -> Iterator[None]:
    """Mark the nodes whose handlers this process calls as simulated, for a ``with`` block.

    ``name`` distinguishes their simulation from all others, whose runs may have the same id.
    """
    global _open, _name  # noqa: PLW0603
    before, _name = _name, name or _name
    _open += 1
    try:
        yield
    finally:
        _open -= 1
        _name = before


def simulation() -> str:
    """Return the name of the simulation; empty for a device, or if it has no name."""
    return _name if _open > 0 else ""


def simulation_folder(name: str) -> Path:
    """Return the folder of a simulation's own files, which its engine removes at the end."""
    return Path(tempfile.gettempdir()) / f"hedgerow-{name}"


def is_simulated() -> bool:
    """Return whether the nodes of this process are simulated."""
    return _open > 0 or _is_flowers_actor()


def _is_flowers_actor() -> bool:
    ray = sys.modules.get("ray")
    if ray is None or "flwr.simulation" not in sys.modules or not ray.is_initialized():
        return False
    return bool(ray.get_runtime_context().get_actor_id())


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread for a ``with`` block; torch's threads are not affected."""
    with _controller("scipy.linalg" in sys.modules).limit(limits=1, user_api="blas"):
        yield


@cache
def _controller(scipy_is_loaded: bool) -> ThreadpoolController:
    """Return a controller of the loaded libraries; scipy loads its own."""
    return ThreadpoolController()
