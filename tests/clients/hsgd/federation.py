"""The strategy's side of HSGD in a few lines, which drives nodes through their real handlers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from tests.clients import contexts
from torch import Tensor, nn

from hedgerow.clients import BatchClientApp, Party, hsgd_client
from hedgerow.sim import through_the_wire
from hedgerow.tasks import SplitModel
from hedgerow.wire import Call, to_record, view

Array = np.ndarray
Theta = dict[str, Array]
Choose = Callable[[int, int], Sequence[int]]


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
    """Groups, their nodes in one of two layouts, and what the strategy knows.

    ``strict`` serialises every message and every node's state, as a deployment does.
    """

    def __init__(
        self,
        model: SplitModel,
        groups: Sequence[tuple[Array, Array, Array]],
        start: Theta,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        eta: float | tuple[float, int] = 0.1,
        mu: float = 0.0,
        layout: str = "devices",
        pairs: bool = False,
        one_by_one: bool = False,
        exchange: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> None:
        self.parties = parties(model, groups, layout, loss)
        self.app: BatchClientApp = hsgd_client(lambda own: self.parties[int(own.node_config["partition-id"])])
        self.contexts = [context(i) for i in range(len(self.parties))]
        self.sizes = [len(group[2]) for group in groups]
        self.theta = start
        self.hosted, self.pairs, self.one_by_one = layout == "edges", pairs, one_by_one
        eta0, period = eta if isinstance(eta, tuple) else (eta, 0)
        self.schedule = {"eta0": eta0, "eta-period": period, "mu": mu}
        self.extra = dict(exchange or {})
        self.strict = strict
        self.log: list[tuple[str, int, RecordDict]] = []
        self.trace: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def ask(self, kind: str, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        handler = self.app.batch_handler(kind)
        assert handler is not None
        calls = [Call(self._passed(content), self.contexts[i], kind) for i, content in contents.items()]
        batches: Iterable[list[Call]] = [[call] for call in calls] if self.one_by_one else [calls]
        answers = [answer for batch in batches for answer in handler(batch)]
        out = {}
        for i, answer in zip(contents, answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            out[i] = self._passed(answer)
            self.contexts[i].state = self._passed(self.contexts[i].state)
            self.log.append((kind, i, out[i]))
        return out

    def _passed(self, content: RecordDict) -> RecordDict:
        return through_the_wire(content, "a message") if self.strict else content

    def node(self, m: int, n: int) -> int:
        """Return the node that hosts person n of group m."""
        M = len(self.sizes)
        return M + m if self.hosted else M + sum(self.sizes[:m]) + n

    def round(self, t0: int, P: int, Q: int, choose: Choose) -> Theta:
        """Run one global interval, section 2.3 of the specification's executable order."""
        M = len(self.sizes)
        device: list[dict[int, Array]] = [{} for _ in range(M)]
        average = [self.theta["device"]] * M
        A = [list(choose(m, t0)) for m in range(M)]
        uploads: list[dict[str, Array]] = [{} for _ in range(M)]
        for t in range(t0, t0 + P, Q):
            if not self.pairs:
                A = [list(choose(m, t)) for m in range(M)]
            last = t + Q == t0 + P
            ids = [[f"{m}-{n}" for n in A[m]] for m in range(M)]
            answers = self.ask("train.exchange", self._exchange(t, t == t0, A, ids, average, device))
            head = [got(answers[m])["head"] for m in range(M)]
            zeta1 = [got(answers[m])["zeta1"] for m in range(M)]
            zeta2 = [self._zeta2(answers, m, A[m]) for m in range(M)]
            contents = self._update(t, Q, last, A, ids, head, zeta1, zeta2)
            self.trace.append({"t": t, "zeta1": zeta1, "zeta2": zeta2, "head": head})
            answers = self.ask("train.update", contents)
            for m in range(M):
                (metrics,) = answers[m].metric_records.values()
                self.losses.append(float(metrics["loss"]))  # type: ignore[arg-type]
                if last:
                    uploads[m] = {key: _mean(block) for key, block in got(answers[m]).items()}
                if self.hosted:
                    average[m] = got(answers[self.node(m, 0)])["device"] if last else average[m]
                    continue
                device[m] = {n: got(answers[self.node(m, n)])["device"] for n in A[m]}
                average[m] = _mean(np.stack(list(device[m].values())))
            self.trace[-1] |= {"devices": list(device), "average": list(average)}
        K = sum(self.sizes)
        local = [{**uploads[m], "device": average[m]} for m in range(M)]
        self.trace[-1]["groups"] = local
        self.theta = {key: sum(self.sizes[m] / K * local[m][key] for m in range(M)) for key in self.theta}  # type: ignore[misc]
        return self.theta

    def run(self, P: int, Q: int, T: int, choose: Choose | None = None) -> Theta:
        everyone: Choose = lambda m, t: range(self.sizes[m])  # noqa: E731
        for t0 in range(0, T, P):
            self.round(t0, P, Q, choose or everyone)
        return self.theta

    def _exchange(
        self,
        t: int,
        starts: bool,
        A: list[list[int]],
        ids: list[list[str]],
        average: list[Array],
        device: list[dict[int, Array]],
    ) -> dict[int, RecordDict]:
        common = {"t": t, "grouping": "pairs" if self.pairs else "group", **self.extra}
        contents = {}
        for m in range(len(ids)):
            blocks = {key: self.theta[key] for key in ("head", "hospital")} if starts else {}
            contents[m] = sent(blocks, **common, ids=ids[m])
            if self.hosted:
                own = {"device": average[m]} if starts else {}
                contents[self.node(m, 0)] = sent(own, **common, ids=ids[m])
                continue
            for n in A[m]:
                theta_2 = device[m][n] if self.pairs and not starts else average[m]
                contents[self.node(m, n)] = sent({"device": theta_2}, t=t, **self.extra)
        return contents

    def _zeta2(self, answers: Mapping[int, RecordDict], m: int, A: list[int]) -> Any:
        if self.hosted:
            return got(answers[self.node(m, 0)])["zeta2"]
        rows = [got(answers[self.node(m, n)])["zeta2"] for n in A]
        return [row for part in rows for row in part] if self.extra.get("compress") else np.concatenate(rows)

    def _update(
        self,
        t: int,
        Q: int,
        last: bool,
        A: list[list[int]],
        ids: list[list[str]],
        head: list[Any],
        zeta1: list[Any],
        zeta2: list[Any],
    ) -> dict[int, RecordDict]:
        compress = bool(self.extra.get("compress"))

        def content(parts: Mapping[str, Any], **more: Any) -> RecordDict:
            config = {"t": t, "steps": Q, **self.schedule, **more}
            return sent({}, parts, **config) if compress else sent(parts, **config)

        contents = {}
        for m in range(len(ids)):
            contents[m] = content({"zeta2": zeta2[m]}, ids=ids[m], upload=last)
            if self.hosted:
                parts = {"head": head[m], "zeta1": zeta1[m]}
                contents[self.node(m, 0)] = content(parts, ids=ids[m], upload=last)
                continue
            for row, n in enumerate(A[m]):
                own_head = head[m][row] if self.pairs else head[m]
                contents[self.node(m, n)] = content({"head": own_head, "zeta1": zeta1[m][row : row + 1]})
        return contents


def _mean(block: Array) -> Array:
    if block.ndim == 1:
        return block
    total = np.zeros(block.shape[1:])
    for row in block:
        total += row
    return (total / len(block)).astype(block.dtype)


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
