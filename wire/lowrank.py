"""A model's compressed layers as factors: planning to a budget, drawing, reconstruction, merging.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3 and the set-up of Section 5: low-rank updates, block-wise Kronecker
decomposition (BKD), aggregation-aware decomposition (AAD, eq. (8)) and its freezing ablation (F). FedLMT and
FedPara factor the weight itself. FedLMT and FedHM split a convolution into two, which is a separate view. The
paper does not say what its ratio counts: the ``"model"`` budget counts every trainable scalar of the model
and searches like the authors' code, the ``"layer"`` budget applies the ratio to each layer. Our choices:
random factors come from one Philox stream per (run, reset, layer, role), on the CPU, because shared
randomness must not depend on a device; merges round identically on every machine, so that nodes that replay
them have the server's bits; BKD computes only the blocks that contain entries of the weight.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hedgerow.wire.checks import at_least, in_range, one_of, positive
from hedgerow.wire.layers import LayerShape, derive

BUDGETS = ("model", "layer")
LAYOUTS = ("flat", "tiled")
VIEWS = ("buffer", "convolutions")

# The authors' search: its step, and how far above the target it may end.
_STEP = 0.001
_TOLERANCE = 0.001
# A ratio at which every layer has rank 1 or one block.
_LEAST = 1e-18
# Entries of a weight that ``exact_product`` computes at a time, to stay in a core's cache.
_CACHED = 32_768

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Form:
    """A weight or its update as a sum of products (left, right); FedPara multiplies them entrywise.

    A tilde marks a frozen factor. ``random`` names the trainable factors that are not zero at a reset.
    """

    terms: tuple[tuple[str, str], ...]
    random: tuple[str, ...] = ()
    kronecker: bool = False
    has_base: bool = True
    hadamard: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Left and right factors, alternating."""
        return tuple(name for term in self.terms for name in term)


_PRODUCT = (("U", "V"),)
_FROZEN = (("U~", "V"),)
_DECOUPLED = (("U", "V~"), ("U~", "V"))
_LORA_FROZEN = (("U", "V~"),)
_HADAMARD = (("X1", "Y1"), ("X2", "Y2"))
_FORMS = {
    "mud": _Form(_PRODUCT, random=("U",)),
    "mud+f": _Form(_FROZEN),
    "mud+aad": _Form(_DECOUPLED),
    "mud+bkd": _Form(_PRODUCT, random=("U",), kronecker=True),
    "mud+bkd+f": _Form(_FROZEN, kronecker=True),
    "mud+bkd+aad": _Form(_DECOUPLED, kronecker=True),
    "lora": _Form(_PRODUCT, random=("V",)),
    "lora+f": _Form(_LORA_FROZEN),
    "lmt": _Form(_PRODUCT, random=("U", "V"), has_base=False),
    "para": _Form(_HADAMARD, random=("X1", "Y1", "X2", "Y2"), has_base=False, hadamard=True),
}
# Part of the key of every random stream: a frozen factor has the role of the factor that it replaces.
_ROLES = {"U": 0, "U~": 0, "V": 1, "V~": 1, "X1": 0, "Y1": 1, "X2": 2, "Y2": 3}

VARIANTS = (*_FORMS, "dense")


