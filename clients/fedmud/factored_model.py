"""Any model of linear and convolutional layers, trained through the factors of their weights.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3: a compressed layer computes with W + Delta, W frozen and Delta made of
factors (FedLMT, FedPara: with what the factors make, no W). The model's own code is not touched: all updates
are reconstructed at once, and its forward pass runs with the sums in place of its weights.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hedgerow.clients.training.stacked_layers import Reparametrised
from hedgerow.wire.lowrank import Factorisation, layers_of

__all__ = ["FactoredModel", "plan_for", "wrap"]

State = dict[str, Tensor]

# The parts of a wrapped model's state dict, as the prefixes of its keys.
_PLAIN, _FACTORS, _FROZEN = "plain.", "factors.", "frozen."


def plan_for(model: nn.Module, **arguments: Any) -> Factorisation:
    """Return ``Factorisation.plan`` of a model's layers; the arguments are those of the plan."""
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Factorisation.plan(layers_of(model), num_parameters=trainable, **arguments)


def wrap(
    model: nn.Module, plan: Factorisation | None = None, *, run_seed: int = 0, **arguments: Any
) -> "FactoredModel":
    """Return a model that trains in factors, and computes at first what the given one does if W stays.

    Parameters
    ----------
    model : nn.Module
        Any model with ``Linear`` or ``Conv2d`` layers. It is copied, and not changed.
    plan : Factorisation or None (default: None)
        The factors; None plans them from ``arguments``: ``wrap(model, variant="mud+aad", ratio=1 / 8)``.
    run_seed : int (default: 0)
        What the factors are drawn from, >= 0.
    **arguments
        As ``Factorisation.plan`` takes them.
    """
    wrapped = FactoredModel(model, plan_for(model, **arguments) if plan is None else plan)
    wrapped.reset(run_seed, 0)
    return wrapped


