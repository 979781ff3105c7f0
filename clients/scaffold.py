"""The node of SCAFFOLD: K steps y <- y - eta_l (g_i(y) - c_i + c), and a new c_i.

Paper: S. P. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML
2020), Algorithm 1, the clients' lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hedgerow.clients.app import BatchClientApp
from hedgerow.clients.evaluation import task_handlers
from hedgerow.clients.handlers import Answer, outcome, together
from hedgerow.clients.instructions import choice, local_steps, only_config, step_size, whole
from hedgerow.clients.local_task import LocalTask, LocalTaskFn, local_task
from hedgerow.clients.mods.learning import TrainHandler
from hedgerow.clients.mods.update import Mod, TrainingMod, TrainResult
from hedgerow.clients.node_state import NodeState
from hedgerow.clients.probes import local_gradient
from hedgerow.clients.sent_models import at_home_of, sent_state
from hedgerow.clients.training.batches import step_batches
from hedgerow.clients.training.sgd import training_of
from hedgerow.clients.training.work import Asked, LocalWork, Trained
from hedgerow.wire.blocks import block_of, in_block
from hedgerow.wire.calls import Call


def scaffold_client(task: LocalTaskFn = local_task, mods: Sequence[TrainingMod | Mod] = ()) -> BatchClientApp:
    """Return the ClientApp of SCAFFOLD; parameters as in ``similarity_free_client``."""

    def learn(calls: Sequence[Call]) -> Sequence[TrainResult | Answer]:
        how = training_of(calls[0].context, None)

        def work(_: Sequence[Call], rounds: Mapping[int, _Round]) -> dict[int, TrainResult | Exception]:
            trained = how.sgd(next(iter(rounds.values())).task.model, [one.work for one in rounds.values()])
            return {
                at: outcome(one.learnt, found)
                for (at, one), found in zip(rounds.items(), trained, strict=True)
            }

        return together(lambda call: _Round.of(call, task(call.context)), work)(calls)

    home = TrainHandler(learn, home_of=lambda call: at_home_of(call, task(call.context)))
    return BatchClientApp({"train": home, **task_handlers(task)}, mods)


@dataclass(frozen=True)
class _Round:
    """A node's work in a round, c, and its own c_i."""

    task: LocalTask
    work: LocalWork
    c: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    kept: NodeState
    option: str

    @classmethod
    def of(cls, call: Call, task: LocalTask) -> "_Round":
        """Read the instruction; ValueError if it is not valid."""
        config, sent = only_config(call), sent_state(call, task, ["control"])
        c = block_of("control", sent)
        start = {key: value for key, value in sent.items() if key not in in_block("control", c)}
        kept = NodeState.of(call, "control")
        own = kept.like(c)
        size, seed, number = whole(config, "batch-size", 1), whole(config, "seed", 0), call.partition_id
        steps = local_steps(config, "local-steps", min(size, len(task.part)))
        now = whole(config, "server-round", 1)
        (batches,) = step_batches(
            [task.part], seed=seed, partition_ids=[number], done=(now - 1) * steps, steps=[steps],
            batch_size=size,
        )  # fmt: skip
        asked = Asked(task.part, size, seed, now, number)
        correction = {key: c[key] - own[key] for key in c}
        lr = step_size(config, "learning-rate")
        work = LocalWork(start, task.x, task.y, batches, lr, asked, correction)
        return cls(task, work, c, own, kept, choice(config, "option", ("I", "II")))

    def learnt(self, outcome: Trained) -> TrainResult:
        """Return y_i and c + c_i^+ - c_i; keep c_i^+."""
        if isinstance(outcome, ValueError):
            raise outcome
        x, y, scale = self.work.start, outcome.state, len(self.work.batches) * self.work.lr
        if self.option == "I":
            self.task.model.load_state_dict(x)
            gradient = local_gradient(self.task.model, self.task.x, self.task.y, self.task.part)
            after = {key: gradient[key] for key in self.c}
        else:
            after = {key: self.own[key] - c + (x[key] - y[key]) / scale for key, c in self.c.items()}
        self.kept.keep(after)
        moved = {key: c + after[key] - self.own[key] for key, c in self.c.items()}
        metrics = {"num-examples": len(self.task.part), **outcome.metrics}
        return TrainResult({**y, **in_block("control", moved)}, metrics, {**x, **in_block("control", self.c)})
