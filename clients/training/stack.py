"""Local SGD of many nodes as one model with a leading node axis, in chunks that fit into memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from logging import INFO
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.common import log
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic
from hedgerow.clients.training.dense import DenseSteps
from hedgerow.clients.training.loop import train_loop, train_on_threads
from hedgerow.clients.training.proof import proves_itself
from hedgerow.clients.training.stacked_layers import StackedLayers, can_normalise, stacked_layers
from hedgerow.clients.training.work import LocalWork, Loss, StackRow, State, Trained, cross_entropy
from hedgerow.global_draws import GlobalDraws
from hedgerow.tasks.layout import ChannelsLast
from hedgerow.tasks.modes import evaluating

# Per thread, as measured: smaller stacks lose time between operations, larger ones exceed the caches.
_CACHE_BYTES = 48 * 2**20
# A CPU stack of fewer bytes finishes before a second thread starts.
_WORTH_THREADS = 8 * 2**20
# Usable share of free memory; the rest is for kernels' work space and fragmentation.
_USABLE = 0.8
# The sizes of models that were measured, by the shape of a sample.
_KNOWN: WeakKeyDictionary[nn.Module, dict[torch.Size, tuple[int, int]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Form:
    """What stacking a model depends on, but for the data: it follows from the model's structure."""

    unlike_alone: str | None  # why it cannot be stacked, see ``stackable``
    layers: StackedLayers | None  # its stacked form; None for ``vmap`` over the model
    takes_statistics: bool  # whether it has batch normalisation
    channels_last: bool
    parameters: int


# The form of each model, with the structure that it holds for.
_FORMS: WeakKeyDictionary[nn.Module, tuple[object, Form]] = WeakKeyDictionary()


def form_of(model: nn.Module, sample_dims: int) -> Form:
    """Return a model's form for samples of this many axes; it is derived once for each structure."""
    # A hook, a parameter or a layer more is an entry more, and ``extra_repr`` has a layer's own settings.
    structure = (
        sample_dims,
        *(
            (
                id(one),
                one.extra_repr(),
                len(own := vars(one)),
                *(len(v) for v in own.values() if isinstance(v, dict)),
            )
            for one in model.modules()
        ),
    )
    known = _FORMS.get(model)
    if known is None or known[0] != structure:
        modules = list(model.modules())
        known = (
            structure,
            Form(
                stackable(model),
                stacked_layers(model, sample_dims),
                any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in modules),
                any(isinstance(one, ChannelsLast) for one in modules),
                sum(p.numel() for p in model.parameters()),
            ),
        )
        _FORMS[model] = known
    return known[1]


def stackable(model: nn.Module) -> str | None:
    """Return why a model cannot be trained as a stack, or None if it can.

    A stacked model must draw no random numbers and write no buffers except those of batch normalisation.
    """
    normalised = set()
    for name, module in model.named_modules():
        if (reason := _unlike_alone(module)) is not None:
            return f"{name!r} {reason}"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            normalised |= {id(buffer) for buffer in module.buffers()}
    others = (name for name, buffer in model.named_buffers() if id(buffer) not in normalised)
    if (buffer := next(others, None)) is not None:
        return f"buffer {buffer!r} would be shared between the nodes of a stack"
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
        return "parameters shared between layers have two names in a state dict, and one value in a stack"
    return None


def _unlike_alone(module: nn.Module) -> str | None:
    """Return why a layer would compute something else in a stack than for a single node."""
    if isinstance(module, nn.SyncBatchNorm):
        return "takes statistics over several processes"
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not can_normalise(module):
        return "averages over all earlier batches (momentum None)"
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return "keeps statistics of samples"
    drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    if drops or (isinstance(module, nn.RNNBase) and module.dropout > 0):
        return "draws dropout from the global generator, in another order than a loop over nodes"
    return None


