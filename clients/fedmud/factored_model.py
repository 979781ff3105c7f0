"""Models of linear and convolutional layers, trained through the factors of their weights.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3: a compressed layer computes with W + Delta, W frozen and Delta made of
factors (FedLMT, FedPara: with the factors' product alone). The model's own code does not change. A matrix
with an update of low rank is used in parts (``low_rank_weight.py``); all other updates are reconstructed at
once, and the forward pass uses the sums in place of the weights.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hedgerow.clients.fedmud.low_rank_weight import LowRankWeight
from hedgerow.clients.training.stacked_layers import Reparametrised
from hedgerow.wire.layers import layers_of, trained_numbers
from hedgerow.wire.lowrank import FactoredLayer, Factorisation

State = dict[str, Tensor]

# The key prefixes of a wrapped model's state dict.
_PLAIN, _FACTORS, _FROZEN = "plain.", "factors.", "frozen."


def plan_for(model: nn.Module, layers: str = "", **arguments: Any) -> Factorisation:
    """Return ``Factorisation.plan`` of ``layers_of(model, layers)`` with the given arguments."""
    chosen = layers_of(model, layers)
    skipped = {"skip_front": 0, "skip_back": 0} if layers else {}
    trained = trained_numbers(model, chosen)
    return Factorisation.plan(chosen, num_parameters=trained, **{**skipped, **arguments})


def wrap(
    model: nn.Module, plan: Factorisation | None = None, *, run_seed: int = 0, **arguments: Any
) -> "FactoredModel":
    """Return a copy of a model that trains in factors; with a base its first outputs are the same.

    Parameters
    ----------
    model : nn.Module
        Any model with matrices or convolutions among its weights.
    plan : Factorisation or None (default: None)
        The factors; None plans them from ``arguments``: ``wrap(model, variant="mud+aad", ratio=1 / 8)``.
    run_seed : int (default: 0)
        The seed of the factors, >= 0.
    **arguments
        As in ``Factorisation.plan``.
    """
    wrapped = FactoredModel(model, plan_for(model, **arguments) if plan is None else plan)
    wrapped.reset(run_seed, 0)
    return wrapped


class FactoredModel(Reparametrised):
    """A copy of a model that computes with W + Delta in its compressed layers.

    Its trainable parameters are the factors and the uncompressed part of the model. W and the frozen factors
    are parameters without gradient. In evaluation mode without gradients, reconstructed weights are cached
    until a parameter changes.

    Parameters
    ----------
    model : nn.Module
        The model; copied. A ValueError if it lacks a layer of the plan, or shares a layer's weight.
    plan : Factorisation
        The factors, which are zero until ``reset``. Without a base, W is omitted.
    """

    def __init__(self, model: nn.Module, plan: Factorisation) -> None:
        super().__init__()
        keys: dict[int, list[str]] = {}
        for key, parameter in model.named_parameters(remove_duplicate=False):
            keys.setdefault(id(parameter), []).append(key)
        shapes = {own[0]: tuple(model.get_parameter(own[0]).shape) for own in keys.values() if len(own) == 1}
        for layer in plan.layers:
            if shapes.get(layer.key) != layer.shape:
                raise ValueError(
                    f"the model must have the plan's {layer.key} of shape {layer.shape}, shared with no "
                    f"other module, got {shapes}"
                )
        self.plan = plan
        self.plain = copy.deepcopy(model)
        self.factors, self.frozen = nn.Module(), nn.Module()
        for layer in plan.layers:
            module, name = _owner(self.plain, layer.key)
            weight = cast(Tensor, getattr(module, name))
            base = weight.detach() if plan.has_base else weight.new_empty(0)
            setattr(module, name, nn.Parameter(base, requires_grad=False))
            for tree, shapes in ((self.factors, layer.trainable), (self.frozen, layer.frozen)):
                for role, shape in shapes.items():
                    value = torch.zeros(shape, device=weight.device)
                    trained = tree is self.factors
                    _plant(tree, f"{layer.key}:{role}", nn.Parameter(value, requires_grad=trained))
        # The layers that train in parts, and those whose weights are built.
        self._parts = tuple(layer for layer in plan.layers if layer.in_parts)
        self._sums = replace(plan, layers=tuple(layer for layer in plan.layers if not layer.in_parts))
        self._cache: _Cache | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output with W + Delta."""
        return functional_call(self.plain, self._weights(), inputs, named)

    def reset(self, run_seed: int, reset_index: int) -> None:
        """Draw new factors; with a base, Delta is then zero."""
        with torch.no_grad():
            for tree, drawn in (
                (self.factors, self.plan.init(run_seed, reset_index)),
                (self.frozen, self.plan.frozen(run_seed, reset_index)),
            ):
                for key, value in drawn.items():
                    tree.get_parameter(key).copy_(value)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, and clear the cached weights."""
        self._cache = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # The cache is valid for these parameters' version counters only, and a copy's start anew.
        return {**self.__dict__, "_cache": None}

    # The state dict as a federation sends it: under the plain model's keys, and the factors' own.

    def state_from(
        self, rest: Mapping[str, Tensor], factors: State, frozen: State, base: Mapping[str, Tensor]
    ) -> State:
        """Return the state dict of these parts; ``base`` is unused if the plan has none."""
        empty = {layer.key: torch.empty(0) for layer in self.plan.layers}
        plain = {**rest, **(base if self.plan.has_base else empty)}
        parts = {_PLAIN: plain, _FACTORS: factors, _FROZEN: frozen}
        return {prefix + key: value for prefix, part in parts.items() for key, value in part.items()}

    def factors_of(self, state: Mapping[str, Tensor] | None = None) -> State:
        """Return the trainable factors of a state dict, the model's own by default."""
        return self._part(_FACTORS, state)

    def rest_of(self, state: Mapping[str, Tensor] | None = None) -> State:
        """Return the uncompressed parameters and buffers, under the plain model's keys."""
        compressed = {layer.key for layer in self.plan.layers}
        return {key: value for key, value in self._part(_PLAIN, state).items() if key not in compressed}

    def dense_of(self, state: Mapping[str, Tensor] | None = None) -> State:
        """Return the plain model's state dict with the updates merged, bit for bit as on the server."""
        plain = self._part(_PLAIN, state)
        merged = self.plan.merge(plain, self.factors_of(state), self._part(_FROZEN, state))
        return plain | {key: value.to(plain[key]) for key, value in merged.items()}

    def _part(self, prefix: str, state: Mapping[str, Tensor] | None) -> State:
        values = self.state_dict() if state is None else state
        return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    def plain_values(self, own: Mapping[str, Tensor]) -> State:
        """Return the plain model's parameters and buffers, its compressed weights reconstructed."""
        plain = {k.removeprefix(_PLAIN): value for k, value in own.items() if k.startswith(_PLAIN)}
        return plain | self._reconstructed(own, self.plan)

    def _weights(self) -> State:
        """Return the compressed layers' weights; in evaluation from the cache, if nothing has changed."""
        own = dict(self.named_parameters())
        inputs = list(own.values())
        # Values that replace the model's own (functional_call) are no parameters, and are not cached.
        if self.training or torch.is_grad_enabled() or not all(type(v) is nn.Parameter for v in inputs):
            parts = {layer.key: self._in_parts(layer, own) for layer in self._parts}
            return parts | self._reconstructed(own, self._sums)
        if self._cache is None or not self._cache.holds(inputs):
            self._cache = _Cache.of(inputs, self._reconstructed(own, self.plan))
        return self._cache.weights

    def _in_parts(self, layer: FactoredLayer, own: Mapping[str, Tensor]) -> Tensor:
        base = own[_PLAIN + layer.key]
        trainable = {name: own[f"{_FACTORS}{layer.key}:{name}"] for name in layer.trainable}
        frozen = {name: own[f"{_FROZEN}{layer.key}:{name}"] for name in layer.frozen}
        left, right = (part.to(base.dtype) for part in layer.parts(trainable, frozen))
        return LowRankWeight(base if self.plan.has_base else None, left, right)

    def _reconstructed(self, own: Mapping[str, Tensor], plan: Factorisation) -> State:
        trainable = {key: own[_FACTORS + key] for key in plan.shapes}
        frozen = {key: own[_FROZEN + key] for key in plan.frozen_shapes}
        weights = {}
        device = next(iter(own.values())).device
        with torch.autocast(device.type, enabled=False):  # An update is small beside its base.
            deltas = plan.deltas(trainable, frozen)
        for key, delta in deltas.items():
            base = own[_PLAIN + key]
            weights[key] = base + delta.to(base.dtype) if self.plan.has_base else delta.to(base.dtype)
        return weights


@dataclass(frozen=True)
class _Cache:
    """Reconstructed weights, with the parameters that gave them and their version counters."""

    inputs: Sequence[Tensor]
    states: list[tuple[int, int]]
    weights: State

    @classmethod
    def of(cls, inputs: Sequence[Tensor], weights: State) -> "_Cache":
        return cls(inputs, _states(inputs), weights)

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether these are the same parameters, unchanged."""
        return self.states == _states(inputs) and all(map(is_, self.inputs, inputs))


def _states(values: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(value._version, value.data_ptr()) for value in values]


def _owner(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and the parameter's name in it."""
    path, _, name = key.rpartition(".")
    return model.get_submodule(path), name


def _plant(tree: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted key, with a module for each part of its path."""
    path, _, name = key.rpartition(".")
    for part in filter(None, path.split(".")):
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    tree.register_parameter(name, parameter)
