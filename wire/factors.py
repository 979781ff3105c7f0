"""The factors of one weight: which there are, how large, how they are drawn, what they stand for.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3: low-rank updates, block-wise Kronecker decomposition (BKD), aggregation-
aware decomposition (AAD, eq. (8)) and its freezing ablation (F); FedLMT and FedPara factor the weight itself.
FedLMT's and FedHM's authors read a convolution as two convolutions, which is a view of its own.
Ours: random factors come from one Philox stream per (run, reset, layer, role), on the CPU, because shared
randomness must not depend on a device; what BKD computes never exceeds the blocks that the weight can reach.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hedgerow.wire.layers import LayerShape

__all__ = [
    "LAYOUTS",
    "VARIANTS",
    "VIEWS",
    "FactoredLayer",
    "alike",
    "exact_product",
    "factored",
    "reconstruct",
    "uniform",
]

LAYOUTS = ("flat", "tiled")
VIEWS = ("buffer", "convolutions")

# Entries of a weight that ``exact_product`` finishes at a time: they stay in a core's cache.
_CACHED = 32_768


@dataclass(frozen=True)
class _Form:
    """A weight or its update as a sum of products (left, right); FedPara multiplies them entrywise.

    A name with a tilde is frozen. ``random`` names the trainable factors that are not zero at a reset.
    """

    terms: tuple[tuple[str, str], ...]
    random: tuple[str, ...] = ()
    kronecker: bool = False
    has_base: bool = True
    hadamard: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Left and right factors in turn."""
        return tuple(name for term in self.terms for name in term)


