"""Small runs of every method, and what they come to."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Error, Message, RecordDict
from tests.flower_apps.cases import CASES, CEPS, FEDMUD, HSGD, SD_FEEL, SIMILARITY_FREE, AppCase

from hedgerow.sim import InProcessGrid, RunRecorder, plan_run, read_rounds, run_app
from hedgerow.sim.runs.plan import resumed_config

__all__ = [
    "METHODS",
    "VARIANTS",
    "Interrupted",
    "Method",
    "Passed",
    "Played",
    "interrupted",
    "passing",
    "play",
    "read",
]


@dataclass(frozen=True)
class Method:
    """A method or baseline: an app, and the name that it has there; with settings that make it a variant."""

    case: AppCase
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        changes = [f"{key}={value}" for key, value in self.changes.items()]
        return "-".join([self.case.name, self.name, *changes])


METHODS = tuple(Method(case, name) for case in CASES for name in case.methods)

_SUMS = {"secure-sum": True}
_NOISE = {"noise-source": "seed", "upload-clip": 0.1, "upload-noise-multiplier": 0.5}
_SOUND = {"privacy": "sound", "sigma-rule": "fixed_c", "noise-source": "seed"}
_DEVICES = {"layout": "devices", "sealed": False, "patients-per-group": 4, "num-clients": 10}
# What keeps state of its own, or sends messages of its own, beside the method.
VARIANTS = (
    Method(SD_FEEL, "sd-feel", {"edge-servers": "nodes"}),
    Method(SD_FEEL, "sd-feel", {"edge-servers": "nodes", "aggregation": "median"}),
    Method(SD_FEEL, "sd-feel", {"participation": 0.8, "stragglers": "lasting(0.4,5)"}),
    Method(SD_FEEL, "feel", _SUMS),
    Method(SD_FEEL, "sd-feel", {"local-layers": "*bias"}),
    Method(SIMILARITY_FREE, "ef-fedavg", {"local-layers": "*bias"}),
    Method(FEDMUD, "fedmud+aad", {"local-layers": "*bias"}),
    Method(SIMILARITY_FREE, "ef-fedavg", {"compressor": "randk(0.2)"}),
    Method(SIMILARITY_FREE, "ef-fedprox", {"compressor": "ternary"}),
    Method(SIMILARITY_FREE, "fedavg", {"aggregation": "krum(1)"}),
    Method(SIMILARITY_FREE, "fedavg", {**_SUMS, **_NOISE}),
    *(
        Method(FEDMUD, name, {"sync": sync, "reset-interval": 2})
        for name in ("fedmud", "ef21-p", "fedbat")
        for sync in ("dense", "broadcast", "catchup")
    ),
    Method(FEDMUD, "fedmud+bkd+aad", {"aggregation": "geometric-median"}),
    Method(SD_FEEL, "feel", {"buffer": 2, "fault-delay": "exponential:2"}),
    Method(SIMILARITY_FREE, "ef-fedavg", {"buffer": 2, "compressor": "topk(0.1)", "fault-delay": 1}),
    Method(FEDMUD, "fedmud", {"buffer": 2, "sync": "dense", "fault-delay": "exponential:2"}),
    Method(FEDMUD, "fedmud+aad", {**_SUMS, "sync": "dense", "num-clients": 4, "clients-per-round": 4}),
    Method(CEPS, "ceps", {"codec": "dense64", **_SOUND}),
    Method(CEPS, "ceps", {"sealed": False, "phi": "srht"}),
    Method(CEPS, "dfedavgm", {"bits": 4}),
    Method(HSGD, "hsgd", {"sealed": False}),
    Method(HSGD, "hsgd", _DEVICES),
    Method(HSGD, "jfl", _DEVICES),
    Method(
        HSGD, "hsgd", {"adaptive": "strategy2+3", "replan-every": 1, "probe-steps": 2, "probe-batches": 2}
    ),
    Method(HSGD, "hsgd", {"aggregation": "median", "device-aggregation": "median", **_DEVICES}),
    Method(HSGD, "hsgd", {"clip": 1.0, "noise-multiplier": 0.5, "noise-source": "seed"}),
)


@dataclass(frozen=True)
class Played:
    """What a run left.

    Parameters
    ----------
    folder : Path
        Its folder.
    rounds : list of dict
        Its rounds, without real seconds.
    model : dict of str to ndarray
        The last global model; empty where the models stay on the nodes.
    """

    folder: Path
    rounds: list[dict[str, Any]]
    model: dict[str, np.ndarray]

    @property
    def learnt(self) -> Any:
        """The bits of the model, and what each round's evaluation saw of it."""
        bits = {key: (array.dtype.str, array.shape, array.tobytes()) for key, array in self.model.items()}
        return bits, [(record["round"], record["central"]) for record in self.rounds]

    @property
    def all(self) -> Any:
        """What it learnt, and all that it recorded: traffic, simulated time, metrics, losses of replies."""
        return self.learnt, self.rounds


