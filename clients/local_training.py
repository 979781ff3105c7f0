"""How the nodes of one call train: by which loss, in a loop, a stack, or a loop of the user's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from flwr.app import Context
from torch import nn

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic, Precision
from hedgerow.clients.training.own import OwnTraining, TrainingLoop
from hedgerow.clients.training.sgd import LocalWork, Loss, Trained, TrainingMode, cross_entropy, local_sgd

__all__ = ["LocalTraining", "Training", "training_of"]


@dataclass(frozen=True)
class LocalTraining:
    """What ``local_sgd`` takes beside a model and the nodes' work."""

    # {"auto", "loop", "stack"}: Node by node, many nodes at once, or what suits device, architecture and
    # number of nodes.
    mode: TrainingMode = "auto"
    loss: Loss = cross_entropy  # Loss of each sample.
    # The most nodes that train at once, >= 1; None for what memory and caches hold.
    max_nodes: int | None = None
    # In which precision forward passes are made, and whether they are compiled.
    arithmetic: Arithmetic = FLOAT32

    @classmethod
    def of(cls, context: Context, mode: TrainingMode | None, loss: Loss = cross_entropy) -> "LocalTraining":
        """Return what a run asks for: its config has ``training-mode`` and ``stack-nodes``, 0 for None.

        A mode that is given goes before the run config's, which is ``auto`` where it has none. ``precision``
        and ``compile`` are float32 and false where it has none; batches of ``batch-size`` are compiled.
        """
        run_config = context.run_config
        mode = mode or cast(TrainingMode, run_config.get("training-mode", "auto"))
        precision = cast(Precision, run_config.get("precision", "float32"))
        compiled = int(run_config["batch-size"]) if run_config.get("compile", False) else 0
        arithmetic = Arithmetic(precision, compiled)
        return cls(mode, loss, int(run_config.get("stack-nodes", 0)) or None, arithmetic)

    def sgd(self, model: nn.Module, works: Sequence[LocalWork]) -> list[Trained]:
        """Train every node's model on its own batches."""
        return local_sgd(
            model, works, self.loss, self.mode, max_nodes=self.max_nodes, arithmetic=self.arithmetic
        )


Training = LocalTraining | OwnTraining


def training_of(
    context: Context,
    mode: TrainingMode | None,
    loss: Loss = cross_entropy,
    train: TrainingLoop | None = None,
) -> Training:
    """Return how a run's nodes train: as ``LocalTraining.of`` says, or by a loop of the user's own.

    Raises
    ------
    ValueError
        If there is a loop, and the run asks for what the built-in one does: a stack, bf16, compilation.
    """
    built_in = LocalTraining.of(context, mode, loss)
    if train is None:
        return built_in
    if built_in.mode not in ("auto", "loop"):
        raise ValueError(
            "training mode must be 'auto' or 'loop', node by node, with a loop of one's own, got "
            f"{built_in.mode!r}"
        )
    if built_in.arithmetic != FLOAT32:
        raise ValueError(
            "precision must be 'float32' and compile false with a loop of one's own, got "
            f"{built_in.arithmetic}"
        )
    return OwnTraining(train)
