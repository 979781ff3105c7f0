"""The trial runs of ``hedgerow check``: a strategy's first rounds with an app's nodes, and their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hedgerow.sim.runs.hooks import Verdict

if TYPE_CHECKING:
    import numpy as np
    from flwr.app import ArrayRecord, Message
    from numpy.typing import NDArray

    from hedgerow.sim.engine.grid import InProcessGrid
    from hedgerow.sim.runs.app import LoadedApp
    from hedgerow.sim.runs.first_train import FirstTrain
    from hedgerow.sim.runs.plan import Plan

NODES = 2
_WIDTH = 160

Models = dict[int, list["NDArray[np.generic]"]]


@dataclass
class CheckedRounds:
    """The result of a strategy's rounds: the nodes' replies, and the strategy's error."""

    strategy: Any
    replies: list[Message] = field(default_factory=list)
    error: Exception | None = None

    def of(self, kind: str) -> list[Message]:
        """Return the replies to messages of a type."""
        return [reply for reply in self.replies if reply.metadata.message_type == kind]

    @property
    def rejected(self) -> dict[str, int]:
        """The number of replies that the strategy rejected, by reason."""
        report = getattr(self.strategy, "report", None)
        return dict(report.rejected) if report is not None else {}

    @property
    def served(self) -> bool:
        """Whether the rounds completed without a rejected reply."""
        return self.error is None and not self.rejected

    @property
    def reason(self) -> str:
        """The cause of a failure: a node's error, else the rejections, else the strategy's error."""
        if errors := errors_in(self.replies):
            return f"nodes raise {errors[-1]}"
        if self.rejected:
            return f"replies are refused: {', '.join(self.rejected)}"
        return one_line(str(self.error))

    @cached_property
    def models(self) -> Models:
        """Each node's reply to ``train``, by node id."""
        return {
            reply.metadata.src_node_id: [
                array.numpy() for record in reply.content.array_records.values() for array in record.values()
            ]
            for reply in self.of("train")
            if reply.has_content()
        }

    def verdict(self, name: str, mend: str) -> Verdict:
        """Return the verdict for the strategy of this name, with ``mend`` if it does not work."""
        return Verdict(name, "yes") if self.served else Verdict(name, "no", self.reason, mend)


def errors_in(replies: Iterable[Message], *, all_of_them: bool = False) -> list[str]:
    """Return the texts of error replies; with ``all_of_them``, none unless all replies are errors."""
    replies = list(replies)
    found = [one_line(reply.error.reason) for reply in replies if reply.has_error()]
    return [] if all_of_them and len(found) < len(replies) else found


def one_line(text: str | None) -> str:
    """Return a text on one line, shortened if it is long."""
    from hedgerow.wire.printable import shown

    return shown(" ".join((text or "").split()), _WIDTH)


class CheckedNodes:
    """The nodes of the checked app, new for each trial, and the model that they expect.

    Attributes
    ----------
    app : LoadedApp
        The app.
    plan : Plan
        Its run; ``plan.num_nodes`` is the number of nodes that it needs.
    own : Strategy
        The app's own strategy when it sent its first train message.
    arrays : ArrayRecord
        The model in this message, which may be missing.
    some_arrays : ArrayRecord
        The same, or the smallest model if it is missing.
    options : dict
        The arguments with which a strategy of this suite sends what these nodes read.
    least : int
        The smallest number of nodes of a trial.
    """

    least = NODES

    def __init__(self, app: LoadedApp, plan: Plan, node_config: Any, first: FirstTrain) -> None:
        from hedgerow.strategies import Compressed
        from hedgerow.strategies.strategy import FederatedStrategy

        self.app, self.plan, self.node_config = app, plan, node_config
        self.own = first.started.get("self")
        self.arrays = first.arrays
        # Another project's strategy may add config entries that its nodes need; ours adds only its own.
        ours = isinstance(self.own, FederatedStrategy | Compressed)
        config = (first.started.get("train_config") or {}) if ours else first.config
        self.config = {key: value for key, value in config.items() if key != "server-round"}
        content = first.message.content
        self.options: dict[str, Any] = {
            "arrayrecord_key": next(iter(content.array_records), "arrays") if not ours else "arrays",
            "configrecord_key": next(iter(content.config_records), "config") if not ours else "config",
            "weighted_by_key": getattr(self.own, "weighted_by_key", "num-examples"),
            "min_available_nodes": NODES,
        }
        # If the app sends no model, use the smallest.
        self.some_arrays: ArrayRecord = self.arrays or self.zeros("0")

    @staticmethod
    def zeros(*keys: str) -> ArrayRecord:
        """Return arrays of one zero each."""
        import numpy as np
        from flwr.app import Array, ArrayRecord

        return ArrayRecord({key: Array(np.zeros(1, np.float32)) for key in keys})

    @contextlib.contextmanager
    def grid(self) -> Iterator[tuple[InProcessGrid, list[Message]]]:
        """Yield a grid of new nodes, and the list of their replies except introductions."""
        from hedgerow.global_draws import GlobalDraws, seed_global_draws
        from hedgerow.sim.engine.grid import InProcessGrid
        from hedgerow.wire.message_types import WHOAMI

        replies: list[Message] = []
        asked_who: set[str] = set()

        class Heard(InProcessGrid):
            def push_messages(self, messages: Iterable[Message]) -> list[str]:
                messages = list(messages)
                ids = super().push_messages(messages)
                for message, message_id in zip(messages, ids, strict=True):
                    if message.metadata.message_type == WHOAMI or "whoami" in message.content.config_records:
                        asked_who.add(message_id)
                return ids

            def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
                pulled = super().pull_messages(message_ids)
                replies.extend(r for r in pulled if r.metadata.reply_to_message_id not in asked_who)
                return pulled

        configs = [dict(self.node_config) for _ in range(self.plan.num_nodes)]
        with GlobalDraws.restored():
            seed_global_draws(0, later=True)  # Apps that use them draw the same in every trial.
            with Heard(
                self.app.client_app,
                self.plan.num_nodes,
                run_config=self.plan.run_config,
                node_configs=configs,
            ) as grid:
                yield grid, replies

    def run(self, strategy: Any, arrays: ArrayRecord | None = None, rounds: int = 1) -> CheckedRounds:
        """Run a strategy's first rounds."""
        from flwr.app import ConfigRecord

        with self.grid() as (grid, replies):
            out = CheckedRounds(strategy, replies)
            try:
                strategy.start(
                    grid=grid,
                    initial_arrays=self.some_arrays if arrays is None else arrays,
                    num_rounds=rounds,
                    timeout=60.0,
                    train_config=ConfigRecord(dict(self.config)),
                )
            except Exception as error:
                out.error = error
        return out

    def honours(
        self, make: Callable[[Any], Any], low: Any, high: Any
    ) -> tuple[bool | None, CheckedRounds, CheckedRounds]:
        """Return whether training depends on an instruction, the argument of ``make``; None if unclear."""
        few, more = self.run(make(low)), self.run(make(high))
        start = [array.numpy() for array in self.some_arrays.values()]
        if all(_equal(model, start) for model in more.models.values()):
            return None, few, more
        if _same(few.models, more.models):
            return False, few, more
        return (True if _same(few.models, self.run(make(low)).models) else None), few, more


def _equal(one: list[NDArray[np.generic]], other: list[NDArray[np.generic]]) -> bool:
    import numpy as np

    return len(one) == len(other) and all(map(np.array_equal, one, other))


def _same(one: Models, other: Models) -> bool:
    return one.keys() == other.keys() and all(_equal(one[node], other[node]) for node in one)
