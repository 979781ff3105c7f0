"""The methods of the family, on the linear federation, and one small layer of each for rounds on arrays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tests.strategies.linear_federation import MODEL
from tests.strategies.rounds_on_arrays import Work, runs

from hedgerow.strategies import EF21P, FedBAT, FedHM, FedLMT, FedMUD, FedPara, RoundContext
from hedgerow.strategies.fedmud import CompressedLayers
from hedgerow.wire import LayerShape, Layout

TRAINING: dict[str, Any] = {
    "budget": "layer",
    "learning_rate": 0.1,
    "min_available_nodes": 5,
    "fraction_evaluate": 0.0,
}
OWN: dict[Any, dict[str, Any]] = {
    FedMUD: {"variant": "mud+aad", "ratio": 0.3, "init_a": 0.5, "local_epochs": 2},
    FedLMT: {"ratio": 0.3, "init_a": 0.1},
    FedPara: {"ratio": 0.6, "init_a": 0.1},
    FedHM: {"ratio": 0.3},
    EF21P: {"ratio": 0.25, "scale": False, "local_epochs": 2},
    FedBAT: {"local_epochs": 2},
}
FAMILY: list[type[CompressedLayers[Any]]] = list(OWN)


def made(kind: Any, **parameters: Any) -> Any:
    """Return a method of the linear federation."""
    return kind(**{**MODEL, **TRAINING, **OWN[kind], **parameters})


def fedmud(**parameters: Any) -> FedMUD:
    method: FedMUD = made(FedMUD, **parameters)
    return method


def of_layers(kind: Any, *shapes: tuple[int, ...], **parameters: Any) -> Any:
    """Return a method of layers ``w0``, ``w1``, … and nothing else."""
    layers = [LayerShape(f"w{i}", shape) for i, shape in enumerate(shapes)]
    whole = {"layers": layers, "num_parameters": sum(layer.size for layer in layers)}
    alone = {"skip_front": 0, "skip_back": 0, "min_available_nodes": 1, "weighting": "uniform"}
    return kind(**{**whole, **TRAINING, **alone, **parameters})


def alone(method: Any, work: Work, rounds: int, start: Any = None) -> Iterator[tuple[Any, RoundContext]]:
    """Yield state and run after each round of such a method, whose nodes reply with rows."""
    layers: Sequence[LayerShape] = method.coded
    names = tuple(layer.key for layer in layers)
    layout = Layout(names, tuple(layer.shape for layer in layers), ("float32",) * len(layers))
    begin = np.zeros(layout.size) if start is None else np.asarray(start)
    yield from runs(method, begin.astype(np.float32), [1.0] * method.num_clients, work, rounds, layout)


def replying(*rows: Any) -> Callable[..., Any]:
    """Return the work of a node whose rows are these, round after round."""
    return lambda node, ask, told: np.asarray(rows[told["server-round"] - 1], np.float32)
