"""A federation of deep linear regressions, whose ClientApp is as plain as the messages of the family allow.

y = W_last W_b W_a W_first x + bias, trained by full-batch SGD; W_a and W_b are the layers between the first
and the last, which are compressed. No code of the suite's own clients: what a node does is written out here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import RoundEnd
from hedgerow.strategies.fedmud import CompressedLayers
from hedgerow.wire import Factorisation, LayerShape, decode_indices, rand_k, to_record, to_state_dict

LAYERS = tuple(
    LayerShape(f"{name}.weight", shape)
    for name, shape in {"first": (6, 4), "a": (8, 6), "b": (5, 8), "last": (2, 5)}.items()
)
COMPRESSED = ("a.weight", "b.weight")
NUM_PARAMETERS = sum(layer.size for layer in LAYERS) + 2
D = 8 * 6 + 5 * 8
E_UNC = NUM_PARAMETERS - D
MODEL: dict[str, Any] = {"layers": LAYERS, "num_parameters": NUM_PARAMETERS}

Sabotage = Callable[[int, int, RecordDict], RecordDict]


def initial(scale: float = 0.4) -> ArrayRecord:
    rng = np.random.default_rng(7)
    state: dict[str, Any] = {
        layer.key: (scale * rng.standard_normal(layer.shape)).astype(np.float32) for layer in LAYERS
    }
    state["last.bias"] = np.zeros(2, np.float32)
    state["norm.num_batches_tracked"] = np.array(0, np.int64)
    return to_record(state)


@dataclass
class LinearFederation:
    """N nodes with data of their own; ``seen`` holds (round, partition id, message type, content)."""

    num_clients: int = 5
    sabotage: Sabotage | None = None
    seen: list[tuple[int, int, str, RecordDict]] = field(default_factory=list)

    def examples(self, client: int) -> int:
        return 6 + client

    def client_app(self) -> ClientApp:
        app = ClientApp()
        app.train()(lambda message, context: self._answer(message, context, "train"))
        app.query("merge")(lambda message, context: self._answer(message, context, "query.merge"))

        @app.query("whoami")
        def whoami(message: Message, context: Context) -> Message:
            client = int(context.node_config["partition-id"])
            me = ConfigRecord({"partition-id": client, "num-examples": self.examples(client)})
            return Message(RecordDict({"whoami": me}), reply_to=message)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            client = int(context.node_config["partition-id"])
            state = to_state_dict(message.content["arrays"])
            metrics = MetricRecord(
                {"num-examples": self.examples(client), "loss": float(self._loss(state, client))}
            )
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return app

    def _answer(self, message: Message, context: Context, kind: str) -> Message:
        client = int(context.node_config["partition-id"])
        content, config = message.content, message.content["config"]
        server_round = int(config["server-round"])
        self.seen.append((server_round, client, kind, content))
        told: dict[str, Any] = {"num-examples": self.examples(client), "num-batches": 1 + client % 3}
        told |= {"base-version": config["version"], "need-base": 0}
        base = _base(content, context.state)
        arrays: Mapping[str, Any] = {}
        if base is None:
            told |= {"num-examples": 0, "need-base": 1}
        elif kind == "train":
            arrays, told["train-loss"] = self._train(content, base, client)
        records = {"arrays": to_record(arrays)} if kind == "train" else {}
        reply = RecordDict({**records, "metrics": MetricRecord(told)})
        if self.sabotage is not None:
            reply = self.sabotage(client, server_round, reply)
        return Message(reply, reply_to=message)

    def _train(
        self, content: RecordDict, base: dict[str, Tensor], client: int
    ) -> tuple[dict[str, Any], float]:
        config, rest = content["config"], to_state_dict(content["arrays"])
        method, plan = config["method"], plan_of(config)
        if method == "factored":
            frozen = plan.frozen(config["run-seed"], config["version"])
            fresh = plan.init(config["run-seed"], config["version"])
            own = to_state_dict(content["factors"]) if "factors" in content else fresh
        else:
            frozen, own = {}, {key: weight.clone() for key, weight in base.items()}
        trained = {**own, **{key: value for key, value in rest.items() if value.is_floating_point()}}
        for value in trained.values():
            value.requires_grad_(True)
        for _ in range(int(config["local-epochs"])):
            if method == "factored":
                deltas = plan.deltas({key: trained[key] for key in own}, frozen)
                weights = {key: base[key] + d if plan.has_base else d for key, d in deltas.items()}
            else:
                weights = {key: trained[key] for key in own}
            loss = self._loss({**trained, **weights}, client)
            loss.backward()
            for value in trained.values():
                value.data -= float(config["learning-rate"]) * value.grad  # type: ignore[operator]
                value.grad = None
        final = {key: value.detach() for key, value in trained.items()}
        uncompressed = {key: final.get(key, value) for key, value in rest.items()}
        uncompressed["norm.num_batches_tracked"] = rest["norm.num_batches_tracked"] + client
        change = {key: final[key] - base[key] for key in base} if method in ("ef21p", "fedbat") else {}
        coded = self._uplink(config, {k: final[k] for k in own}, change, client)
        return {**coded, **uncompressed}, loss.item()

    def _uplink(
        self, config: ConfigRecord, own: dict[str, Tensor], change: dict[str, Tensor], client: int
    ) -> dict[str, Any]:
        if config["method"] == "ef21p":
            flat = torch.cat([part.flatten() for part in change.values()]).numpy()
            kept = rand_k(
                len(flat),
                config["keep"],
                seed=config["seed"],
                round=config["server-round"],
                partition_id=client,
            )
            return {"values": flat[kept]}
        if config["method"] == "fedbat":
            bits = {f"{key}:bits": np.packbits(part.numpy() >= 0) for key, part in change.items()}
            return bits | {
                f"{key}:alpha": part.abs().mean().reshape(1).numpy() for key, part in change.items()
            }
        return own

    def _loss(self, state: Mapping[str, Tensor], client: int) -> Tensor:
        rng = np.random.default_rng([11, client])
        x = torch.from_numpy(rng.standard_normal((self.examples(client), 4)).astype(np.float32))
        y = torch.from_numpy(rng.standard_normal((self.examples(client), 2)).astype(np.float32)) + client
        for layer in LAYERS:
            x = x @ state[layer.key].T
        return 0.5 * torch.mean((x + state["last.bias"] - y) ** 2)

    def grid(self, faults: Any = None, strict: bool = False) -> InProcessGrid:
        return InProcessGrid(self.client_app(), self.num_clients, faults=faults, strict=strict)


def plan_of(config: ConfigRecord) -> Factorisation:
    plan = Factorisation.plan(
        [layer for layer in LAYERS if layer.key in config["layers"]],
        num_parameters=NUM_PARAMETERS,
        skip_front=0,
        skip_back=0,
        **{
            key: config[key.replace("_", "-")]
            for key in ("variant", "ratio", "budget", "init_a", "layout", "tight")
        },
    )
    assert plan.fingerprint == config["fingerprint"]
    return plan


def _base(content: RecordDict, state: RecordDict) -> dict[str, Tensor] | None:
    """Return the current base, brought up to date; {} for a method without one, None if it cannot be had."""
    config = content["config"]
    version = int(config["version"])
    if config["method"] == "dense" or (config["method"] == "factored" and not plan_of(config).has_base):
        return {}
    if "base" in content:
        base = to_state_dict(content["base"])
    elif "held" in state and int(config["from-version"]) <= state["held"]["version"] <= version:
        base = to_state_dict(state["base"])
        for step in range(state["held"]["version"], version):
            base = _updated(content, base, step)
    else:
        return None
    if config["keep-base"]:
        state["base"], state["held"] = to_record(base), ConfigRecord({"version": version})
    return base


def _updated(content: RecordDict, base: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    config = content["config"]
    record = to_state_dict(content["merges" if config["method"] == "factored" else "updates"])
    update = {key.split("/", 1)[1]: value for key, value in record.items() if key.startswith(f"{step}/")}
    if config["method"] == "factored":
        plan = plan_of(config)
        return plan.merge(base, update, plan.frozen(config["run-seed"], step))
    if config["method"] == "ef21p":
        flat = torch.cat([base[key].flatten() for key in COMPRESSED])
        values = update["values"]
        flat[decode_indices(update["indices"].numpy(), len(values), len(flat))] += values
        parts = flat.split([base[key].numel() for key in COMPRESSED])
        return {key: part.reshape(base[key].shape) for key, part in zip(COMPRESSED, parts, strict=True)}
    moved = {}
    for key, weight in base.items():
        up = np.unpackbits(update[f"{key}:bits"].numpy(), count=weight.numel()).astype(bool)
        alpha = update[f"{key}:alpha"].numpy()[0]
        moved[key] = weight + torch.from_numpy(np.where(up, alpha, -alpha)).reshape(weight.shape)
    return moved


def run(
    strategy: CompressedLayers[Any],
    federation: LinearFederation,
    num_rounds: int,
    *,
    grid: Any = None,
    faults: FaultModel | None = None,
    start: ArrayRecord | None = None,
) -> tuple[dict[str, Any], list[RoundEnd]]:
    """Run and return the final state dict as arrays, and what callbacks were told."""
    ends: list[RoundEnd] = []
    strategy.on_round_end = [*strategy.on_round_end, ends.append]
    with flower_identity(1):
        result = strategy.start(
            grid or federation.grid(faults), initial() if start is None else start, num_rounds=num_rounds
        )
    return {key: array.numpy() for key, array in result.arrays.items()}, ends


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether two state dicts are equal bit for bit."""
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)
