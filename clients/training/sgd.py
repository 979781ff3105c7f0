"""Local SGD of one node or many: ``w <- w - lr g(batch; w)``, without momentum or decay.

Two forms do the same ragged work (each node its own number of steps, each step its own batch) and agree to
float tolerance. The *loop* trains every node by the model's own forward pass; it takes any model and is the
stack's oracle. The *stack* trains many nodes as one model with a leading node axis (``stack.py``).

On CPUs both distribute nodes over torch's threads and compute each node on one thread: small operations gain
nothing from several, and lose tenfold if another process uses a core. On a given processor a node's bits then
depend neither on the number of cores nor on the other nodes. There are two exceptions, equal to float
tolerance: a single node in the loop under ``auto``, which uses all threads, and models that only ``vmap`` can
stack. ``_prefers_stack`` is the rule of ``auto``; docs/bits.md is the contract.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic, Precision
from hedgerow.clients.training.loop import train_loop
from hedgerow.clients.training.optimisers import parse_local_optimiser
from hedgerow.clients.training.own import OwnTraining, TrainingLoop
from hedgerow.clients.training.stack import Form, form_of, train_stacks
from hedgerow.clients.training.stacked_layers import Reparametrised
from hedgerow.clients.training.work import (
    LARGEST_STEP,
    SMALL,
    LocalWork,
    Loss,
    Trained,
    cross_entropy,
)
from hedgerow.wire.checks import at_least

TrainingMode = Literal["auto", "loop", "stack"]


def local_sgd(
    model: nn.Module,
    works: Sequence[LocalWork],
    loss: Loss = cross_entropy,
    mode: TrainingMode = "auto",
    *,
    max_nodes: int | None = None,
    arithmetic: Arithmetic = FLOAT32,
) -> list[Trained]:
    """Train every node's model on its own batches.

    Parameters
    ----------
    model : nn.Module
        The architecture, on the training device. Its parameters serve as scratch space.
    works : Sequence[LocalWork]
        One entry per node.
    loss : Loss (default: cross_entropy)
        Loss of each sample; a step's loss is the mean over its batch.
    mode : {"auto", "loop", "stack"} (default: "auto")
        ``loop`` runs the model's own forward pass node by node, ``stack`` many nodes at once with a
        leading node axis. ``auto`` decides by device, architecture and number of nodes, never by timing, so
        that a run's bits do not depend on the load of the machine.
    max_nodes : int or None (default: None)
        Most nodes in one stack, >= 1; None for what caches (CPU) or free memory (CUDA) hold. On CPUs the
        split does not change the result. On CUDA kernels may depend on the number of nodes, and free memory
        on other users of the device: set it for a run that must be repeatable there.
    arithmetic : Arithmetic (default: float32)
        Precision and compilation of forward passes. ``auto`` takes the loop if they are compiled, or ``bf16``
        on a CPU.

    Raises
    ------
    ValueError
        If a work's start or correction does not fit the model, only some works have a correction, a step size
        is not > 0 and finite in float32, a batch is empty or indexes past the data, or ``stack`` is requested
        but the model cannot be stacked or must be compiled.
    RuntimeError
        If a stack exceeds the device's memory.
    """
    if mode not in ("auto", "loop", "stack"):
        raise ValueError(f"training mode must be 'auto', 'loop' or 'stack', got {mode!r}")
    if max_nodes is not None:
        at_least(1, max_nodes=max_nodes)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    starts: set[int] = set()  # nodes of one exchange start from the same object
    for position, work in enumerate(works):
        if not 0 < work.lr <= LARGEST_STEP:
            raise ValueError(
                f"works[{position}].lr must be a finite number > 0, also in float32, got {work.lr!r}"
            )
        if id(work.start) not in starts:
            _check_start(shapes, work, position)
            starts.add(id(work.start))
    _check_batches(works)
    if not works:
        return []
    if any(work.correction is not None for work in works):
        _check_corrections(model, works)
    form = form_of(model, works[0].x.dim() - 1)
    reason = form.unlike_alone or ("a stack is not compiled" if arithmetic.compiled else None)
    if mode == "stack" and reason is not None:
        raise ValueError(f"training mode must be 'loop' here, got 'stack': {reason}")
    if mode == "stack" or (
        mode == "auto" and reason is None and _prefers_stack(model, form, works, arithmetic)
    ):
        return train_stacks(model, works, loss, max_nodes, arithmetic)
    spread = mode == "auto" and form.parameters >= SMALL
    return train_loop(model, works, loss, spread=spread, arithmetic=arithmetic)


def _prefers_stack(model: nn.Module, form: Form, works: Sequence[LocalWork], arithmetic: Arithmetic) -> bool:
    """Decide by device, architecture and number of nodes, from measurements of ``benchmarks/training.py``.

    Milliseconds per node-step on two CPU cores (medians); *big* is one model on all nodes' batches, and
    ``lenet-colour`` is ``lenet`` on images of three channels:

    =============  =====  =====  =====  =====  =====  =====
    model          nodes  batch   loop  stack   vmap    big
    =============  =====  =====  =====  =====  =====  =====
    lenet              1     10   1.29   2.07   1.81   0.82
    lenet             10     10   0.79   0.63   0.67   0.29
    lenet             20     10   0.65   0.59   0.68   0.29
    lenet             50     10   0.66   0.61   0.70   0.35
    lenet            100     10   0.68   0.57   0.71   0.37
    lenet-colour       1     10   1.41   2.09   1.84   1.05
    lenet-colour      10     10   1.01   1.15   1.21   0.48
    lenet-colour      50     10   0.97   1.26   1.24   0.50
    cnn-431k           1     64   10.0   14.9   15.2   6.13
    cnn-431k          10     64   5.80   8.60   10.9   5.05
    logistic          50     10   0.12   0.03   0.03   0.01
    mlp               50     10   0.22   0.19   0.21   0.04
    groupnorm         50     10   0.58   0.35   0.35   0.19
    layernorm-mlp     50     10   0.21   0.09   0.08   0.02
    =============  =====  =====  =====  =====  =====  =====

    Limited to AVX2, the loop takes 0.77 for ``lenet`` with 10 nodes and 0.77 with 50, the stack 0.84 and
    0.66; for ``lenet-colour`` 1.0 and 1.3; for ``cnn-431k`` 8.1 and 9.6. So channels-last networks use the
    loop on CPUs, except small ones on images of one channel. A small model uses the same form, on one thread,
    for one node and for many, so that its bits do not depend on how an engine groups nodes into calls. One
    thread also avoids waiting for busy cores: with both cores in use, the loop of one node on two threads
    took up to 110 ms for ``lenet``. ``groupnorm`` and ``layernorm-mlp`` have no stacked layers; several nodes
    of them are stacked by vmap. Networks with batch normalisation are stacked only on GPUs: ``cnn4`` with 8
    nodes and batches of 32 took 24 ms in a loop and 36 ms as a stack on one core, its factored form 26 and 34
    ms. ``benchmarks/gpu.py`` measures GPUs, where this rule has not been tuned.
    """
    first = works[0]
    several = len(works) > 1
    small = form.parameters < SMALL
    on_cpu = first.x.device.type == "cpu"
    if on_cpu and (form.takes_statistics or arithmetic.rounds):
        return False
    if on_cpu and form.channels_last and not (small and first.x.shape[1] == 1):
        return False
    if not arithmetic.rounds and form.layers is not None:
        if isinstance(model, Reparametrised):
            return several and (small or not on_cpu)
        return several or (on_cpu and small)
    return several and (small or not on_cpu)


def _check_batches(works: Sequence[LocalWork]) -> None:
    """Raise ValueError if a batch is empty or indexes past its node's data."""
    batches = [batch for work in works for batch in work.batches]
    if not batches:
        return
    samples = min(len(work.x) for work in works)
    index = np.concatenate(batches)
    if all(len(batch) for batch in batches) and index.min() >= 0 and index.max() < samples:
        return
    for position, work in enumerate(works):
        for step, batch in enumerate(work.batches):
            if not len(batch) or batch.min() < 0 or batch.max() >= len(work.x):
                bounds = f"{batch.min()} to {batch.max()}" if len(batch) else "none"
                raise ValueError(
                    f"works[{position}].batches[{step}] must be indices 0 to {len(work.x) - 1}, got {bounds}"
                )


