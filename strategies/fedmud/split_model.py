"""The global model in two parts: the layers that a method codes, and all else as one vector."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.fedmud.layer_method import Method
from hedgerow.wire.records import Layout, lazy_array, view

__all__ = ["SplitModel"]


class SplitModel:
    """The model of one run, from its first arrays on.

    Parameters
    ----------
    federation : Federation
        Holds the layout of the whole model.
    method : Method
        Holds the coded layers.
    """

    def __init__(self, federation: Federation, method: Method) -> None:
        self.federation = federation
        self.method = method
        self.rest: NDArray[Any] | None = None

    def begin(self, arrays: ArrayRecord) -> None:
        """Take the initial arrays apart; ValueError if a coded layer is missing or has another shape."""
        self.federation.layout = Layout.of(arrays)
        weights: dict[str, Tensor] = {}
        for layer in self.method.layers:
            found = view(arrays[layer.key]).shape if layer.key in arrays else None
            if found != layer.shape:
                raise ValueError(
                    f"{layer.key} has the shape {found} in the initial arrays; valid is {layer.shape}"
                )
            weights[layer.key] = torch.tensor(view(arrays[layer.key]), dtype=torch.float32)
        rest = ArrayRecord({key: arrays[key] for key in self.rest_layout.keys})
        floats = (d for d in self.rest_layout.dtypes if np.dtype(d).kind == "f")
        self.rest = self.rest_layout.flatten(rest, np.result_type(np.float32, *floats))
        self.method.begin(weights)

    @cached_property
    def rest_layout(self) -> Layout:
        """The layout of what is not coded."""
        whole, coded = self.federation.known_layout(), {layer.key for layer in self.method.layers}
        rows = zip(whole.keys, whole.shapes, whole.dtypes, strict=True)
        kept = [row for row in rows if row[0] not in coded]
        return Layout(tuple(r[0] for r in kept), tuple(r[1] for r in kept), tuple(r[2] for r in kept))

    def known_rest(self) -> NDArray[Any]:
        """Return what is not coded (d,); RuntimeError before the first round."""
        if self.rest is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self.rest

    def rest_record(self) -> ArrayRecord:
        """Return what is not coded under the plain model's keys."""
        return self.rest_layout.unflatten(self.known_rest())

    def parts(self, arrays: ArrayRecord) -> tuple[ArrayRecord, NDArray[Any]]:
        """Return what a reply holds of coded layers, and of the rest (d,); PayloadError for other arrays."""
        rest, coded = ArrayRecord(), ArrayRecord()
        for key, array in arrays.items():
            (rest if key in self.rest_layout.slices else coded)[key] = array
        return coded, self.rest_layout.flatten(rest, self.known_rest().dtype)

    def move(self, server_round: int, rest: NDArray[np.float64], mean: Any) -> dict[str, float]:
        """Take the means of a round, the rest's (d,) and the method's; return what the method tells."""
        self.rest = rest.astype(self.known_rest().dtype)
        return self.method.move(server_round, mean)

    def dense(self) -> ArrayRecord:
        """Return the dense effective model under the plain model's keys."""
        weights, rest, layout = self.method.weights(), self.rest_record(), self.federation.known_layout()
        record = ArrayRecord()
        for key, dtype in zip(layout.keys, layout.dtypes, strict=True):
            if key in weights:
                record[key] = lazy_array(weights[key].numpy().astype(dtype, copy=False))
            else:
                record[key] = rest[key]
        return record
