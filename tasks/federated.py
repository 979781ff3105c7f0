"""A data set partitioned among the nodes of a federation, as tensors."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .datasets import Dataset, load
from .partitions import DrawnParts, deal_alike, partition
from .sources import resolve_data_dir


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A data set and the partition of its training samples. Shared: do not modify it.

    Parameters
    ----------
    dataset : Dataset
        The whole data set.
    x, y : Tensor
        The training set, (N, ...) of the data set's type and int64 (N,).
    x_test, y_test : Tensor
        The test set, which is not partitioned.
    parts : sequence of ndarray of int64
        The training samples of each partition, as indices into ``x`` and ``y``.
    seed : int (default: 0)
        The seed of the partition, and of ``personal_test_share``.
    """

    dataset: Dataset
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    parts: Sequence[NDArray[np.int64]]
    seed: int = 0
    _resident: "dict[torch.device, FederatedData]" = field(default_factory=dict, repr=False)

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return len(self.parts)

    @property
    def sizes(self) -> list[int]:
        """The number of training samples of each partition."""
        if isinstance(self.parts, DrawnParts):
            return [self.parts.num_samples] * len(self.parts)
        return [part.size for part in self.parts]

    def samples(self, partition_id: int) -> tuple[Tensor, Tensor]:
        """Return one partition's inputs and labels, copied, in the order of ``parts``.

        Raises
        ------
        ValueError
            If there is no such partition.
        """
        if not 0 <= partition_id < self.num_partitions:
            raise ValueError(f"partition-id must be from 0 to {self.num_partitions - 1}, got {partition_id}")
        indices = torch.from_numpy(self.parts[partition_id]).to(self.x.device)
        return self.x[indices], self.y[indices]

    def test_share(self, partition_id: int) -> tuple[Tensor, Tensor]:
        """Return a partition's share of the test set: every ``num_partitions``-th sample, at least one.

        The shares are disjoint and together the test set, unless it has fewer samples than there are
        partitions.
        """
        first = partition_id % len(self.y_test)
        return self.x_test[first :: self.num_partitions], self.y_test[first :: self.num_partitions]

    def personal_test_share(self, partition_id: int) -> tuple[Tensor, Tensor]:
        """Return a partition's share of the test set with the classes that its training samples have.

        Each class of the test set is split among the partitions in the proportions in which they have its
        training samples, see ``deal_alike``. The shares are disjoint and together the test set, except that a
        partition with too few samples for a share has one test sample of another's, and that classes without
        training samples are left out. It is ``test_share`` for partitions drawn with replacement, which have
        the classes of the whole set, and for one that has no class of the test set.
        """
        if self._alike is None or not (share := self._alike[partition_id]).size:
            return self.test_share(partition_id)
        indices = torch.from_numpy(share).to(self.x_test.device)
        return self.x_test[indices], self.y_test[indices]

    @cached_property
    def _alike(self) -> list[NDArray[np.int64]] | None:
        if isinstance(self.parts, DrawnParts):
            return None
        return deal_alike(self.parts, self.dataset.y_train, self.dataset.y_test, self.seed)

    def to(self, device: torch.device | str) -> "FederatedData":
        """Return the same data on a device; it is copied there once and kept."""
        # An empty tensor resolves "cuda" to the current device, such as "cuda:0".
        target = torch.empty(0, device=device).device
        # One dictionary for all copies including the original, so that moving back copies nothing.
        self._resident.setdefault(self.x.device, self)
        if target not in self._resident:
            tensors = {name: getattr(self, name).to(target) for name in ("x", "y", "x_test", "y_test")}
            self._resident[target] = replace(self, **tensors)
        return self._resident[target]


def federated(
    dataset: str,
    scheme: str,
    num_partitions: int,
    seed: int,
    data_dir: str | os.PathLike[str] | None = None,
    scaling: str = "standard",
) -> FederatedData:
    """Load a data set and partition its training samples, cached.

    Parameters
    ----------
    dataset : str
        A name or import path, as for ``load``.
    scheme : str
        A partition scheme, as for ``partition``.
    num_partitions : int
        Number of partitions, as for ``partition``.
    seed : int
        The run's seed, >= 0.
    data_dir : str or path or None (default: None)
        The data folder, as for ``load``.
    scaling : {"standard", "unit"} (default: "standard")
        How pixels are scaled, as for ``load``.

    Raises
    ------
    DatasetNotFound, ValueError
        As ``load`` and ``partition`` do.
    """
    return _federated(dataset, scheme, num_partitions, seed, resolve_data_dir(data_dir), scaling)


@lru_cache(maxsize=4)
def _federated(
    name: str, scheme: str, num_partitions: int, seed: int, data_dir: Path | None, scaling: str
) -> FederatedData:
    dataset = load(name, data_dir, scaling)
    return FederatedData(
        dataset=dataset,
        x=torch.from_numpy(dataset.x_train),
        y=torch.from_numpy(dataset.y_train),
        x_test=torch.from_numpy(dataset.x_test),
        y_test=torch.from_numpy(dataset.y_test),
        parts=partition(scheme, dataset.y_train, num_partitions, seed, dataset.sources),
        seed=seed,
    )
