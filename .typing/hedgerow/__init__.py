"""Federated-learning methods as Flower apps and importable Flower strategies.

The rooms ``strategies``, ``clients``, ``tasks``, ``sim`` and ``wire`` export the rest. They are imported when
they are first used, so that ``import hedgerow`` needs neither Flower nor torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hedgerow import clients, sim, strategies, tasks, wire
    from hedgerow.sim import simulate

__all__ = ["__version__", "clients", "sim", "simulate", "strategies", "tasks", "wire"]

_ROOMS = ("clients", "sim", "strategies", "tasks", "wire")
__version__ = version("hedgerow")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"hedgerow.{name}")
    if name == "simulate":
        return import_module("hedgerow.sim").simulate
    raise AttributeError(f"module 'hedgerow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
