"""Parties of HSGD on the plain model of the oracle: hospitals, devices and edges, call by call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tests.oracles.hsgd import Group, Theta
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.sim import FaultModel, flower_identity
from hedgerow.strategies import HSGD, RoundEnd
from hedgerow.wire import lazy_array
from hedgerow.wire.sparse_rows import kept as kept_entries

Vector = np.ndarray
Sabotage = Callable[[str, int, int, RecordDict], RecordDict]


def same(kind: str, partition: int, t: int, reply: RecordDict) -> RecordDict:
    return reply


def squeezed(vector: Vector) -> bytes:
    kept = np.sort(np.argsort(-np.abs(vector), kind="stable")[: kept_entries(len(vector))])
    width = -(-(len(vector) - 1).bit_length() // 8)
    indices = b"".join(int(i).to_bytes(width, "little") for i in kept)
    return np.asarray(vector[kept], "<f4").tobytes() + indices


def spread(payload: bytes, length: int) -> Vector:
    k, width = kept_entries(length), -(-(length - 1).bit_length() // 8)
    vector = np.zeros(length)
    for i in range(k):
        index = int.from_bytes(payload[4 * k + i * width : 4 * k + (i + 1) * width], "little")
        vector[index] = np.frombuffer(payload, "<f4", k)[i]
    return vector


@dataclass
class Parties:
    """All parties of some groups: hospitals first, then an edge each, or device after device.

    ``sabotage(kind, partition, t, reply)`` may change a reply or raise; what happened stands in ``trace``.
    """

    model: Any
    groups: Sequence[Group]
    edges: bool = False
    lengths: tuple[int, int] = (1, 1)
    head_length: int = 2
    dtype: str = "float64"
    sabotage: Sabotage = same
    ids: dict[int, list[str]] = field(default_factory=dict)
    trace: list[tuple[str, str, int, int, list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parties: list[tuple[str, int, list[int]]] = [
            ("hospital", m, list(range(len(g.y)))) for m, g in enumerate(self.groups)
        ]
        for m, g in enumerate(self.groups):
            rows = list(range(len(g.y)))
            self.parties += [("edge", m, rows)] if self.edges else [("device", m, [n]) for n in rows]

    def names(self, partition: int) -> list[str]:
        _, m, rows = self.parties[partition]
        return self.ids.get(partition, [f"g{m}p{n}" for n in rows])

    def app(self) -> ClientApp:
        app = ClientApp()
        app.query("whoami")(self._handled("whoami", self.whoami))
        app.query("pair")(self._handled("pair", self.pair))
        app.train("exchange")(self._handled("exchange", self.exchange))
        app.train("update")(self._handled("update", self.update))
        return app

    def _handled(self, kind: str, handler: Callable[..., RecordDict]) -> Callable[..., Message]:
        def handle(message: Message, context: Context) -> Message:
            partition = int(context.node_config["partition-id"])
            config = message.content["config"]
            t = int(config.get("t", -1))
            reply = handler(partition, message.content, context.state)
            role, *_ = self.parties[partition]
            self.trace.append((kind, role, partition, t, list(config.get("ids", []))))
            return Message(self.sabotage(kind, partition, t, reply), reply_to=message)

        return handle

    def whoami(self, partition: int, content: RecordDict, state: RecordDict) -> RecordDict:
        me = {"partition-id": partition, "num-examples": len(self.parties[partition][2])}
        return RecordDict({"whoami": ConfigRecord(me)})

    def pair(self, partition: int, content: RecordDict, state: RecordDict) -> RecordDict:
        role, m, _ = self.parties[partition]
        length = self.lengths[role != "hospital"]
        told = {"role": role, "group": m, "ids": self.names(partition), "encoding": length}
        return RecordDict({"pair": ConfigRecord(told)})

    def exchange(self, partition: int, content: RecordDict, state: RecordDict) -> RecordDict:
        role, m, _ = self.parties[partition]
        group, config = self.groups[m], content["config"]
        t, pairs = int(config["t"]), config.get("grouping") == "pairs"
        here = [self.row(partition, name) for name in config.get("ids", self.names(partition))]
        blocks = ("head", "hospital") if role == "hospital" else ("device",)
        if "arrays" in content:
            model = {key: content["arrays"][key].numpy() for key in blocks}
            assert set(content["arrays"]) == set(blocks)
            if pairs:
                model = {key: np.tile(block, (len(here), 1)) for key, block in model.items()}
        else:
            model = self.recalled(state, int(config.get("since", t)), here if pairs else None)
        self.keep(state, t, model, here, made_at=int(config.get("since", t)))
        if role == "hospital":
            Z = self._encoded(self.model.encode1, model["hospital"], group.x1[here], pairs)
            return self._reply(config, {"head": model["head"], "zeta1": Z})
        return self._reply(
            config, {"zeta2": self._encoded(self.model.encode2, model["device"], group.x2[here], pairs)}
        )

    def update(self, partition: int, content: RecordDict, state: RecordDict) -> RecordDict:
        role, m, _ = self.parties[partition]
        g, config = self.groups[m], content["config"]
        t, steps = int(config["t"]), int(config["steps"])
        here = [self.row(partition, name) for name in config.get("ids", self.names(partition))]
        model = self.recalled(state, t, None)
        pairs = model[next(iter(model))].ndim == 2
        if pairs:
            model = self.recalled(state, t, here)
        work = self._hospital_steps if role == "hospital" else self._device_steps
        model, metrics = work(g, content, config, model, here, pairs)
        upload = role == "device" or bool(config["upload"])
        if role == "edge" and not (pairs and not upload):
            model = {"device": self._mean(model["device"])}
        if role == "device":
            state.clear()
        else:
            before = {f"before-{key}": state[key] for key in ("model", "at")}
            self.keep(state, t + steps, model, here)
            state.update(before)
        reply = RecordDict({"metrics": MetricRecord({"num-examples": len(here), **metrics})})
        if upload:
            reply["arrays"] = ArrayRecord({k: lazy_array(v.astype(self.dtype)) for k, v in model.items()})
        return reply

    def _hospital_steps(
        self, g: Group, content: RecordDict, config: Any, model: Any, here: list[int], pairs: bool
    ) -> Any:
        Z2 = self._received(content, "zeta2", self.lengths[1])
        heads, hospitals = (np.atleast_2d(model[key]).copy() for key in ("head", "hospital"))
        batches = [[i] for i in range(len(here))] if pairs else [list(range(len(here)))]
        losses = []
        for own, batch in enumerate(batches):
            rows = [here[i] for i in batch]
            start = Theta(heads[own], hospitals[own], np.zeros(0))
            losses.append(self._loss(start, g.x1[rows], Z2[batch], g.y[rows]))
            for eta in self._rates(config):
                g0, g1 = self.model.hospital(heads[own], hospitals[own], g.x1[rows], Z2[batch], g.y[rows])
                g1 = g1 + float(config["mu"]) * hospitals[own]
                heads[own], hospitals[own] = heads[own] - eta * g0, hospitals[own] - eta * g1
        out = {"head": heads, "hospital": hospitals}
        out = out if pairs else {key: block[0] for key, block in out.items()}
        return out, {"loss": float(np.mean(losses))}

    def _device_steps(
        self, g: Group, content: RecordDict, config: Any, model: Any, here: list[int], pairs: bool
    ) -> Any:
        Z1 = self._received(content, "zeta1", self.lengths[0])
        head = self._received(content, "head", self.head_length)
        devices = np.array([model["device"][i] if pairs else model["device"] for i in range(len(here))])
        for i, n in enumerate(here):
            own = head[i] if len(head) > 1 or pairs else head[0]
            for eta in self._rates(config):
                gradient = self.model.device(own, Z1[[i]], devices[i], g.x2[[n]], g.y[[n]])
                devices[i] = devices[i] - eta * (gradient + float(config["mu"]) * devices[i])
        return {"device": devices if "ids" in config else devices[0]}, {}

    def _loss(self, theta: Theta, x1: Vector, Z2: Vector, y: Vector) -> float:
        """Return the mean loss on the batch; only a model with a loss of encodings has one."""
        batch_loss = getattr(self.model, "batch_loss", None)
        return 0.0 if batch_loss is None else float(batch_loss(theta, x1, Z2, y))

    def _rates(self, config: Any) -> list[float]:
        t, period = int(config["t"]), int(config["eta-period"])
        return [
            float(config["eta0"]) * (0.5 ** (i // period) if period else 1.0)
            for i in range(t, t + int(config["steps"]))
        ]

    def _encoded(self, encode: Any, theta: Vector, x: Vector, pairs: bool) -> Vector:
        if not pairs:
            return np.asarray(encode(theta, x))
        return np.concatenate([encode(theta[i], x[[i]]) for i in range(len(x))])

    def _reply(self, config: Any, arrays: dict[str, Vector]) -> RecordDict:
        if not config["compress"]:
            return RecordDict(
                {"arrays": ArrayRecord({k: lazy_array(v.astype(self.dtype)) for k, v in arrays.items()})}
            )
        payload = {k: squeezed(v) if v.ndim == 1 else [squeezed(row) for row in v] for k, v in arrays.items()}
        return RecordDict({"payload": ConfigRecord(payload)})

    def _received(self, content: RecordDict, key: str, length: int) -> Vector:
        if "payload" in content:
            coded = content["payload"][key]
            rows = coded if isinstance(coded, list) else [coded]
            return np.array([spread(row, length) for row in rows])
        return np.atleast_2d(content["arrays"][key].numpy()).astype(float)

    def _mean(self, rows: Vector) -> Vector:
        total = np.zeros(rows.shape[1:])
        for row in rows:
            total = total + row
        return (total / len(rows)).astype(rows.dtype)

    def row(self, partition: int, name: str) -> int:
        _, _, rows = self.parties[partition]
        return rows[self.names(partition).index(name)]

    def keep(
        self,
        state: RecordDict,
        t: int,
        model: dict[str, Vector],
        here: list[int],
        made_at: int | None = None,
    ) -> None:
        state.clear()
        state["model"] = ArrayRecord({key: lazy_array(np.array(block)) for key, block in model.items()})
        state["at"] = ConfigRecord({"t": t, "made-at": t if made_at is None else made_at, "rows": here})

    def recalled(self, state: RecordDict, t: int, here: list[int] | None) -> dict[str, Vector]:
        """Return the model of iteration t, or what one of a later iteration was made of at t."""
        known = [b for b in ("", "before-") if f"{b}at" in state and t in state[f"{b}at"].values()]
        if not known:
            raise ValueError(f"no state of iteration {t}")
        at = state[f"{known[0]}at"]
        model = {key: array.numpy() for key, array in state[f"{known[0]}model"].items()}
        if here is None:
            return model
        places = [list(at["rows"]).index(n) for n in here]
        return {key: block[places] for key, block in model.items()}


class Spy(RecordingGrid):
    """A grid that keeps what was sent and told: message type, partition id, content."""

    def __init__(self, parties: Parties, **options: Any) -> None:
        super().__init__(parties.app(), len(parties.parties), **options)


def record_of(theta: Theta, dtype: str = "float64") -> ArrayRecord:
    names = ("head.weight", "hospital.weight", "device.weight")
    return ArrayRecord({name: lazy_array(b.astype(dtype)) for name, b in zip(names, theta, strict=True)})


def theta_of(record: ArrayRecord) -> Vector:
    return np.concatenate([array.numpy().ravel() for array in record.values()])


def run(
    strategy: HSGD,
    parties: Parties,
    start: Theta,
    num_rounds: int,
    *,
    faults: FaultModel | dict[int, FaultModel] | None = None,
    grid: Spy | None = None,
) -> tuple[Vector, list[RoundEnd], Spy]:
    """Run and return the final model, what callbacks were told, and the grid."""
    ends: list[RoundEnd] = []
    strategy.on_round_end = [*strategy.on_round_end, ends.append]
    grid = grid or Spy(parties, faults=faults)
    with flower_identity(1):
        result = strategy.start(grid, record_of(start, parties.dtype), num_rounds=num_rounds, timeout=60.0)
    return theta_of(result.arrays), ends, grid
