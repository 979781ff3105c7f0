"""Nodes of HSGD that are asked through their real handlers, and models of a few numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from tests.clients import contexts
from torch import Tensor, nn

from hedgerow.clients import BatchClientApp, Party, hsgd_client
from hedgerow.tasks import SplitModel
from hedgerow.wire import to_record, view

Array = np.ndarray
Theta = dict[str, Array]


def context(partition_id: int, **node_config: Any) -> Context:
    return contexts.context(partition_id, run_config={"seed": 3}, **node_config)


def sent(arrays: Mapping[str, Any], coded: Mapping[str, Any] | None = None, **config: Any) -> RecordDict:
    content = RecordDict({"config": ConfigRecord(config)})
    if arrays:
        content["arrays"] = to_record({key: np.asarray(value) for key, value in arrays.items()})
    if coded:
        content["payload"] = ConfigRecord(dict(coded))
    return content


def got(answer: RecordDict) -> dict[str, Any]:
    """Return a reply's arrays, or its payload as it is."""
    if "payload" in answer.config_records:
        return dict(answer.config_records["payload"])
    return {key: view(array) for key, array in answer.array_records["arrays"].items()}


def parties(
    model: SplitModel,
    groups: Sequence[tuple[Array, Array, Array]],
    layout: str,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> list[Party]:
    """Return hospitals, then edges or devices, of groups (x1, x2, y)."""
    x1, x2, y = ([torch.as_tensor(np.asarray(part)) for part in parts] for parts in zip(*groups, strict=True))
    ids = [[f"{m}-{n}" for n in range(len(y[m]))] for m in range(len(groups))]
    out = [Party("hospital", m, ids[m], x1[m], y[m], model, loss) for m in range(len(groups))]
    for m in range(len(groups)):
        if layout == "edges":
            out.append(Party("edge", m, ids[m], x2[m], y[m], model, loss))
        else:
            rows = [slice(n, n + 1) for n in range(len(ids[m]))]
            out += [Party("device", m, ids[m][row], x2[m][row], y[m][row], model, loss) for row in rows]
    return out


class Federation:
    """Nodes of some groups in one of two layouts."""

    def __init__(
        self,
        model: SplitModel,
        groups: Sequence[tuple[Array, Array, Array]],
        start: Theta,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        layout: str = "devices",
    ) -> None:
        self.parties = parties(model, groups, layout, loss)
        self.app: BatchClientApp = hsgd_client(lambda own: self.parties[int(own.node_config["partition-id"])])
        self.contexts = [context(i) for i in range(len(self.parties))]
        self.sizes = [len(group[2]) for group in groups]
        self.theta = start
        self.hosted = layout == "edges"

    def ask(self, kind: str, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        return {
            i: contexts.answered(self.app, kind, self.contexts[i], content) for i, content in contents.items()
        }

    def node(self, m: int, n: int) -> int:
        """Return the node that hosts person n of group m."""
        M = len(self.sizes)
        return M + m if self.hosted else M + sum(self.sizes[:m]) + n


class ScalarEncoder(nn.Module):
    """x -> w x, one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class ScalarHead(nn.Module):
    """(z1, z2) -> a z1 + b z2."""

    def __init__(self) -> None:
        super().__init__()
        self.ab = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        return self.ab[:1] * z1 + self.ab[1:] * z2


def scalar_model() -> SplitModel:
    return SplitModel(ScalarHead(), ScalarEncoder(), ScalarEncoder(), 1, 1)


def half_square(prediction: Tensor, y: Tensor) -> Tensor:
    return (prediction[:, 0] - y) ** 2 / 2


class TanhEncoder(nn.Module):
    """x -> tanh(x W), W flattened by rows as the oracle has it."""

    def __init__(self, features: int, encoding: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(features, encoding, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w)


class LogisticHead(nn.Module):
    """A linear head with a bias, as one vector (e1 + e2 + 1,)."""

    def __init__(self, encodings: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(encodings + 1, dtype=torch.float64))

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        return torch.cat([z1, z2], -1) @ self.w[:-1, None] + self.w[-1]


def tanh_model(d1: int, d2: int, e1: int, e2: int) -> SplitModel:
    return SplitModel(LogisticHead(e1 + e2), TanhEncoder(d1, e1), TanhEncoder(d2, e2), e1, e2)


def metrics_of(answer: RecordDict) -> MetricRecord:
    (metrics,) = answer.metric_records.values()
    return metrics
