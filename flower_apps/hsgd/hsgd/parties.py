"""Deals a data set's people to hospitals and to their devices or edges.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", the three-tier partition of the system model.
Partitions are first the hospitals, then one edge for each, or all devices, group by group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Context, UserConfig
from numpy.typing import NDArray

from hedgerow.clients import Party
from hedgerow.sim.runs.kinds import LARGEST
from hedgerow.tasks import (
    SplitModel,
    VerticalDataset,
    group_split,
    load_vertical,
    split_model,
    weighted_loss,
)
from hsgd.medical import SETS

# The settings that, with a partition id, determine a node's party.
PARTY_KEYS = (
    "method", "tdcd", "num-groups", "layout", "patients-per-group", "dataset", "data-dir", "partition",
    "class-weights", "model", "seed",
)  # fmt: skip

Indices = NDArray[np.int64]
Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class AllParties:
    """All parties of a run."""

    data: VerticalDataset
    groups: list[Indices]  # The training samples of each hospital.
    model: SplitModel  # The initial model, which is also every party's architecture.
    layout: str  # {"edges", "devices"}: whether a group's devices are one node, or one each.
    class_weights: tuple[float, ...] = ()  # In the loss; empty for 1 each.
    _made: dict[int, Party] = field(default_factory=dict, repr=False)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the federation."""
        return len(self.groups) + (len(self.groups) if self.layout == "edges" else len(self.people))

    @property
    def people(self) -> Indices:
        """All people of the hospitals, group by group, as rows of the training set."""
        return np.concatenate(self.groups)

    def party(self, partition: int) -> Party:
        """Return a partition's party with its data, created once; ValueError if there is none."""
        if partition in self._made:
            return self._made[partition]
        M, data = len(self.groups), self.data
        if not 0 <= partition < self.num_nodes:
            raise ValueError(
                f"partition-id must be an integer from 0 to {self.num_nodes - 1} ({M} hospitals and "
                f"{self.num_nodes - M} {self.layout}), got {partition}"
            )
        number = partition - M
        if number < 0:
            role, group, x = "hospital", partition, data.hospital_train
            rows = self.groups[group]
        elif self.layout == "edges":
            role, group, x = "edge", number, data.device_train
            rows = self.groups[group]
        else:
            ends = np.cumsum([len(group) for group in self.groups])
            role, group, x = "device", int(np.searchsorted(ends, number, side="right")), data.device_train
            rows = self.people[[number]]
        ids = [str(name) for name in data.ids_train[rows]]
        samples, y = torch.from_numpy(x[rows]), torch.from_numpy(data.y_train[rows])
        party = Party(role, group, ids, samples, y, self.model, weighted_loss(self.class_weights))
        self._made[partition] = party
        return party


def merges(values: Mapping[str, Any]) -> bool:
    """Return whether all people are at one hospital, as in TDCD unless its groups are isolated."""
    return values["method"] in ("tdcd", "c-tdcd") and values["tdcd"] == "merged"


def deal(values: Mapping[str, Any]) -> AllParties:
    """Return the parties for a run's settings; the same object for the same settings."""
    return _deal(tuple((name, values[name]) for name in PARTY_KEYS))


@lru_cache(maxsize=2)
def _deal(key: Key) -> AllParties:
    values = dict(key)
    data = load_vertical(values["dataset"], values["data-dir"] or None, more=SETS)
    dealt = group_split(
        values["partition"], data.y_train, values["num-groups"], values["seed"],
        people=data.people_train, sites=data.sites_train,
    )  # fmt: skip
    asked, smallest = values["patients-per-group"], min(map(len, dealt))
    if asked > smallest:
        raise ValueError(
            f"patients-per-group must be at most {smallest}, the size of the smallest group (0: all), got "
            f"{asked}; dataset = {values['dataset']!r} has {len(data.y_train)} people for training, "
            f"num-groups = {values['num-groups']}, partition = {values['partition']!r}"
        )
    groups = [group[: asked or None] for group in dealt]
    hospital, device = data.hospital_train.shape[1:], data.device_train.shape[1:]
    return AllParties(
        data,
        [np.concatenate(groups)] if merges(values) else groups,
        split_model(values["model"], hospital, device, data.num_classes, values["seed"]),
        values["layout"],
        _class_weights(values["class-weights"], data, groups),
    )


def parse_class_weights(value: str) -> str | tuple[float, ...]:
    """Return ``none``, ``balanced``, or a weight per class; ValueError for anything else."""
    if value in ("none", "balanced"):
        return value
    weights = tuple(float(part) for part in value.split(","))
    if not all(0 < weight < LARGEST for weight in weights):
        raise ValueError(f"class-weights must be numbers > 0, got {value!r}")
    return weights


def _class_weights(value: str, data: VerticalDataset, groups: list[Indices]) -> tuple[float, ...]:
    weights = parse_class_weights(value)
    if weights == "none":
        return ()
    C = data.num_classes
    if weights == "balanced":
        counts = np.bincount(data.y_train[np.concatenate(groups)], minlength=C)
        if not counts.all():
            raise ValueError(f"class-weights = 'balanced' needs people of every class, got {counts.tolist()}")
        return tuple((counts.sum() / (C * counts)).tolist())
    if len(weights) != C:
        raise ValueError(f"class-weights must be one number for each of {C} classes, got {value!r}")
    return tuple(float(weight) for weight in weights)


def is_own(values: Mapping[str, Any]) -> bool:
    """Return whether each party learns from the files in its node config."""
    return bool(values["partition"] == "own")


def node_sizes(run_config: UserConfig) -> list[int] | None:
    """Return the number of people of each node, by partition id; None if nodes have their own files."""
    if is_own(run_config):
        return None
    parties = deal(run_config)
    hospitals = [len(group) for group in parties.groups]
    return hospitals + (hospitals if parties.layout == "edges" else [1] * sum(hospitals))


def node_party(context: Context) -> Party:
    """Return a node's party; the node config's ``data-dir`` takes precedence over the run's.

    ValueError if ``role`` or ``group`` in the node config is not that of its partition.
    """
    config: Mapping[str, Any] = context.node_config
    values: dict[str, Any] = {name: context.run_config[name] for name in PARTY_KEYS}
    values["data-dir"] = config.get("data-dir") or values["data-dir"]
    partition = int(config["partition-id"])
    party = deal(values).party(partition)
    wrong = [
        f"{key} of partition-id {partition} must be {due!r} with layout = {values['layout']!r} and "
        f"num-groups = {values['num-groups']}, got {config[key]!r} in the node config"
        for key, due in (("role", party.role), ("group", party.group))
        if config.get(key, due) != due
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    return party
