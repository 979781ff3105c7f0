"""Whether the nodes that this process plays are simulated.

A simulated node has nothing of its own to guard: who runs the simulation has all its data and reads all its
errors. The signs are in the process itself. No message, run config or node config is one, so that no server
can make a device believe that it is simulated:

- an engine of this suite is calling a handler (``simulated``);
- the process is an actor of Ray's that has imported ``flwr.simulation``, as those that Flower starts have. A
  SuperNode handles a message in a process of its own, ``flwr-clientapp``, which is no actor.

Where neither is there, the node is a device. Code that a server sends could forge both; who runs such code
has lost anyway, see docs/privacy.md.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_simulated", "simulated"]

# How many blocks of ``simulated`` are open. Of the process, not of a thread: a handler may start threads.
_open = 0


@contextmanager
def simulated() -> Iterator[None]:
    """Say, for a ``with`` block, that the nodes whose handlers this process calls are simulated."""
    global _open  # noqa: PLW0603
    _open += 1
    try:
        yield
    finally:
        _open -= 1


def is_simulated() -> bool:
    """Return whether the nodes that this process plays are simulated."""
    return _open > 0 or _is_flowers_actor()


def _is_flowers_actor() -> bool:
    ray = sys.modules.get("ray")
    if ray is None or "flwr.simulation" not in sys.modules or not ray.is_initialized():
        return False
    return bool(ray.get_runtime_context().get_actor_id())
