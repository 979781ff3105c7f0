"""HSGD on the suite's own nodes and small networks, with a server that keeps all, and may change it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from tests.strategies.recording_grid import Push, RecordingGrid

from hedgerow.clients import Party, hsgd_client
from hedgerow.sim import flower_identity
from hedgerow.strategies import HSGD, RoundEnd
from hedgerow.tasks import split_model
from hedgerow.wire import to_record, view

GROUPS, PEOPLE, FEATURES = 2, 8, (16, 18)
MODEL = split_model("mlp", (FEATURES[0],), (FEATURES[1],), 2, 3)
BLOCKS = {"head": MODEL.head, "hospital": MODEL.hospital, "device": MODEL.device}


@dataclass
class World:
    """Parties of some groups with half their people of each class, hospitals first."""

    layout: str
    groups: int = GROUPS
    people: int = PEOPLE
    parties: list[Party] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        shape = (self.groups, self.people)
        x1, x2 = (torch.tensor(rng.normal(size=(*shape, n)), dtype=torch.float32) for n in FEATURES)
        classes = [0, 1] * (self.people // 2)
        y = torch.tensor(np.array([rng.permutation(classes) for _ in range(self.groups)]))
        ids = [[f"{m}-{n}" for n in range(self.people)] for m in range(self.groups)]
        self.x1, self.x2, self.y = x1, x2, y
        self.parties = [Party("hospital", m, ids[m], x1[m], y[m], MODEL) for m in range(self.groups)]
        for m in range(self.groups):
            single = [slice(n, n + 1) for n in range(self.people)]
            cuts = [slice(None)] if self.layout == "edges" else single
            role = "edge" if self.layout == "edges" else "device"
            self.parties += [Party(role, m, ids[m][cut], x2[m][cut], y[m][cut], MODEL) for cut in cuts]

    def row(self, name: str) -> tuple[int, int]:
        m, n = name.split("-")
        return int(m), int(n)


class Server(RecordingGrid):
    """Keeps all that passes, and may change what it hands on."""

    def __init__(self, world: World, attack: Push | None = None, **options: Any) -> None:
        app = hsgd_client(lambda context: world.parties[int(context.node_config["partition-id"])])
        super().__init__(app, len(world.parties), strict=True, push=attack, **options)
        self.world = world

    def asked(self, kind: str) -> Iterator[tuple[int, RecordDict, RecordDict]]:
        """Yield what each party was sent and what it told, one after the other."""
        waiting: dict[int, list[RecordDict]] = {}
        for told_kind, i, content in self.replies:
            if told_kind == kind:
                waiting.setdefault(i, []).append(content)
        for sent_kind, i, content in self.sent:
            if sent_kind == kind and waiting.get(i):
                yield i, content, waiting[i].pop(0)


def strategy(world: World, P: int = 1, Q: int = 1, **options: Any) -> HSGD:
    defaults: dict[str, Any] = {
        "learning_rate": 0.05, "min_available_nodes": len(world.parties), "seed": 4, "participation": 1.0,
    }  # fmt: skip
    return HSGD(global_interval=P, local_interval=Q, **{**defaults, **options})


def run(
    hsgd: HSGD, world: World, rounds: int = 2, server: Server | None = None
) -> tuple[np.ndarray, list[RoundEnd], Server]:
    server, ends = server or Server(world), []
    hsgd.on_round_end = [ends.append]
    with flower_identity(1):
        result = hsgd.start(server, to_record(MODEL.state_dict()), num_rounds=rounds, timeout=60.0)
    flat = np.concatenate([array.numpy().ravel() for array in result.arrays.values()])
    return flat, [end for end in ends if end.round], server


def total(ends: list[RoundEnd], key: str) -> float:
    return sum(end.train.get(key, 0) for end in ends)


def arrays_of(content: RecordDict) -> dict[str, np.ndarray]:
    return {key: view(array) for key, array in content.array_records.get("arrays", ArrayRecord()).items()}
