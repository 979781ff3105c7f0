"""A router in a few lines, which drives nodes through their real handlers, and problems to give them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from tests.clients.contexts import context

from hedgerow.clients import BatchClientApp, LinearRegression, Problem
from hedgerow.sim import through_the_wire
from hedgerow.wire import Call, view

Array = npt.NDArray[np.float64]


def squares(seed: int, m: int, n: int, s: int, records: int = 30) -> list[LinearRegression]:
    """Return well-conditioned least squares of one sparse truth, one a node."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(n)
    truth[rng.choice(n, s, replace=False)] = rng.choice([-1.0, 1.0], s) * rng.uniform(0.5, 2, s)
    problems = []
    for _ in range(m):
        A = rng.standard_normal((records, n))
        problems.append(LinearRegression(A, A @ truth + 0.1 * rng.standard_normal(records)))
    return problems


class Federation:
    """Nodes, their contexts, and who communicates when; ``strict`` serialises every message and state."""

    def __init__(
        self,
        client: Callable[[Callable[[Context], Problem]], BatchClientApp],
        problems: Sequence[Problem],
        configs: Sequence[Mapping[str, Any]],
        *,
        strict: bool = False,
        **node_config: Any,
    ) -> None:
        self.app = client(lambda own: problems[int(own.node_config["partition-id"])])
        self.contexts = [context(i, **node_config) for i in range(len(problems))]
        self.strict = strict
        self.next: dict[int, int] = {}
        self.want: dict[int, list[int]] = {}
        self.kappa: dict[int, int] = {}
        self.metrics: list[tuple[int, int, dict[str, Any]]] = []
        self.payloads: list[tuple[int, int, bytes]] = []
        for i, config in enumerate(configs):
            told = self.ask("query.hello", {i: {"config": ConfigRecord({**config})}})[i].config_records[
                "hello"
            ]
            self.kappa[i], self.next[i], self.want[i] = told["kappa"], told["next"], told["want"]  # type: ignore[assignment]

    def ask(self, kind: str, contents: Mapping[int, Mapping[str, Any]]) -> dict[int, RecordDict]:
        handler = self.app.batch_handler(kind)
        assert handler is not None
        calls = [Call(self._sent(RecordDict({**c})), self.contexts[i], kind) for i, c in contents.items()]
        answers = {}
        for i, answer in zip(contents, handler(calls), strict=True):
            if isinstance(answer, Exception):
                raise answer
            answers[i] = self._sent(answer)
            self.contexts[i].state = self._sent(self.contexts[i].state)
        return answers

    def _sent(self, content: RecordDict) -> RecordDict:
        return through_the_wire(content, "a message") if self.strict else content

    def publish(self, k: int, senders: Sequence[int]) -> dict[int, bytes]:
        request = {"config": ConfigRecord({"iteration": k})}
        answers = self.ask("query.publish", dict.fromkeys(senders, request))
        return {j: answers[j].config_records["payload"]["bytes"] for j in answers}  # type: ignore[misc]

    def event(
        self,
        k: int,
        *,
        lost: Callable[[int, int, int], bool] = lambda k, j, i: False,
        extra: Callable[[int, int], Mapping[str, Any]] = lambda k, i: {},
    ) -> None:
        """Route iteration k: every publication before any update."""
        due = [i for i in sorted(self.next) if self.next[i] == k]
        wants = {i: extra(k, i).get("neighbours", self.want[i]) for i in due}
        box = self.publish(k, sorted({j for i in due for j in wants[i]}))
        contents = {}
        for i in due:
            bundle = {str(j): box[j] for j in sorted(wants[i]) if not lost(k, j, i)}
            self.payloads += [(k, i, payload) for payload in bundle.values()]
            config = ConfigRecord({"iteration": k, **extra(k, i)})
            contents[i] = {"config": config, "bundle": ConfigRecord(bundle)}
        for i, answer in self.ask("train.update", contents).items():
            told = answer.config_records["next"]
            self.next[i], self.want[i] = told["next"], told["want"]  # type: ignore[assignment]
            (metrics,) = answer.metric_records.values()
            self.metrics.append((k, i, dict(metrics)))
            assert isinstance(metrics, MetricRecord)

    def run_until(self, iterations: int, **how: Any) -> Array:
        """Route all events before ``iterations`` and return the models there, (m, n)."""
        while (k := min(self.next.values())) < iterations:
            self.event(k, **how)
        return self.models(iterations)

    def models(self, k: int) -> Array:
        request = {"config": ConfigRecord({"iteration": k})}
        answers = self.ask("query.monitor", dict.fromkeys(self.next, request))
        return np.stack([view(answers[i].array_records["arrays"]["w"]) for i in sorted(answers)])

    def arrays(self, i: int) -> dict[str, Array]:
        return {key: view(array) for key, array in self.contexts[i].state.array_records["ceps"].items()}

    def counts(self, i: int) -> dict[str, Any]:
        return dict(self.contexts[i].state.config_records["ceps-state"])