def train_stacks(
    model: nn.Module,
    works: Sequence[LocalWork],
    loss: Loss = cross_entropy,
    max_nodes: int | None = None,
    arithmetic: Arithmetic = FLOAT32,
) -> list[Trained]:
    """Train all nodes in stacks, as ``local_sgd`` describes.

    On CPUs, and for models with batch normalisation, a stack holds only nodes with equally long batches, so
    that no padding enters a node's sums. Other stacks on a GPU are padded, and sorted to pad little.
    """
    device = works[0].x.device
    on_cpu = device.type == "cpu"
    form = form_of(model, works[0].x.dim() - 1)
    longest = max((len(batch) for work in works for batch in work.batches), default=0)
    size = chunk_size(len(works), node_bytes(model, works[0].x[:1], longest), device, max_nodes)
    chunks = split(works, size, pad=not on_cpu and not form.takes_statistics)
    # Stacked layers compute products in float32 only.
    layers = None if arithmetic.rounds else form.layers

    stacked = partial(train_stack, loss=loss, layers=layers, arithmetic=arithmetic)
    # The first node of a chunk has all its batch shapes.
    proven = [proves_itself(model, stacked, works[chunk[0]], loss, arithmetic) for chunk in chunks]
    looped = [i for chunk, right in zip(chunks, proven, strict=True) if not right for i in chunk]
    chunks = [chunk for chunk, right in zip(chunks, proven, strict=True) if right]

    def train(own: nn.Module, chunk: list[int]) -> list[Trained]:
        try:
            return stacked(own, [works[i] for i in chunk])
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise RuntimeError(
                f"out of memory on {device} with {len(chunk)} nodes in one stack: set the run config's "
                f"stack-nodes below {len(chunk)}, a smaller batch-size, or device = 'cpu'"
            ) from error

    if on_cpu:
        threads = max(1, min(torch.get_num_threads(), len(chunks)))
        outcomes = train_on_threads(train, model, chunks, threads)
    else:
        outcomes = [train(model, chunk) for chunk in chunks]
    if looped:
        outcomes.append(train_loop(model, [works[i] for i in looped], loss, arithmetic=arithmetic))
    places = [i for chunk in chunks for i in chunk] + looped
    trained = dict(zip(places, (t for o in outcomes for t in o), strict=True))
    return [trained[i] for i in range(len(works))]


def split(works: Sequence[LocalWork], size: int, *, pad: bool) -> list[list[int]]:
    """Return positions in chunks of at most ``size``, by falling number of steps within each.

    Without ``pad``, the nodes of a chunk have equally long batches in every step that they share.
    """
    lengths = [tuple(len(batch) for batch in work.batches) for work in works]
    if pad:
        order = sorted(range(len(works)), key=lambda i: (-len(lengths[i]), -max(lengths[i], default=0)))
        return [order[i : i + size] for i in range(0, len(order), size)]
    chunks: list[list[int]] = []
    for i in sorted(range(len(works)), key=lambda i: lengths[i], reverse=True):
        longest = lengths[chunks[-1][0]] if chunks else ()
        if chunks and len(chunks[-1]) < size and lengths[i] == longest[: len(lengths[i])]:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return chunks