_PRODUCT = (("U", "V"),)
_FROZEN = (("U~", "V"),)
_DECOUPLED = (("U", "V~"), ("U~", "V"))
_HADAMARD = (("X1", "Y1"), ("X2", "Y2"))
_FORMS = {
    "mud": _Form(_PRODUCT, random=("U",)),
    "mud+f": _Form(_FROZEN),
    "mud+aad": _Form(_DECOUPLED),
    "mud+bkd": _Form(_PRODUCT, random=("U",), kronecker=True),
    "mud+bkd+f": _Form(_FROZEN, kronecker=True),
    "mud+bkd+aad": _Form(_DECOUPLED, kronecker=True),
    "lmt": _Form(_PRODUCT, random=("U", "V"), has_base=False),
    "para": _Form(_HADAMARD, random=("X1", "Y1", "X2", "Y2"), has_base=False, hadamard=True),
}
# Part of every random stream: a frozen factor has the role of the one that it stands in for.
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
        How the (m, n) matrix of a convolution lies in its weight: ``"buffer"``, the row-major buffer as it
        is, or ``"convolutions"``, row (o, y) and column (i, x) for the weight's (o, i, y, x), as where V is a
        convolution of one row and U one of one column; that of matrix forms alone.

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
    # Excluded from the fingerprint at its default value.
    view: str = field(default="buffer", repr=False)

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what is trained and sent."""
        return {name: self._stored(name) for name in self._form.names if not _is_frozen(name)}

    @property
    def frozen(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what a seed gives."""
        return {name: self._stored(name) for name in self._form.names if _is_frozen(name)}

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

    @property
    def reachable(self) -> int:
        """Blocks b_need that the weight's entries reach; 0 for the matrix forms.

        The last ``blocks - reachable`` blocks never have a gradient, and are sent all the same unless the
        layer is tight.
        """
        return blocks_needed(self.size, self.side, self.grid) if self.side else 0

    @property
    def is_linear(self) -> bool:
        """Whether the update is linear in what is trained: each product has a frozen factor."""
        return all(any(map(_is_frozen, term)) for term in self._form.terms)

    def rank_bound(self, merges: int = 1) -> int:
        """Return the highest rank that the sum of so many updates can have, as m x n matrices.

        One update: r for MUD, F and FedLMT, 2 r for AAD, whose rank-r factors stand beside frozen ones, R^2
        for FedPara, and no bound but min(m, n) for the Kronecker forms.
        """
        full = min(self.m, self.n)
        if self.side:
            return full
        one = self.rank**2 if self._form.hadamard else self.rank * len(self._form.terms)
        return min(full, merges * one)

    def delta(self, trainable: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> Tensor:
        """Return the update, or the weight where there is no base, in the weight's own shape.

        Parameters
        ----------
        trainable, frozen : Mapping[str, Tensor]
            The factors by name. All may have the same leading axes more (one entry a node), the frozen ones
            none: the result has them too.
        """
        factors = {f"{self.key}:{name}": value for name, value in {**frozen, **trainable}.items()}
        return next(reconstruct([self], factors, torch.matmul))

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

    def _stored(self, name: str) -> tuple[int, ...]:
        if self.side:
            return self.blocks, self.side, self.side
        return (self.m, self.rank) if _is_left(name) else (self.rank, self.n)

    @property
    def _form(self) -> _Form:
        return _FORMS[self.variant]


def factored(layer: LayerShape, variant: str, rho: float, layout: str, view: str = "buffer") -> FactoredLayer:
    """Return the layer with the sizes that a ratio gives.

    Parameters
    ----------
    layer : LayerShape
        The weight, m x n as a matrix.
    variant : str
        One of ``VARIANTS``, not ``"dense"``.
    rho : float
        Factor scalars per entry of the weight, > 0. Sizes are rounded up, and are at least rank 1 or one
        block: a small weight costs more.
    layout : str
        ``"flat"`` or ``"tiled"``; without effect on the matrix forms.
    view : str (default: "buffer")
        One of ``VIEWS``; ``"buffer"`` for the Kronecker forms.
    """
    form, m, n = _FORMS[variant], layer.m, layer.n
    halved = 2 if variant.endswith("+f") else 1  # one of two factors is sent: the other's share is free
    if form.kronecker:
        rho *= halved
        grid = max(1, math.ceil(rho * math.sqrt(m * n) / 2)) if layout == "tiled" else 0
        blocks = grid**2 or math.ceil(rho**2 * m * n / 4)  # from rho = 2 k / sqrt(m n), b = k^2
        side = _side(m * n, blocks)
        return FactoredLayer(layer.key, layer.shape, variant, blocks=blocks, side=side, grid=grid)
    scalars_per_rank = n if halved == 2 else (m + n) * len(form.terms) if form.hadamard else m + n
    rank = max(1, math.ceil(rho * m * n / scalars_per_rank))
    return FactoredLayer(layer.key, layer.shape, variant, rank=rank, view=view)


def blocks_needed(size: int, side: int, grid: int) -> int:
    """Return how many of the blocks (side^2, side^2) hold the first ``size`` entries of their layout."""
    if not grid:
        return math.ceil(size / side**4)
    whole, rest = divmod(size, grid * side**4)  # whole rows of blocks
    return whole * grid + min(grid, math.ceil(rest / side**2))


def uniform(
    shape: Sequence[int], a: float, *, run_seed: int, reset_index: int, layer: int, name: str
) -> Tensor:
    """Return a factor drawn from U(-a, a), float32, always on the CPU."""
    sequence = np.random.SeedSequence([run_seed, reset_index, layer, _ROLES[name]])
    drawn = np.random.Generator(np.random.Philox(sequence)).random(tuple(shape))
    return torch.from_numpy(((2 * drawn - 1) * a).astype(np.float32))


def reconstruct(
    layers: Sequence[FactoredLayer],
    factors: Mapping[str, Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[Tensor]:
    """Yield the update of each layer, in the order given; layers must agree in all that ``alike`` compares.

    One product serves them all: matrices of one shape are stacked, blocks of one side are concatenated.

    Parameters
    ----------
    layers : sequence of FactoredLayer
        The layers, at least one.
    factors : Mapping[str, Tensor]
        All their factors, under ``"<layer key>:<name>"``.
    product : callable
        The batched matrix product: ``torch.matmul``, or ``exact_product``.
    """
    updates = _kronecker_updates if _FORMS[layers[0].variant].kronecker else _matrix_updates
    return updates(layers, factors, product)


def alike(layer: FactoredLayer) -> tuple[object, ...]:
    """Return what layers must agree in to share one product."""
    if layer.side:
        return layer.variant, layer.side
    return layer.variant, layer.m, layer.n, layer.rank


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right with the same bits on every machine, whatever its threads and vector units.

    Each entry is its products, each rounded, added in the order of the inner axis; a matrix library is free
    to fuse and to reorder. Slower than ``torch.matmul`` by about the ratio of memory to arithmetic speed.
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


def _matrix_updates(
    layers: Sequence[FactoredLayer],
    factors: Mapping[str, Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
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
    layers: Sequence[FactoredLayer],
    factors: Mapping[str, Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[Tensor]:
    terms = _FORMS[layers[0].variant].terms
    lefts = [_blocks(layers, factors, left).unsqueeze(-1) for left, _ in terms]
    rights = [_blocks(layers, factors, right).unsqueeze(-2) for _, right in terms]
    z = layers[0].side
    # Entry (i, d), (p, c) of the outer product of two factors is entry (i z + p, d z + c) of their Kronecker
    # product: one matrix product over the terms gives all blocks of all layers.
    outer = product(_joined(lefts, -1), _joined(rights, -2))  # (…, blocks, z z, z z)
    blocks = outer.reshape(*outer.shape[:-2], z, z, z, z).transpose(-3, -2)  # (…, blocks, i, p, d, c)
    counts = [layer.reachable for layer in layers]
    for layer, own in zip(layers, blocks.split_with_sizes(counts, -5), strict=True):
        buffer = own.flatten(-5) if not layer.grid else _tiled(own, layer.grid)
        yield buffer[..., : layer.size].reshape(*buffer.shape[:-1], *layer.shape)


def _tiled(blocks: Tensor, grid: int) -> Tensor:
    """Return the row-major buffer of blocks (…, blocks, i, p, d, c) in a grid, as far down as they reach."""
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
    """Return the parts side by side on the inner axis of the product, so that their terms are summed."""
    if len(parts) == 1:
        return parts[0]
    leading = np.broadcast_shapes(*(part.shape[:-2] for part in parts))
    return torch.cat([part.expand(*leading, *part.shape[-2:]) for part in parts], axis)


def _side(size: int, blocks: int) -> int:
    """Return the smallest z with blocks * z^4 >= size, in whole numbers."""
    z = 1
    while blocks * z**4 < size:
        z += 1
    return z


def _is_frozen(name: str) -> bool:
    return name.endswith("~")


def _is_left(name: str) -> bool:
    return name[0] in "UX"