def play(
    method: Method, parent: Path, *, strict: bool = False, resume: Path | None = None, **changes: Any
) -> Played:
    """Run a method in a new folder of ``parent``, or go on with the run in ``resume``."""
    case = method.case
    before = set(parent.iterdir())
    settings = {**case.small, **case.named(method.name), "quiet": True, **method.changes, **changes}
    overrides = resumed_config(case.spec, str(resume)) if resume is not None else []
    overrides += [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    plan = plan_run(case.spec, [*overrides, f"output-dir={json.dumps(str(parent))}"])
    run_app(case.loaded, plan, strict=strict)
    (folder,) = {resume} if resume is not None else set(parent.iterdir()) - before
    return read(folder)


def read(folder: Path) -> Played:
    """Read what a run left."""
    rounds = read_rounds(folder)
    for record in rounds:
        del record["wall_seconds"]
    model = {}
    if (folder / "model.npz").exists():
        with np.load(folder / "model.npz") as arrays:
            model = {key: arrays[key] for key in sorted(arrays.files)}
    return Played(folder, rounds, model)


class Interrupted(BaseException):
    """A run is over before its end, as by a signal."""


@contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Interrupt a run when a round has been recorded."""
    real = RunRecorder.on_round_end

    def on_round_end(self: Any, end: Any) -> None:
        real(self, end)
        if end.round == after:
            raise Interrupted

    with patch.object(RunRecorder, "on_round_end", on_round_end):
        yield


@dataclass(frozen=True)
class Passed:
    """An instruction and its reply, as the server is handed it.

    Parameters
    ----------
    number : int
        How many of the message type the node has answered before.
    partition : int
        The node's.
    kind : str
        The message type.
    instruction : Message
        What the node was sent.
    reply : Message
        What it replied; an error in place of a content where it failed.
    """

    number: int
    partition: int
    kind: str
    instruction: Message
    reply: Message


@contextmanager
def passing(
    change: Callable[[Passed], RecordDict | Error | None] = lambda passed: None,
) -> Iterator[list[Passed]]:
    """List all that passes a grid, in the order in which replies are pulled.

    What ``change`` returns takes the place of a reply's content: another content, or an error.
    """
    passed: list[Passed] = []
    sent: dict[str, Message] = {}
    answered: dict[tuple[int, str], int] = {}
    push, pull = InProcessGrid.push_messages, InProcessGrid.pull_messages

    def pushed(self: InProcessGrid, messages: Any) -> Any:
        messages = list(messages)
        ids = list(push(self, messages))
        sent.update(zip(ids, messages, strict=True))
        return ids

    def pulled(self: InProcessGrid, message_ids: Any) -> list[Message]:
        replies = []
        for original in pull(self, message_ids):
            reply = original
            instruction = sent[reply.metadata.reply_to_message_id]
            node = self._all.find(instruction.metadata.dst_node_id)
            partition = -1 if node is None else node.partition_id
            kind = instruction.metadata.message_type
            number = answered.get((partition, kind), 0)
            answered[partition, kind] = number + 1
            one = Passed(number, partition, kind, instruction, reply)
            if (changed := change(one)) is not None:
                reply = Message(changed, reply_to=instruction)
                one = Passed(number, partition, kind, instruction, reply)
            passed.append(one)
            replies.append(reply)
        return replies

    with (
        patch.object(InProcessGrid, "push_messages", pushed),
        patch.object(InProcessGrid, "pull_messages", pulled),
        # Every exchange in messages.
        patch.object(InProcessGrid, "columns", lambda *asked: None),
    ):
        yield passed