def train_stack(
    model: nn.Module,
    works: Sequence[LocalWork],
    loss: Loss = cross_entropy,
    layers: StackedLayers | None = None,
    arithmetic: Arithmetic = FLOAT32,
) -> list[Trained]:
    """Train one stack of nodes, ordered by falling number of steps so that active nodes are a prefix.

    - ``model``: The architecture; its forward pass is used if ``layers`` is None.
    - ``works``: The nodes, those with most steps first.
    - ``layers``: The model's stacked form; None for ``vmap`` over the model.
    - ``arithmetic``: The precision of ``vmap``; nothing is compiled.
    """
    steps = [len(work.batches) for work in works]
    device = works[0].x.device
    model.train()
    # Frozen values that are one object for all nodes are stored once.
    shared = {
        name
        for name, p in model.named_parameters()
        if not p.requires_grad and all(work.start[name] is works[0].start[name] for work in works)
    }
    stack = {
        name: works[0].start[name].to(value).expand(len(works), *value.shape)
        if name in shared
        else _stacked([work.start[name] for work in works], value)  # (nodes, *shape)
        for name, value in model.state_dict().items()
    }
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    lr = torch.tensor([work.lr for work in works], dtype=torch.float64, device=device)
    rates = [lr.to(stack[name].dtype).view(-1, *[1] * (stack[name].dim() - 1)) for name in trainable]
    corrections = [  # (nodes, *shape)
        torch.stack([work.correction[name].to(stack[name]) for work in works if work.correction])
        for name in (trainable if works[0].correction else [])
    ]
    batches = _Batches.of(works, next(model.parameters()).dtype)
    if any(batches.padded) and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise ValueError("batches of a step must have one length for statistics over a batch")
    dense = None
    of_classes = batches.x.is_cpu and batches.y.dim() == 1 and batches.y.dtype == torch.int64
    if layers is not None and loss is cross_entropy and len(trainable) == len(stack) and of_classes:
        dense = layers.dense
    prepared: dict[int, DenseSteps] = {}  # by batch length, for the nodes that are active
    active, losses = 0, []
    for step in range(max(steps, default=0)):
        if (now := sum(1 for n in steps if n > step)) != active:
            active = now
            values = {name: value[:active] for name, value in stack.items()}
            own_rates, own_corrections = ([one[:active] for one in ones] for ones in (rates, corrections))
            prepared.clear()
        if dense is not None and not batches.padded[step]:
            width = batches.widths[step]
            if width not in prepared:
                prepared[width] = DenseSteps(dense, values, batches.x, batches.y, width)
            with torch.no_grad():
                each, found = prepared[width].step(batches.rows(step, active))  # (active, batch)
            gradients = [found[name] for name in trainable]
            mean = batches.mean(each, step)  # (active,)
        else:
            rows, shape = batches.rows(step, active), (active, batches.widths[step])
            # Ten times faster than ``batches.x[rows]`` for small samples.
            x, y = (
                source.index_select(0, rows).view(*shape, *source.shape[1:])
                for source in (batches.x, batches.y)
            )
            values |= {name: values[name].detach().requires_grad_() for name in trainable}
            mean = batches.mean(_forward(model, layers, loss, values, x, y, arithmetic), step)
            leaves = [values[name] for name in trainable]
            gradients = list(
                torch.autograd.grad(mean.sum(), leaves, materialize_grads=True) if leaves else ()
            )
        mean = mean.detach()
        losses.append(mean if active == len(works) else nn.functional.pad(mean, (0, len(works) - active)))
        if not trainable:
            continue
        with torch.no_grad():
            if corrections:
                gradients = list(torch._foreach_add(gradients, own_corrections))
            torch._foreach_addcmul_([values[name] for name in trainable], gradients, own_rates, value=-1)

    total = torch.stack(losses).sum(0).tolist() if losses else [0.0] * len(works)
    return [
        Trained(StackRow(stack, row, shared), {"train-loss": total[row] / max(steps[row], 1)})
        for row in range(len(works))
    ]