@dataclass(frozen=True)
class FactoredLayer(LayerShape):
    """A weight, or its update, as factors.

    Parameters
    ----------
    key, shape
        As in ``LayerShape``.
    variant : str
        One of ``VARIANTS``, not ``"dense"``.
    rank : int (default: 0)
        r, r_F or R of the matrix forms, >= 1; 0 for the Kronecker forms.
    blocks, side : int (default: 0)
        b and z of the Kronecker forms, >= 1; 0 for the matrix forms.
    grid : int (default: 0)
        Blocks per row of the tiled layout, >= 1; 0 for the flat layout and the matrix forms.
    view : str (default: "buffer")
        How a convolution's weight is read as an (m, n) matrix: ``"buffer"``, its row-major buffer, or
        ``"convolutions"``, row (o, y) and column (i, x) for the weight's (o, i, y, x), so that V is a
        convolution of one row and U one of one column; only for matrix forms.

    Attributes
    ----------
    trainable, frozen : dict[str, tuple of int]
        Names and shapes of the factors that are trained and sent, and of those that are drawn from a seed.
    reachable : int
        Blocks b_need that contain entries of the weight; 0 for the matrix forms. The last ``blocks -
        reachable`` blocks never have a gradient, but are sent unless the layer is tight.

    Notes
    -----
    Left factors (U, X) are stored as (m, rank), right ones (V, Y) as (rank, n), Kronecker factors as
    (blocks, side, side). A tilde marks the frozen ones.
    """

    variant: str
    rank: int = 0
    blocks: int = 0
    side: int = 0
    grid: int = 0
    # Not in the fingerprint if it has its default value.
    view: str = field(default="buffer", repr=False)

    trainable: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    frozen: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    reachable: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the factors' shapes and the number of reachable blocks."""
        super().__post_init__()
        kronecker = self.blocks, self.side, self.side
        stored = {
            name: kronecker if self.side else (self.m, self.rank) if name[0] in "UX" else (self.rank, self.n)
            for name in self._form.names
        }
        reachable = 0
        if self.side and not self.grid:
            reachable = math.ceil(self.size / self.side**4)
        elif self.side:
            whole, rest = divmod(self.size, self.grid * self.side**4)  # whole rows of blocks
            reachable = whole * self.grid + min(self.grid, math.ceil(rest / self.side**2))
        derive(
            self,
            trainable={name: shape for name, shape in stored.items() if not _is_frozen(name)},
            frozen={name: shape for name, shape in stored.items() if _is_frozen(name)},
            reachable=reachable,
        )

    @property
    def random(self) -> tuple[str, ...]:
        """Names of the trainable factors that are drawn at a reset; the others start at zero."""
        return self._form.random

    @property
    def has_base(self) -> bool:
        """Whether the factors are an update of a frozen base, and not the weight itself."""
        return self._form.has_base

    @property
    def count(self) -> int:
        """Trainable scalars."""
        return sum(math.prod(shape) for shape in self.trainable.values())

    def rank_bound(self, merges: int = 1) -> int:
        """Return the highest possible rank of a sum of ``merges`` updates, as m x n matrices.

        One update: r for MUD, F and FedLMT, 2 r for AAD, whose rank-r factors are next to frozen ones, R^2
        for FedPara, and no bound but min(m, n) for the Kronecker forms.
        """
        full = min(self.m, self.n)
        if self.side:
            return full
        one = self.rank**2 if self._form.hadamard else self.rank * len(self._form.terms)
        return min(full, merges * one)

    def delta(self, trainable: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> Tensor:
        """Return the update, or the weight if there is no base, in the weight's shape.

        Parameters
        ----------
        trainable, frozen : Mapping[str, Tensor]
            The factors by name. The trainable ones may share additional leading axes (one entry per node),
            which the result then has too; the frozen ones have none.
        """
        factors = {f"{self.key}:{name}": value for name, value in {**frozen, **trainable}.items()}
        return next(_reconstruct([self], factors, torch.matmul))

    @property
    def in_parts(self) -> bool:
        """Whether the update is a product of two matrices with fewer entries than the weight, a matrix."""
        inner = self.rank * len(self._form.terms)
        product = len(self.shape) == 2 and not self.side and not self._form.hadamard
        return product and inner * (self.m + self.n) < self.size

    def parts(self, trainable: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return U (..., m, q) and V (..., q, n) with the update U V, if it is ``in_parts``.

        Arguments are as in ``delta``. q is the rank, and twice the rank for AAD: [U, U~] and [V~; V].
        """
        factors = {**frozen, **trainable}
        lefts, rights = zip(
            *((factors[left], factors[right]) for left, right in self._form.terms), strict=True
        )
        return _joined(lefts, -1), _joined(rights, -2)

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Return the (m, n) matrix of a weight of the layer's shape."""
        if self._transposed:
            weight = weight.transpose(-3, -2)
        return weight.reshape(self.m, self.n)

    def as_weight(self, matrix: Tensor) -> Tensor:
        """Return the weight of a matrix (..., m, n)."""
        leading = matrix.shape[:-2]
        if not self._transposed:
            return matrix.reshape(*leading, *self.shape)
        o, i, height, width = self.shape
        return matrix.reshape(*leading, o, height, i, width).transpose(-3, -2).contiguous()

    @property
    def _transposed(self) -> bool:
        return self.view == "convolutions" and len(self.shape) == 4

    @property
    def _form(self) -> _Form:
        return _FORMS[self.variant]


def factored(layer: LayerShape, variant: str, rho: float, layout: str, view: str = "buffer") -> FactoredLayer:
    """Return the layer with the sizes for a ratio.

    - ``layer``: The weight, m x n as a matrix.
    - ``variant``: One of ``VARIANTS``, not ``"dense"``.
    - ``rho``: Factor scalars per entry of the weight, > 0. Sizes are rounded up to at least rank 1 or one
      block, so a small weight costs more.
    - ``layout``: ``"flat"`` or ``"tiled"``; without effect on the matrix forms.
    - ``view``: One of ``VIEWS``; ``"buffer"`` for the Kronecker forms.
    """
    form, m, n = _FORMS[variant], layer.m, layer.n
    halved = (
        2 if variant.endswith("+f") else 1
    )  # only one of two factors is sent, so it may be twice as large
    if form.kronecker:
        rho *= halved
        grid = max(1, math.ceil(rho * math.sqrt(m * n) / 2)) if layout == "tiled" else 0
        blocks = grid**2 or math.ceil(rho**2 * m * n / 4)  # from rho = 2 k / sqrt(m n), b = k^2
        side = 1  # the least integer z with b z^4 >= m n
        while blocks * side**4 < m * n:
            side += 1
        return FactoredLayer(layer.key, layer.shape, variant, blocks=blocks, side=side, grid=grid)
    if halved == 2:
        scalars_per_rank = m if form.terms == _LORA_FROZEN else n
    else:
        scalars_per_rank = (m + n) * len(form.terms) if form.hadamard else m + n
    rank = max(1, math.ceil(rho * m * n / scalars_per_rank))
    return FactoredLayer(layer.key, layer.shape, variant, rank=rank, view=view)


def uniform(
    shape: Sequence[int], a: float, *, run_seed: int, reset_index: int, layer: int, name: str
) -> Tensor:
    """Return a factor drawn from U(-a, a), float32, always on the CPU."""
    sequence = np.random.SeedSequence([run_seed, reset_index, layer, _ROLES[name]])
    drawn = np.random.Generator(np.random.Philox(sequence)).random(tuple(shape))
    return torch.from_numpy(((2 * drawn - 1) * a).astype(np.float32))


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right with the same bits on every machine, whatever its threads and vector units.

    The products of an entry are rounded and then added in the order of the inner axis; a matrix library may
    fuse and reorder them. Slower than ``torch.matmul`` by about the ratio of memory to arithmetic speed.
    """
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    out = left.new_empty((*batch, left.shape[-2], right.shape[-1]))
    rows_at_once = max(1, _CACHED * out.shape[-2] // max(1, out.numel()))
    for start in range(0, out.shape[-2], rows_at_once):
        rows = slice(start, start + rows_at_once)
        total = left[..., rows, :1] * right[..., :1, :]
        for k in range(1, left.shape[-1]):
            total += left[..., rows, k : k + 1] * right[..., k : k + 1, :]
        out[..., rows, :] = total
    return out


def _reconstruct(
    layers: Sequence[FactoredLayer], factors: Mapping[str, Tensor], product: Product
) -> Iterator[Tensor]:
    """Yield the update of each layer in order; the layers must be one of ``_groups``.

    They share one product: matrices of one shape are stacked, blocks of one side are concatenated.
    """
    updates = _kronecker_updates if layers[0].side else _matrix_updates
    return updates(layers, factors, product)


def _matrix_updates(
    layers: Sequence[FactoredLayer], factors: Mapping[str, Tensor], product: Product
) -> Iterator[Tensor]:
    form = _FORMS[layers[0].variant]
    terms = [
        (_stacked(layers, factors, left), _stacked(layers, factors, right)) for left, right in form.terms
    ]  # (…, layers, m, rank), (…, layers, rank, n)
    if form.hadamard:
        (x1, y1), (x2, y2) = terms
        updates = product(x1, y1) * product(x2, y2)
    else:
        updates = product(_joined([u for u, _ in terms], -1), _joined([v for _, v in terms], -2))
    for layer, update in zip(layers, updates.unbind(-3), strict=True):
        yield layer.as_weight(update)


def _kronecker_updates(
    layers: Sequence[FactoredLayer], factors: Mapping[str, Tensor], product: Product
) -> Iterator[Tensor]:
    terms = _FORMS[layers[0].variant].terms
    lefts = [_blocks(layers, factors, left).unsqueeze(-1) for left, _ in terms]
    rights = [_blocks(layers, factors, right).unsqueeze(-2) for _, right in terms]
    z = layers[0].side
    # Entry (i, d), (p, c) of the outer product of two factors is entry (i z + p, d z + c) of their Kronecker
    # product, so one matrix product over the terms gives all blocks of all layers.
    outer = product(_joined(lefts, -1), _joined(rights, -2))  # (…, blocks, z z, z z)
    blocks = outer.reshape(*outer.shape[:-2], z, z, z, z).transpose(-3, -2)  # (…, blocks, i, p, d, c)
    counts = [layer.reachable for layer in layers]
    for layer, own in zip(layers, blocks.split_with_sizes(counts, -5), strict=True):
        buffer = own.flatten(-5) if not layer.grid else _tiled(own, layer.grid)
        yield buffer[..., : layer.size].reshape(*buffer.shape[:-1], *layer.shape)


def _tiled(blocks: Tensor, grid: int) -> Tensor:
    """Return the row-major buffer of a grid of blocks (…, blocks, i, p, d, c), down to the last row."""
    missing = -blocks.shape[-5] % grid
    whole = functional.pad(blocks, (0, 0) * 4 + (0, missing))
    rows = whole.reshape(*blocks.shape[:-5], -1, grid, *blocks.shape[-4:])  # (…, g, h, i, p, d, c)
    return rows.movedim(-5, -3).flatten(-6)  # entry (g z^2 + i z + p, h z^2 + d z + c)


def _blocks(layers: Sequence[FactoredLayer], factors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the reachable blocks of one factor of all layers, each flattened: (…, blocks, z z)."""
    own = [factors[f"{layer.key}:{name}"][..., : layer.reachable, :, :].flatten(-2) for layer in layers]
    return own[0] if len(own) == 1 else torch.cat(own, -2)


def _stacked(layers: Sequence[FactoredLayer], factors: Mapping[str, Tensor], name: str) -> Tensor:
    return torch.stack([factors[f"{layer.key}:{name}"] for layer in layers], -3)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Return the parts concatenated along the inner axis of the product, which sums their terms."""
    if len(parts) == 1:
        return parts[0]
    leading = np.broadcast_shapes(*(part.shape[:-2] for part in parts))
    return torch.cat([part.expand(*leading, *part.shape[-2:]) for part in parts], axis)


def _is_frozen(name: str) -> bool:
    return name.endswith("~")


@dataclass(frozen=True)
class Factorisation:
    """The factors of a whole model. Made by ``plan``; equal plans are equal values.

    Parameters
    ----------
    variant : str
        - ``"mud"``: Delta = U V, U drawn at a reset (FedMUD).
        - ``"mud+f"``: Delta = U~ V, U~ frozen.
        - ``"mud+aad"``: Delta = U V~ + U~ V, eq. (8): a mean of factors is a mean of updates.
        - ``"mud+bkd"``, ``"mud+bkd+f"``, ``"mud+bkd+aad"``: the same with Kronecker products in blocks.
        - ``"lora"``: Delta = U V, V drawn at a reset (LoRA: U is its B, V its A).
        - ``"lora+f"``: Delta = U V~, V~ frozen (FFA-LoRA).
        - ``"lmt"``: W = U V, no base (FedLMT, FedHM).
        - ``"para"``: W = (X1 Y1) * (X2 Y2) entrywise, no base (FedPara).
        - ``"dense"``: no compression.
    layers : tuple of FactoredLayer
        The compressed layers, in module order: a layer's index is part of the key of its random streams.
    init_a : float
        Half width a of U(-a, a), from which random factors are drawn; finite, > 0.
    layout : str
        ``"flat"`` (blocks one after the other) or ``"tiled"`` (blocks in a square), for the Kronecker forms.
    tight : bool
        Whether blocks without entries of the weight are omitted.
    num_parameters : int
        Trainable scalars of the whole dense model.
    rho : float
        The resulting ratio of each layer, before rounding up; 1 without compression.

    Attributes
    ----------
    has_base : bool
        Whether the factors are updates of frozen bases, which are merged into them at resets.
    shapes, frozen_shapes : dict[str, tuple of int]
        The shapes of the trainable and of the frozen factors by ``"<layer key>:<name>"``, in the order of
        ``init``.
    """

    variant: str
    layers: tuple[FactoredLayer, ...]
    init_a: float
    layout: str
    tight: bool
    num_parameters: int
    rho: float
    has_base: bool = field(init=False, repr=False, compare=False)
    shapes: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    frozen_shapes: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the factors' shapes."""
        trainable, frozen = (
            {f"{one.key}:{name}": shape for one in self.layers for name, shape in getattr(one, which).items()}
            for which in ("trainable", "frozen")
        )
        base = all(layer.has_base for layer in self.layers) and self.variant != "dense"
        derive(self, has_base=base, shapes=trainable, frozen_shapes=frozen)

    @classmethod
    def plan(
        cls,
        layers: Sequence[LayerShape],
        *,
        variant: str,
        num_parameters: int,
        ratio: float = 1 / 32,
        budget: str = "model",
        skip_front: int = 1,
        skip_back: int = 1,
        init_a: float = 0.1,
        layout: str = "flat",
        tight: bool = False,
        view: str = "buffer",
    ) -> "Factorisation":
        """Return the factors closest to a target ratio; the result's ``ratio`` is the one achieved.

        Parameters
        ----------
        layers : sequence of LayerShape
            The layers that can be compressed: ``layers_of`` the model.
        variant, init_a, layout, tight
            As in the class.
        num_parameters : int
            Trainable scalars of the whole dense model.
        ratio : float (default: 1 / 32)
            Target in (0, 1].
        budget : str (default: "model")
            - ``"model"``: the target is that of the whole model, with everything that is trained. The layers'
              ratio decreases from the target in steps of 0.001 until the model's is at most 0.001 above it.
            - ``"layer"``: the target is that of each compressed layer. Sizes are rounded up, and a small
              layer of rank 1 or one block may be above the target.
        skip_front, skip_back : int (default: 1, 1)
            Layers at either end that stay dense, >= 0.
        view : str (default: "buffer")
            How a convolution's weight is read as a matrix; see ``FactoredLayer``.

        Raises
        ------
        ValueError
            If an argument is out of range, no layer is left to compress, or the ratio cannot be reached: with
            rank 1 or one block in every layer the model is above it or, for ``"layer"``, every layer.
        """
        one_of("variant", variant, VARIANTS)
        one_of("budget", budget, BUDGETS)
        one_of("layout", layout, LAYOUTS)
        in_range("ratio", ratio, 0.0, 1.0, open_below=True)
        positive(init_a=init_a)
        at_least(0, skip_front=skip_front, skip_back=skip_back)
        at_least(sum(layer.size for layer in layers), num_parameters=num_parameters)
        one_of("view", view, VIEWS)
        if view != "buffer" and "bkd" in variant:
            raise ValueError(f"view must be 'buffer' with {variant!r}, which has no matrices, got {view!r}")
        if variant == "dense":
            return cls(variant, (), init_a, layout, tight, num_parameters, rho=1.0)
        chosen = between(layers, skip_front, skip_back)

        def sized(rho: float) -> Factorisation:
            own = tuple(factored(layer, variant, rho, layout, view) for layer in chosen)
            return cls(variant, own, init_a, layout, False, num_parameters, rho)

        found, least = sized(ratio), sized(_LEAST)
        if budget == "model":
            # By repeated subtraction, as in the authors' code, because its rounding affects the sizes.
            while found.ratio - ratio > _TOLERANCE and found.rho - _STEP > 0:
                found = sized(found.rho - _STEP)
            if found.ratio - ratio > _TOLERANCE:
                found = min(found, least, key=lambda plan: plan.ratio)
            # Rounding may make a plan of several blocks smaller than that of one.
            if found.ratio > ratio + min(_TOLERANCE, ratio / 10) < least.ratio:
                check_reachable(ratio, least.ratio, "rank 1 or one block in every compressed layer")
        else:
            smallest = min(layer.count / layer.size for layer in (*found.layers, *least.layers))
            check_reachable(ratio, smallest, "rank 1 or one block in the layer where this is least")
        if not tight:
            return found
        # After the search, so that a tight plan has the sizes of the plan that is not.
        tightened = tuple(replace(layer, blocks=layer.reachable) for layer in found.layers)
        return replace(found, layers=tightened, tight=True)

    @property
    def count(self) -> int:
        """Factor scalars C that are sent."""
        return sum(layer.count for layer in self.layers)

    @property
    def dense_count(self) -> int:
        """Scalars D of the compressed layers' weights."""
        return sum(layer.size for layer in self.layers)

    @property
    def uncompressed(self) -> int:
        """Trainable scalars E_unc that are sent uncompressed."""
        return self.num_parameters - self.dense_count

    @property
    def ratio(self) -> float:
        """Scalars sent in one direction, per trainable scalar of the dense model."""
        return (self.count + self.uncompressed) / self.num_parameters

    @property
    def fingerprint(self) -> str:
        """A short hash of everything that determines the factors and their meaning."""
        views = {layer.view for layer in self.layers} - {"buffer"}
        return hashlib.sha256((repr(self) + "".join(views)).encode()).hexdigest()[:16]

    def init(self, run_seed: int, reset_index: int) -> dict[str, Tensor]:
        """Return the trainable factors right after a reset: with a base, their update is zero.

        Parameters
        ----------
        run_seed : int
            The run's seed, >= 0.
        reset_index : int
            The number of earlier resets, >= 0.

        Returns
        -------
        dict of str to Tensor
            New float32 tensors on the CPU, under ``"<layer key>:<name>"``.
        """
        at_least(0, run_seed=run_seed, reset_index=reset_index)
        return {
            f"{layer.key}:{name}": uniform(
                shape, self.init_a, run_seed=run_seed, reset_index=reset_index, layer=index, name=name
            )
            if name in layer.random
            else torch.zeros(shape)
            for index, layer in enumerate(self.layers)
            for name, shape in layer.trainable.items()
        }

    def frozen(self, run_seed: int, reset_index: int) -> dict[str, Tensor]:
        """Return the frozen factors between a reset and the next.

        Parameters and keys are those of ``init``. The tensors are cached: do not modify them.
        """
        at_least(0, run_seed=run_seed, reset_index=reset_index)
        return dict(_frozen(self, run_seed, reset_index))

    def deltas(self, trainable: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each layer's update, or its weight if there is no base, by the layer's key.

        Differentiable, with one matrix product for all layers that can share it. The factors may be on any
        device and of any precision. The trainable ones may share additional leading axes (one entry per
        node), which the results then have too.
        """
        return self._reconstructed({**frozen, **trainable}, exactly=False)

    def merge(
        self, base: Mapping[str, Tensor], trainable: Mapping[str, Tensor], frozen: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return each compressed layer's base plus its update (its weight if there is no base).

        The bits depend only on the arguments, not on the machine, the number of threads or the layers that
        share a product. ``deltas`` agrees up to rounding and is faster.

        Parameters
        ----------
        base : Mapping[str, Tensor]
            The bases by the layers' keys; ignored if there are none.
        trainable, frozen : Mapping[str, Tensor]
            The factors.

        Returns
        -------
        dict of str to Tensor
            New float32 tensors on the CPU.

        Raises
        ------
        ValueError
            If a base or a factor is missing or has another shape.
        """
        factors = {key: _to_cpu_float32(value) for key, value in {**frozen, **trainable}.items()}
        _check_shapes("factor", factors, self.shapes | self.frozen_shapes)
        if self.has_base:
            _check_shapes("base", base, {layer.key: layer.shape for layer in self.layers})
        with torch.no_grad():
            updates = self._reconstructed(factors, exactly=True)
            if not self.has_base:
                return updates
            return {key: _to_cpu_float32(base[key]) + update for key, update in updates.items()}

    def of_ranks(self, factors: Mapping[str, Tensor]) -> "Factorisation":
        """Return the plan of products U V with the ranks of some factors; the form must be ``lora``.

        A ValueError if they have other keys, or a rank below 1 or above that of the layer's matrix.
        """
        layers = []
        for layer in self.layers:
            found = factors.get(f"{layer.key}:V")
            rank = len(found) if found is not None and found.ndim == 2 else 0
            in_range(f"the rank of {layer.key}", rank, 1, min(layer.m, layer.n))
            layers.append(replace(layer, rank=rank))
        plan = replace(self, layers=tuple(layers))
        plan.check(factors)
        return plan

    def check(self, trainable: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the factors have the keys and shapes of ``shapes``."""
        _check_shapes("factor", trainable, self.shapes)
        if unknown := sorted(trainable.keys() - self.shapes.keys()):
            raise ValueError(f"factors must have the keys {sorted(self.shapes)}, got {unknown}")

    def _reconstructed(self, factors: Mapping[str, Tensor], *, exactly: bool) -> dict[str, Tensor]:
        product = exact_product if exactly else torch.matmul
        updates = {
            layer.key: update
            for group in _groups(self.layers)
            for layer, update in zip(group, _reconstruct(group, factors, product), strict=True)
        }
        return {layer.key: updates[layer.key] for layer in self.layers}


def check_reachable(ratio: float, least: float, what: str) -> None:
    """Raise ValueError if a ratio is below ``least`` > 0, the smallest possible one, that of ``what``."""
    if ratio < least:
        # Rounded up to four digits, so that the ratio that is named is possible.
        unit = 10.0 ** (math.floor(math.log10(least)) - 3)
        named = math.ceil(least / unit) * unit
        raise ValueError(f"ratio must be at least {named:.4g} for this model: {what}, got {ratio:g}")


def between(layers: Sequence[LayerShape], skip_front: int, skip_back: int) -> Sequence[LayerShape]:
    """Return the compressed layers: all but those skipped at either end; ValueError if none is left."""
    at_least(0, skip_front=skip_front, skip_back=skip_back)
    if skip_front + skip_back >= len(layers):
        raise ValueError(
            f"skip_front + skip_back must be less than {len(layers)}, the number of Linear and Conv2d "
            f"layers, got {skip_front + skip_back}: at least one layer must be compressed"
        )
    return layers[skip_front : len(layers) - skip_back]


@lru_cache(maxsize=16)
def _groups(layers: tuple[FactoredLayer, ...]) -> tuple[tuple[FactoredLayer, ...], ...]:
    """Return the layers in groups that share one product."""
    groups: dict[tuple[object, ...], list[FactoredLayer]] = {}
    for layer in layers:
        sizes = (layer.side,) if layer.side else (layer.m, layer.n, layer.rank)
        groups.setdefault((layer.variant, *sizes), []).append(layer)
    return tuple(tuple(group) for group in groups.values())


@lru_cache(maxsize=8)
def _frozen(plan: Factorisation, run_seed: int, reset_index: int) -> dict[str, Tensor]:
    return {
        f"{layer.key}:{name}": uniform(
            shape, plan.init_a, run_seed=run_seed, reset_index=reset_index, layer=index, name=name
        )
        for index, layer in enumerate(plan.layers)
        for name, shape in layer.frozen.items()
    }


def _to_cpu_float32(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32)


def _check_shapes(what: str, values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for key, shape in shapes.items():
        if key not in values:
            raise ValueError(f"{what} {key} is missing: there must be {', '.join(shapes)}")
        if (found := tuple(values[key].shape)) != shape:
            raise ValueError(f"{what} {key} must have the shape {shape}, got {found}")
