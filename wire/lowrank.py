"""A model's compressed layers as factors: planned to a budget, drawn, turned into updates, merged.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3 and the set-up of Section 5. The paper does not say what its ratio counts:
the ``"model"`` budget counts every trainable scalar of the model and searches as the authors' code does, the
``"layer"`` budget gives each compressed layer the ratio itself. Merges are ours: rounded alike on every
machine, so that nodes which replay them hold the server's bits.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from hedgerow.wire.checks import at_least, in_range, one_of, positive
from hedgerow.wire.factors import (
    LAYOUTS,
    VARIANTS,
    VIEWS,
    FactoredLayer,
    alike,
    exact_product,
    factored,
    reconstruct,
    uniform,
)
from hedgerow.wire.layers import LayerShape, layers_of, not_compressible

__all__ = [
    "BUDGETS",
    "LAYOUTS",
    "VARIANTS",
    "VIEWS",
    "FactoredLayer",
    "Factorisation",
    "LayerShape",
    "between",
    "layers_of",
    "not_compressible",
]

BUDGETS = ("model", "layer")

# The authors' search: how far a step goes, and how far above the target it may end.
_STEP = 0.001
_TOLERANCE = 0.001


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
        - ``"lmt"``: W = U V, no base (FedLMT, FedHM).
        - ``"para"``: W = (X1 Y1) * (X2 Y2) entrywise, no base (FedPara).
        - ``"dense"``: nothing is compressed.
    layers : tuple of FactoredLayer
        The compressed layers, in module order: a layer's place is part of its random streams.
    init_a : float
        Half width a of U(-a, a), from which random factors are drawn; finite, > 0.
    layout : str
        ``"flat"`` (blocks one after the other) or ``"tiled"`` (blocks in a square); of the Kronecker forms.
    tight : bool
        Whether blocks that no entry of the weight reaches are left out.
    num_parameters : int
        Trainable scalars of the whole dense model.
    rho : float
        The ratio of each layer that the budget came to, before rounding up; 1 where nothing is compressed.
    """

    variant: str
    layers: tuple[FactoredLayer, ...]
    init_a: float
    layout: str
    tight: bool
    num_parameters: int
    rho: float

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
        """Return the factors that meet a ratio, or miss it by the least: ``ratio`` tells what came of it.

        Parameters
        ----------
        layers : sequence of LayerShape
            What can be compressed: ``layers_of`` the model.
        variant, init_a, layout, tight
            As in the class.
        num_parameters : int
            Trainable scalars of the whole dense model.
        ratio : float (default: 1 / 32)
            Target in (0, 1].
        budget : str (default: "model")
            - ``"model"``: of the whole model, all that is trained included. The layers' own ratio goes down
              from the target by steps of 0.001 until the model is at most 0.001 above it; at its end every
              layer has rank 1 or one block, and the target is missed.
            - ``"layer"``: of each compressed layer.
        skip_front, skip_back : int (default: 1, 1)
            Layers at either end that stay dense, >= 0.
        view : str (default: "buffer")
            How the matrix of a convolution lies in its weight, of matrix forms; see ``FactoredLayer``.

        Raises
        ------
        ValueError
            If an argument is out of range, or no layer is left to compress.
        """
        _check_plan(layers, variant, num_parameters, ratio, budget, skip_front, skip_back, init_a, layout)
        one_of("view", view, VIEWS)
        if view != "buffer" and "bkd" in variant:
            raise ValueError(f"view must be 'buffer' with {variant!r}, which has no matrices, got {view!r}")
        if variant == "dense":
            return cls(variant, (), init_a, layout, tight, num_parameters, rho=1.0)
        chosen = between(layers, skip_front, skip_back)

        def sized(rho: float) -> Factorisation:
            own = tuple(factored(layer, variant, rho, layout, view) for layer in chosen)
            return cls(variant, own, init_a, layout, False, num_parameters, rho)

        found = sized(ratio)
        if budget == "model":
            # rho shrinks by repeated subtraction, as in the authors' code: its rounding is part of the sizes.
            while found.ratio - ratio > _TOLERANCE and found.rho - _STEP > 0:
                found = sized(found.rho - _STEP)
        return found._tightened() if tight else found

    @property
    def count(self) -> int:
        """Factor scalars C that travel."""
        return sum(layer.count for layer in self.layers)

    @property
    def dense_count(self) -> int:
        """Scalars D of the compressed layers' weights."""
        return sum(layer.size for layer in self.layers)

    @property
    def uncompressed(self) -> int:
        """Trainable scalars E_unc that travel as they are."""
        return self.num_parameters - self.dense_count

    @property
    def ratio(self) -> float:
        """Scalars that travel in one direction, per trainable scalar of the dense model."""
        return (self.count + self.uncompressed) / self.num_parameters

    @property
    def has_base(self) -> bool:
        """Whether the factors are updates of frozen bases, which are merged into them at resets."""
        return all(layer.has_base for layer in self.layers) and self.variant != "dense"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the trainable factors by ``"<layer key>:<name>"``, in the order of ``init``."""
        return {_key(layer, name): shape for layer in self.layers for name, shape in layer.trainable.items()}

    @property
    def fingerprint(self) -> str:
        """A short hash of everything that determines the factors and what they stand for."""
        views = {layer.view for layer in self.layers} - {"buffer"}
        return hashlib.sha256((repr(self) + "".join(views)).encode()).hexdigest()[:16]

    def init(self, run_seed: int, reset_index: int) -> dict[str, Tensor]:
        """Return the trainable factors right after a reset: with a base, the update they give is zero.

        Parameters
        ----------
        run_seed : int
            The run's seed, >= 0.
        reset_index : int
            How many resets came before, >= 0.

        Returns
        -------
        dict of str to Tensor
            New float32 tensors on the CPU, under ``"<layer key>:<name>"``.
        """
        _check_seeds(run_seed, reset_index)
        return {
            _key(layer, name): uniform(
                shape, self.init_a, run_seed=run_seed, reset_index=reset_index, layer=index, name=name
            )
            if name in layer.random
            else torch.zeros(shape)
            for index, layer in enumerate(self.layers)
            for name, shape in layer.trainable.items()
        }

    def frozen(self, run_seed: int, reset_index: int) -> dict[str, Tensor]:
        """Return the frozen factors between a reset and the next.

        Takes what ``init`` takes, and gives keys alike. The tensors may be those of an earlier call: read
        them, never change them.
        """
        _check_seeds(run_seed, reset_index)
        return dict(_frozen(self, run_seed, reset_index))

    def deltas(self, trainable: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each layer's update, or its weight where there is no base, by the layer's key.

        Differentiable, one matrix product for all layers that can share it. The factors may be on any device
        and of any precision. All trainable ones may have the same leading axes more (one entry a node): the
        results have them too.
        """
        return self._reconstructed({**frozen, **trainable}, exactly=False)

    def merge(
        self, base: Mapping[str, Tensor], trainable: Mapping[str, Tensor], frozen: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return each compressed layer's base plus its update (its weight where there is no base).

        The bits depend on the arguments alone: not on the machine, the number of threads or the layers that
        share a product. ``deltas`` agrees up to rounding and is faster.

        Parameters
        ----------
        base : Mapping[str, Tensor]
            The bases by the layers' keys; unused where there is none.
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
        _check_shapes("factor", factors, self.shapes | self._frozen_shapes)
        if self.has_base:
            _check_shapes("base", base, {layer.key: layer.shape for layer in self.layers})
        with torch.no_grad():
            updates = self._reconstructed(factors, exactly=True)
            if not self.has_base:
                return updates
            return {key: _to_cpu_float32(base[key]) + update for key, update in updates.items()}

    def check(self, trainable: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the factors have the keys and shapes of ``shapes``."""
        _check_shapes("factor", trainable, self.shapes)
        if unknown := sorted(trainable.keys() - self.shapes.keys()):
            raise ValueError(f"factors must have the keys {sorted(self.shapes)}, got {unknown}")

    @property
    def _frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        return {_key(layer, name): shape for layer in self.layers for name, shape in layer.frozen.items()}

    def _reconstructed(self, factors: Mapping[str, Tensor], *, exactly: bool) -> dict[str, Tensor]:
        product = exact_product if exactly else torch.matmul
        updates = {
            layer.key: update
            for group in _groups(self.layers)
            for layer, update in zip(group, reconstruct(group, factors, product), strict=True)
        }
        return {layer.key: updates[layer.key] for layer in self.layers}

    def _tightened(self) -> "Factorisation":
        """Return the same functions of fewer factors; the search has not seen it, so that plans compare."""
        layers = tuple(replace(layer, blocks=layer.reachable) for layer in self.layers)
        return replace(self, layers=layers, tight=True)


def between(layers: Sequence[LayerShape], skip_front: int, skip_back: int) -> Sequence[LayerShape]:
    """Return the layers that are compressed: all but so many at either end; ValueError if none is left."""
    at_least(0, skip_front=skip_front, skip_back=skip_back)
    if skip_front + skip_back >= len(layers):
        raise ValueError(
            f"skip_front + skip_back must be less than {len(layers)}, the number of Linear and Conv2d "
            f"layers, got {skip_front + skip_back}: one must be left to compress"
        )
    return layers[skip_front : len(layers) - skip_back]


@lru_cache(maxsize=16)
def _groups(layers: tuple[FactoredLayer, ...]) -> tuple[tuple[FactoredLayer, ...], ...]:
    groups: dict[tuple[object, ...], list[FactoredLayer]] = {}
    for layer in layers:
        groups.setdefault(alike(layer), []).append(layer)
    return tuple(tuple(group) for group in groups.values())


@lru_cache(maxsize=8)
def _frozen(plan: Factorisation, run_seed: int, reset_index: int) -> dict[str, Tensor]:
    return {
        _key(layer, name): uniform(
            shape, plan.init_a, run_seed=run_seed, reset_index=reset_index, layer=index, name=name
        )
        for index, layer in enumerate(plan.layers)
        for name, shape in layer.frozen.items()
    }


def _key(layer: FactoredLayer, name: str) -> str:
    return f"{layer.key}:{name}"


def _to_cpu_float32(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32)


def _check_shapes(what: str, values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for key, shape in shapes.items():
        if key not in values:
            raise ValueError(f"{what} {key} is missing: there must be {', '.join(shapes)}")
        if (found := tuple(values[key].shape)) != shape:
            raise ValueError(f"{what} {key} must have the shape {shape}, got {found}")


def _check_seeds(run_seed: int, reset_index: int) -> None:
    at_least(0, run_seed=run_seed, reset_index=reset_index)


def _check_plan(
    layers: Sequence[LayerShape],
    variant: str,
    num_parameters: int,
    ratio: float,
    budget: str,
    skip_front: int,
    skip_back: int,
    init_a: float,
    layout: str,
) -> None:
    for key, value, names in (
        ("variant", variant, VARIANTS),
        ("budget", budget, BUDGETS),
        ("layout", layout, LAYOUTS),
    ):
        one_of(key, value, names)
    in_range("ratio", ratio, 0.0, 1.0, open_below=True)
    positive(init_a=init_a)
    at_least(0, skip_front=skip_front, skip_back=skip_back)
    at_least(sum(layer.size for layer in layers), num_parameters=num_parameters)