def _stacked(values: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return a new tensor of the nodes' values, with the dtype and device of ``like``."""
    if any(value is not values[0] for value in values):
        return torch.stack(list(values)).to(like)
    return torch.empty(len(values), *like.shape, dtype=like.dtype, device=like.device).copy_(values[0])


def _forward(
    model: nn.Module,
    layers: StackedLayers | None,
    loss: Loss,
    parameters: State,
    x: Tensor,
    y: Tensor,
    arithmetic: Arithmetic,
) -> Tensor:
    """Return the loss of each sample, (nodes, batch)."""
    if layers is not None:
        outputs = layers(parameters, x)
        return loss(outputs.flatten(0, 1), y.flatten(0, 1)).view(x.shape[:2])

    def node(parameters: State, x: Tensor, y: Tensor) -> Tensor:
        with arithmetic.autocast(x.device):
            outputs = functional_call(model, parameters, (x,))
        return loss(arithmetic.exact(outputs), y)

    return vmap(node, randomness="error")(parameters, x, y)


@dataclass(frozen=True)
class _Batches:
    """All steps' samples as indices on the device; shorter batches are padded at weight 0."""

    x: Tensor
    y: Tensor
    index: Tensor  # (steps, nodes, longest batch)
    weight: Tensor | None  # (steps, nodes, longest batch); None if no batch is padded
    widths: list[int]
    padded: list[bool]

    @classmethod
    def of(cls, works: Sequence[LocalWork], dtype: torch.dtype) -> "_Batches":
        sources = {(id(work.x), id(work.y)): work for work in works}
        offsets = dict(zip(sources, np.cumsum([0, *(len(w.x) for w in sources.values())]), strict=False))
        lengths = np.zeros((len(works), max(len(work.batches) for work in works)), np.int64)
        for row, work in enumerate(works):
            lengths[row, : len(work.batches)] = [len(batch) for batch in work.batches]
        real = np.arange(lengths.max(initial=0)) < lengths[:, :, None]  # (nodes, steps, longest batch)
        index = np.zeros(real.shape, np.int64)
        if lengths.any():
            index[real] = np.concatenate([batch for work in works for batch in work.batches])
            index += np.array([offsets[id(work.x), id(work.y)] for work in works])[:, None, None]
        widths = lengths.max(0)
        padded = ((lengths > 0) & (lengths < widths)).any(0)
        device = works[0].x.device
        weight = real / np.maximum(lengths, 1)[:, :, None] if padded.any() else np.zeros(0)
        return cls(
            _joined([work.x for work in sources.values()]),
            _joined([work.y for work in sources.values()]),
            torch.as_tensor(index.swapaxes(0, 1)).to(device),
            torch.as_tensor(weight.swapaxes(0, 1)).to(device, dtype) if padded.any() else None,
            widths.tolist(),
            padded.tolist(),
        )

    def rows(self, step: int, active: int) -> Tensor:
        """Return a step's samples, one node after the other (active * batch,)."""
        return self.index[step, :active, : self.widths[step]].flatten()

    def mean(self, each: Tensor, step: int) -> Tensor:
        """Return each node's mean over its real samples, (active,), of losses (active, batch)."""
        if self.weight is None or not self.padded[step]:
            return each.mean(1)
        return (each * self.weight[step, : each.shape[0], : each.shape[1]]).sum(1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# Memory.


def node_bytes(model: nn.Module, sample: Tensor, batch_size: int) -> int:
    """Estimate the bytes that one node of a stack needs for training, by one forward pass of the model.

    It counts parameters four times (start, value, gradient, temporary), each layer's output three times
    (value, gradient, temporary), and the patches of a convolution twice (columns and their gradient).

    - ``sample``: One sample, (1, ...), on the model's device.
    - ``batch_size``: The longest batch, >= 0.
    """
    known = _KNOWN.setdefault(model, {})
    if sample.shape not in known:
        known[sample.shape] = _bytes_of(model, sample)
    parameters, outputs = known[sample.shape]
    return 4 * parameters + batch_size * outputs


def _bytes_of(model: nn.Module, sample: Tensor) -> tuple[int, int]:
    """Return the bytes of the parameters, and of the layers' outputs for one sample, as counted above."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    outputs: list[int] = [sample.numel() * sample.element_size()]
    two = torch.cat([sample, sample])  # A single sample has no batch statistics.

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        size = 3 * output.numel() // len(two)
        if isinstance(module, nn.Conv2d):
            size += 2 * output[0, 0].numel() * module.weight[0].numel()
        outputs.append(size * output.element_size())

    hooks = [m.register_forward_hook(count) for m in model.modules() if not any(True for _ in m.children())]
    try:
        with torch.no_grad(), evaluating(model), GlobalDraws.restored():
            model(two)
    finally:
        for hook in hooks:
            hook.remove()
    return parameters, sum(outputs)


def chunk_size(nodes: int, bytes_a_node: int, device: torch.device, max_nodes: int | None = None) -> int:
    """Return the largest number of nodes for one stack, at least 1.

    On CUDA it is what free memory holds. On a CPU it is what stays in a core's caches, in equal chunks whose
    number is a multiple of the threads, so that no thread idles at the end; small work stays on one thread.

    - ``nodes``: All nodes to train, >= 1.
    - ``max_nodes``: Overrides the estimate, except that a CPU's threads still share the nodes.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads() if nodes * bytes_a_node > _WORTH_THREADS else 1
        most = max(1, max_nodes or _CACHE_BYTES // bytes_a_node)
        turns = -(-nodes // (threads * most))
        return -(-nodes // (threads * turns))
    if max_nodes is not None:
        return min(nodes, max_nodes)
    free = _free_bytes(device)
    size = max(1, min(nodes, int(_USABLE * free) // bytes_a_node))
    _announce(nodes, size, bytes_a_node, str(device))
    return size


def _free_bytes(device: torch.device) -> int:
    free: int = torch.cuda.mem_get_info(device)[0]
    # Memory that torch has cached counts as free.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@lru_cache(maxsize=64)
def _announce(nodes: int, size: int, bytes_a_node: int, device: str) -> None:
    said = "Local training on %s: %d nodes, at most %d in one stack (%.1f MiB each)"
    log(INFO, said, device, nodes, size, bytes_a_node / 2**20)
