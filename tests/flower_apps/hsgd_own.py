"""HSGD on the parties' own files in one process: what is written, what is run, and what passed."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.common.serde import recorddict_to_proto
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.sim import flower_identity
from hedgerow.strategies import HSGD, RoundEnd
from hedgerow.tasks import VerticalDataset, load_vertical, write_groups
from hsgd import settings
from hsgd.client_app import app

SECRET = bytes(range(32))


class Grid(RecordingGrid):
    """A grid on which some nodes can be silent: ``lost(message type, partition)``."""

    lost: Callable[[str, int], bool] = staticmethod(lambda kind, partition: False)  # type: ignore[assignment]

    def push_messages(self, messages: Any) -> list[str]:
        there = list(messages)
        told = iter(super().push_messages([m for m in there if not self._is_lost(m)]))
        return ["" if self._is_lost(m) else next(told) for m in there]

    def _is_lost(self, message: Any) -> bool:
        return self.lost(message.metadata.message_type, self.partitions[message.metadata.dst_node_id])

    @property
    def traffic(self) -> bytes:
        """Everything that the server sent and was told, as it is on the wire."""
        contents = [content for _, _, content in [*self.sent, *self.replies]]
        return b"".join(recorddict_to_proto(content).SerializeToString() for content in contents)


def named(data: VerticalDataset) -> VerticalDataset:
    """Return the data with ids that occur nowhere by chance."""
    return replace(data, ids_train=np.array([f"patient-{name}." for name in data.ids_train]))


def people(count: int, groups: int = 2, seed: int = 0) -> tuple[VerticalDataset, list[np.ndarray]]:
    """Return the biopsies, and the rows of some groups of ``count`` people."""
    data = named(load_vertical("breast-cancer"))
    rows = np.random.default_rng(seed).permutation(len(data.y_train))[: groups * count]
    return data, list(rows.reshape(groups, count))


def files(folder: Path, count: int = 24, groups: int = 2, layout: str = "edges") -> list[dict[str, Any]]:
    data, rows = people(count, groups)
    configs: list[dict[str, Any]] = [
        {**one, "min-people": 2} for one in write_groups(data, rows, folder, layout)
    ]
    for m in range(groups):
        (folder / f"group-{m}" / "match.key").write_bytes(SECRET)
    return configs


def rewrite(
    path: str | Path, change: Callable[[list[str], list[list[str]]], tuple[list[str], list[list[str]]]]
) -> None:
    """Change header and rows of a CSV."""
    with Path(path).open(newline="") as lines:
        header, *rows = csv.reader(lines)
    header, rows = change(header, rows)
    with Path(path).open("w", newline="") as lines:
        csv.writer(lines).writerows([header, *rows])


@dataclass
class Played:
    """A run: its strategy, its rounds, and what passed."""

    strategy: HSGD
    grid: Grid
    ends: list[RoundEnd] = field(default_factory=list)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def play(configs: Sequence[Mapping[str, Any]], rounds: int = 2, **changes: Any) -> Played:
    """Run the app's strategy and its ClientApp on these nodes."""
    played = prepared(configs, **changes)
    with flower_identity(1):
        result = played.strategy.start(played.grid, ArrayRecord(), num_rounds=rounds, timeout=60.0)
    played.arrays = {key: array.numpy() for key, array in result.arrays.items()}
    return played


def prepared(
    configs: Sequence[Mapping[str, Any]], grid: Callable[..., Grid] = Grid, **changes: Any
) -> Played:
    defaults = {key: setting.default for key, setting in settings.SETTINGS.items()}
    groups = max(int(config["group"]) for config in configs) + 1
    own: dict[str, Any] = {
        "partition": "own",
        "num-groups": groups,
        "num-clients": len(configs),
        "participation": 0.5,
    }
    own["classes"] = ",".join(load_vertical("breast-cancer").classes)
    values = settings.read({**defaults, **own, "training-mode": "loop", **changes})
    made = grid(app, len(configs), run_config=dict(values), node_configs=list(configs), strict=True)
    played = Played(settings.build_strategy(values), made)
    played.strategy.on_round_end = [played.ends.append]
    return played
