"""The data of one HSGD node: its part of its people's features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hedgerow.clients.hsgd.step import Loss
from hedgerow.tasks.split_models import SplitModel, split_loss
from hedgerow.wire.checks import at_least, one_of
from hedgerow.wire.parties import ROLES

__all__ = ["Party"]


@dataclass(frozen=True, eq=False)
class Party:
    """One node's data: its part of its people's features, their labels, and the model's architecture.

    Parameters
    ----------
    role : {"hospital", "device", "edge"}
        A device has exactly one person; an edge hosts the devices of a whole group.
    group : int
        m, >= 0.
    ids : sequence of str
        The people, each once, in the order of the rows of ``x``.
    x : Tensor, (n, ...)
        X_1 at a hospital, else X_2, with the model's dtype and on its device.
    y : Tensor, (n,)
        Labels.
    model : SplitModel
        The architecture; parameters come by message, and the object's own are not changed. Parties that share
        the object are computed together.
    loss : Loss (default: split_loss)
        f of (logits, labels), one value per sample.
    """

    role: str
    group: int
    ids: Sequence[str]
    x: Tensor
    y: Tensor
    model: SplitModel
    loss: Loss = split_loss

    def __post_init__(self) -> None:
        one_of("role", self.role, ROLES)
        at_least(0, group=self.group)
        if not len(self.ids) == len(self.x) == len(self.y) or not len(self.ids):
            raise ValueError(
                f"ids, x and y must have equal numbers of rows, at least one, got {len(self.ids)}, "
                f"{len(self.x)} and {len(self.y)}"
            )
        if self.role == "device" and len(self.ids) != 1:
            raise ValueError(f"a device must have one person, got {len(self.ids)}")
        if len(self.places) < len(self.ids):
            raise ValueError(f"ids must have each id once, got {len(self.ids) - len(self.places)} twice")
        if self.x.dtype != (dtype := next(self.model.parameters()).dtype):
            raise ValueError(f"x must be of the model's type {dtype}, got {self.x.dtype}")

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The row of each id."""
        return {str(name): row for row, name in enumerate(self.ids)}

    @property
    def encoding(self) -> int:
        """The length of this party's encodings, e_1 or e_2."""
        return self.model.hospital_encoding if self.role == "hospital" else self.model.device_encoding

    @property
    def dtype(self) -> Any:
        """The model's NumPy dtype."""
        return torch.empty(0, dtype=self.x.dtype).numpy().dtype

    def rows(self, ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return x and y of these people; ValueError if the party does not have one of them."""
        if lacking := [name for name in ids if name not in self.places]:
            raise ValueError(
                f"ids must be among the {len(self.ids)} people of this {self.role} of group {self.group}, "
                f"got {lacking[:3]} in the message's config, {len(lacking)} in all"
            )
        places = [self.places[name] for name in ids]
        return self.x[places], self.y[places]