class FactoredModel(Reparametrised):
    """A copy of a model whose compressed weights are W + Delta.

    Its trainable parameters are the factors and whatever of the model is not compressed. W and the frozen
    factors are parameters without gradient. In evaluation mode, where nothing is differentiated, the
    weights are reconstructed once for as long as nothing changes.

    Parameters
    ----------
    model : nn.Module
        The model; copied.
    plan : Factorisation
        The factors, which are zero until ``reset``. Without a base, W is left out.

    Raises
    ------
    ValueError
        If a layer of the plan is none of the model's.
    """

    def __init__(self, model: nn.Module, plan: Factorisation) -> None:
        super().__init__()
        layers = {layer.key: layer.shape for layer in layers_of(model)}
        for layer in plan.layers:
            if layers.get(layer.key) != layer.shape:
                raise ValueError(
                    f"the model must have the plan's {layer.key} of shape {layer.shape}, got {layers}"
                )
        self.plan = plan
        self.plain = copy.deepcopy(model)
        self.factors, self.frozen = nn.Module(), nn.Module()
        names = Counter(id(value) for _, value in self.plain.named_parameters(remove_duplicate=False))
        for layer in plan.layers:
            module, name = _owner(self.plain, layer.key)
            weight = cast(Tensor, getattr(module, name))
            if names[id(weight)] > 1:
                raise ValueError(f"{layer.key} must be the weight of one layer, and another shares it")
            base = weight.detach() if plan.has_base else weight.new_empty(0)
            setattr(module, name, nn.Parameter(base, requires_grad=False))
            for tree, shapes in ((self.factors, layer.trainable), (self.frozen, layer.frozen)):
                for role, shape in shapes.items():
                    value = torch.zeros(shape, device=weight.device)
                    trained = tree is self.factors
                    _plant(tree, f"{layer.key}:{role}", nn.Parameter(value, requires_grad=trained))
        self._memory: _Memory | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the model computes with W + Delta."""
        return functional_call(self.plain, self._weights(), inputs, named)

    def reset(self, run_seed: int, reset_index: int) -> None:
        """Draw new factors: with a base, Delta is zero."""
        with torch.no_grad():
            for tree, drawn in (
                (self.factors, self.plan.init(run_seed, reset_index)),
                (self.frozen, self.plan.frozen(run_seed, reset_index)),
            ):
                for key, value in drawn.items():
                    tree.get_parameter(key).copy_(value)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, and forget the reconstructed weights."""
        self._memory = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameters count their changes anew: what is remembered of these says nothing of them.
        return {**self.__dict__, "_memory": None}

    # Its state dict, as a federation sends it: under the plain model's keys, and the factors' own.

    def state_from(
        self, rest: Mapping[str, Tensor], factors: State, frozen: State, base: Mapping[str, Tensor]
    ) -> State:
        """Return the state dict of these parts; ``base`` is not read where there is none."""
        empty = {layer.key: torch.empty(0) for layer in self.plan.layers}
        plain = {**rest, **(base if self.plan.has_base else empty)}
        parts = {_PLAIN: plain, _FACTORS: factors, _FROZEN: frozen}
        return {prefix + key: value for prefix, part in parts.items() for key, value in part.items()}

    def factors_of(self, state: Mapping[str, Tensor] | None = None) -> State:
        """Return the trainable factors of a state dict, the model's own by default."""
        return self._part(_FACTORS, state)

    def rest_of(self, state: Mapping[str, Tensor] | None = None) -> State:
        """Return what is not compressed, parameters and buffers, under the plain model's keys."""
        compressed = {layer.key for layer in self.plan.layers}
        return {key: value for key, value in self._part(_PLAIN, state).items() if key not in compressed}

    def dense_of(self, state: Mapping[str, Tensor] | None = None) -> State:
        """Return the plain model's state dict with the updates merged, to the bit as a server merges them."""
        plain = self._part(_PLAIN, state)
        merged = self.plan.merge(plain, self.factors_of(state), self._part(_FROZEN, state))
        return plain | {key: value.to(plain[key]) for key, value in merged.items()}

    def _part(self, prefix: str, state: Mapping[str, Tensor] | None) -> State:
        values = self.state_dict() if state is None else state
        return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    # Reconstruction.

    def plain_values(self, own: Mapping[str, Tensor]) -> State:
        """Return the plain model's parameters and buffers, its compressed weights reconstructed."""
        plain = {k.removeprefix(_PLAIN): value for k, value in own.items() if k.startswith(_PLAIN)}
        return plain | self._reconstructed(own)

    def _weights(self) -> State:
        """Return the compressed layers' weights; in evaluation from memory, if nothing has changed."""
        own = dict(self.named_parameters())
        inputs = list(own.values())
        # Values that a caller put in place of the model's own are no parameters, and are not remembered.
        if self.training or torch.is_grad_enabled() or not all(type(v) is nn.Parameter for v in inputs):
            return self._reconstructed(own)
        if self._memory is None or not self._memory.holds(inputs):
            self._memory = _Memory.of(inputs, self._reconstructed(own))
        return self._memory.weights

    def _reconstructed(self, own: Mapping[str, Tensor]) -> State:
        trainable = {key: own[_FACTORS + key] for key in self.plan.shapes}
        frozen = {key.removeprefix(_FROZEN): v for key, v in own.items() if key.startswith(_FROZEN)}
        weights = {}
        device = next(iter(own.values())).device
        with torch.autocast(device.type, enabled=False):  # An update is small beside its base.
            deltas = self.plan.deltas(trainable, frozen)
        for key, delta in deltas.items():
            base = own[_PLAIN + key]
            weights[key] = base + delta.to(base.dtype) if self.plan.has_base else delta.to(base.dtype)
        return weights


@dataclass(frozen=True)
class _Memory:
    """Reconstructed weights, and the parameters that they were made of with the count of their changes."""

    inputs: Sequence[Tensor]
    states: list[tuple[int, int]]
    weights: State

    @classmethod
    def of(cls, inputs: Sequence[Tensor], weights: State) -> "_Memory":
        return cls(inputs, _states(inputs), weights)

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether these are the same parameters, unchanged."""
        return self.states == _states(inputs) and all(map(is_, self.inputs, inputs))


def _states(values: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(value._version, value.data_ptr()) for value in values]


def _owner(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and the parameter's name there."""
    path, _, name = key.rpartition(".")
    return model.get_submodule(path), name


def _plant(tree: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a key with dots: a module for each part of its path."""
    path, _, name = key.rpartition(".")
    for part in filter(None, path.split(".")):
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    tree.register_parameter(name, parameter)
