"""How the nodes of one call train: the loss, and a loop, a stack or the user's own loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from flwr.app import Context
from torch import nn

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic, Precision
from hedgerow.clients.training.own import OwnTraining, TrainingLoop
from hedgerow.clients.training.sgd import TrainingMode, local_sgd
from hedgerow.clients.training.work import LocalWork, Loss, Trained, cross_entropy


@dataclass(frozen=True)
class LocalTraining:
    """Settings of ``local_sgd``."""

    # "loop": node by node; "stack": many nodes at once; "auto": by device, architecture and number of nodes.
    mode: TrainingMode = "auto"
    loss: Loss = cross_entropy  # loss of each sample
    max_nodes: int | None = None  # most nodes in a stack, >= 1; None for what memory and caches hold
    arithmetic: Arithmetic = FLOAT32  # precision and compilation of forward passes

    @classmethod
    def of(cls, context: Context, mode: TrainingMode | None, loss: Loss = cross_entropy) -> "LocalTraining":
        """Read ``training-mode``, ``stack-nodes`` (0 for None), ``precision`` and ``compile`` of a run.

        A given mode takes precedence. Missing keys have the defaults ``auto``, 0, ``float32`` and false.
        """
        run_config = context.run_config
        mode = mode or cast(TrainingMode, run_config.get("training-mode", "auto"))
        precision = cast(Precision, run_config.get("precision", "float32"))
        compiled = int(run_config["batch-size"]) if run_config.get("compile", False) else 0
        return _made(mode, loss, int(run_config.get("stack-nodes", 0)) or None, precision, compiled)

    def sgd(self, model: nn.Module, works: Sequence[LocalWork]) -> list[Trained]:
        """Train every node's model on its own batches."""
        return local_sgd(
            model, works, self.loss, self.mode, max_nodes=self.max_nodes, arithmetic=self.arithmetic
        )


@lru_cache(maxsize=64)
def _made(
    mode: TrainingMode, loss: Loss, max_nodes: int | None, precision: Precision, compiled: int
) -> LocalTraining:
    return LocalTraining(mode, loss, max_nodes, Arithmetic(precision, compiled))


Training = LocalTraining | OwnTraining


def training_of(
    context: Context,
    mode: TrainingMode | None,
    loss: Loss = cross_entropy,
    train: TrainingLoop | None = None,
) -> Training:
    """Return how a run's nodes train: by ``LocalTraining.of`` or, if given, by the user's own loop.

    ValueError if there is an own loop and the run asks for a stack, bf16 or compilation.
    """
    built_in = LocalTraining.of(context, mode, loss)
    if train is None:
        return built_in
    if built_in.mode not in ("auto", "loop"):
        raise ValueError(
            f"training mode must be 'auto' or 'loop' with your own training loop, got {built_in.mode!r}"
        )
    if built_in.arithmetic != FLOAT32:
        raise ValueError(
            "precision must be 'float32' and compile false with your own training loop, got "
            f"{built_in.arithmetic}"
        )
    return OwnTraining(train)