def _check_corrections(model: nn.Module, works: Sequence[LocalWork]) -> None:
    """Raise ValueError unless each work has a correction of the trained parameters."""
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    for position, work in enumerate(works):
        given = None if work.correction is None else {k: tuple(v.shape) for k, v in work.correction.items()}
        if given != trained:
            raise ValueError(
                f"works[{position}].correction must have {trained}, as of all works, got {given}"
            )


def _check_start(shapes: Mapping[str, torch.Size], work: LocalWork, position: int) -> None:
    if {key: value.shape for key, value in work.start.items()} == shapes:
        return
    wrong = [
        f"{key}: {tuple(work.start[key].shape) if key in work.start else 'missing'}"
        for key, shape in shapes.items()
        if key not in work.start or work.start[key].shape != shape
    ] + [f"{key}: not in the model" for key in work.start if key not in shapes]
    valid = {key: tuple(shape) for key, shape in shapes.items()}
    raise ValueError(f"works[{position}].start must have {valid}, got {', '.join(wrong)}")


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

    The run's ``local-optimiser`` (absent: empty) is such a loop too. ValueError if there are both, or there
    is a loop and the run asks for a stack, bf16 or compilation.
    """
    built_in = LocalTraining.of(context, mode, loss)
    if named := str(context.run_config.get("local-optimiser", "")):
        if train is not None:
            raise ValueError(f"local-optimiser must be empty with your own training loop, got {named!r}")
        optimiser = parse_local_optimiser(named)
        train = None if optimiser is None else optimiser.loop(loss)
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
