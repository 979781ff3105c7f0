"""A federation of deep linear classifiers on the suite's own nodes: what they were asked, and what they tell.

The logits are W_last W_b W_a W_first x + bias; W_a and W_b are the layers between the first and the last,
which are compressed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import Tensor, nn

from hedgerow.clients import LocalTask, cross_entropy, fedmud_client
from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import RoundEnd
from hedgerow.strategies.fedmud import CompressedLayers
from hedgerow.wire import LayerShape, to_record

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


class Counted(nn.Module):
    """Counts its batches, as normalisation does."""

    num_batches_tracked: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked += 1
        return x


def network() -> nn.Module:
    model = nn.Sequential()
    for layer in LAYERS:
        outputs, inputs = layer.shape
        model.add_module(layer.key.partition(".")[0], nn.Linear(inputs, outputs, bias=outputs == 2))
    model.add_module("norm", Counted())
    return model


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

    def client_app(self) -> Callable[[Message, Context], Message]:
        nodes, model = fedmud_client(lambda context: self._task(context, model), "loop"), network()

        def app(message: Message, context: Context) -> Message:
            client, kind = int(context.node_config["partition-id"]), message.metadata.message_type
            if kind not in ("train", "query.merge"):
                return nodes(message, context)
            server_round = int(message.content["config"]["server-round"])  # type: ignore[arg-type]
            self.seen.append((server_round, client, kind, message.content))
            reply = nodes(message, context).content
            if self.sabotage is not None:
                reply = self.sabotage(client, server_round, reply)
            return Message(reply, reply_to=message)

        return app

    def _task(self, context: Context, model: nn.Module) -> LocalTask:
        x, y = self.data(int(context.node_config["partition-id"]))
        return LocalTask(model, x, y, np.arange(len(y)))

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a node's inputs (n, 4) and labels (n,); its last label is its own."""
        rng = np.random.default_rng([11, client])
        x = rng.standard_normal((self.examples(client), 4)).astype(np.float32)
        return 3 * torch.from_numpy(x), torch.from_numpy(rng.integers(0, 2, self.examples(client)))

    def loss(self, state: Mapping[str, Any], client: int) -> float:
        """Return a model's mean loss at a node."""
        x, y = self.data(client)
        for layer in LAYERS:
            x = x @ torch.as_tensor(state[layer.key]).T
        return float(cross_entropy(x + torch.as_tensor(state["last.bias"]), y).mean())

    def grid(self, faults: Any = None, strict: bool = False) -> InProcessGrid:
        return InProcessGrid(self.client_app(), self.num_clients, faults=faults, strict=strict)


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
