"""What a model keeps outside of its state dict, and its forward passes may change: found and set back.

These are the attributes of its modules (a counter, a running mean, a hidden state) with what they hold, and
buffers that are not persistent. Nodes share a model as scratch space, so such a value would reach the next
node.
"""

import copy
import functools
import pickle
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

# What torch itself stores in a module: its parameters, buffers, modules, hooks and mode.
_OF_TORCH = frozenset(vars(nn.Module()))
# Holds nothing that changes; parameters belong to the state dict or are never trained.
_CONSTANT = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, nn.Parameter)
_GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
_HOLDERS = list, set, deque, dict, types.CellType


class KeptValues:
    """The values that one model keeps outside of its state dict, as they were when this was made.

    - ``generators``: The generators among them.

    Containers and objects are the same ones afterwards, with the values of before. An object that cannot be
    copied (it holds a file, a lock, a thread) stays as it is, and so does what a Python module holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self.generators: list[Any] = []
        self._states: list[Any] = []
        self._modules: list[tuple[Any, dict[str, Any]]] = []
        self._buffers: list[tuple[Any, str, Tensor]] = []
        self._arrays: list[tuple[Any, Any, int]] = []  # an array, its values, and a tensor's version
        self._holders: list[tuple[Any, Any]] = []
        self._kept: set[int] = {id(module) for module in model.modules()}
        found, seen = [*model.modules()], set[int]()
        while found:
            value = found.pop()
            if not isinstance(value, _CONSTANT) and id(value) not in seen:
                seen.add(id(value))
                found += self._visit_module(value) if isinstance(value, nn.Module) else self._visit(value)

    def _visit(self, value: Any) -> Iterable[Any]:
        """Note a value, and return what it holds."""
        held: Iterable[Any] = ()
        frozen = getattr(type(value), "__dataclass_params__", None)
        if isinstance(value, tuple | frozenset):
            held = value
        elif frozen is not None and frozen.frozen:
            held = [getattr(value, field.name) for field in fields(value)]
        elif isinstance(value, _GENERATORS) and (state := generator_state(value)) is not None:
            self.generators.append(value)
            self._states.append(state)
        elif isinstance(value, np.ndarray):
            self._arrays.append((value, value.copy(), 0))
        elif isinstance(value, Tensor):
            if value.layout is torch.strided and not value.is_meta:
                self._arrays.append((value, value.detach().clone(), value._version))
        elif isinstance(value, types.FunctionType):
            held = *(value.__closure__ or ()), *(value.__defaults__ or ())
        elif isinstance(value, types.MethodType):
            held = (value.__self__,)
        elif isinstance(value, functools.partial):
            held = value.func, value.args, value.keywords
        elif isinstance(value, _HOLDERS) or (hasattr(value, "__dict__") and _has_copies(value)):
            self._holders.append((value, kept := _values(value)))
            held = kept.values() if isinstance(kept, dict) else kept
        return held

    def _visit_module(self, module: nn.Module) -> Iterable[Any]:
        """Note a module's attributes and buffers, and return what it holds."""
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        self._modules.append((ref(module), own))
        # A module that is none of the model's, such as one in a list, is in no state dict.
        kept = module._non_persistent_buffers_set if id(module) in self._kept else module._buffers
        for name in sorted(kept):
            if (value := module._buffers.get(name)) is not None:
                self._buffers.append((ref(module), name, value.detach().clone()))
        return *own.values(), *module._modules.values()

    @property
    def moved(self) -> bool:
        """Whether a value differs."""
        return (
            any(not _alike(_own(module()), own) for module, own in self._modules)
            or any(not _equal(module()._buffers[name], value) for module, name, value in self._buffers)
            or any(not _equal(array, value) for array, value, _ in self._arrays)
            or any(not _alike(_values(holder), value) for holder, value in self._holders)
            or any(map(_differ, map(generator_state, self.generators), self._states))
        )

    def restore(self) -> None:
        """Set all values back."""
        for module, own in self._modules:
            attributes = vars(module())
            for name in attributes.keys() - own.keys() - _OF_TORCH:
                del attributes[name]
            attributes.update(own)
        for holder, held in self._holders:
            _set(holder, held)
        for generator, state in zip(self.generators, self._states, strict=True):
            set_generator_state(generator, state)
        with torch.no_grad():
            for module, name, value in self._buffers:
                now = module()._buffers[name]
                if now is not None and now.shape == value.shape:
                    now.copy_(value)
                else:
                    module()._buffers[name] = value.clone()
            for i, (array, value, version) in enumerate(self._arrays):
                if isinstance(array, np.ndarray):
                    if not _equal(array, value):
                        array[...] = value
                elif array._version != version:
                    array.detach().copy_(value)
                    self._arrays[i] = array, value, array._version


@contextmanager
def values_kept(model: nn.Module) -> Iterator[KeptValues]:
    """Set the model's values outside of its state dict back on leaving."""
    values = KeptValues(model)
    try:
        yield values
    finally:
        values.restore()


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _values(holder: Any) -> Any:
    """Return a shallow copy of what an object holds: a list, or a dictionary by key or attribute."""
    if isinstance(holder, types.CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # empty
            return []
    if isinstance(holder, list | set | deque):
        return list(holder)
    return dict(holder if isinstance(holder, dict) else vars(holder))


def _set(holder: Any, held: Any) -> None:
    if isinstance(holder, types.CellType):
        if held:
            holder.cell_contents = held[0]
    elif isinstance(holder, list):
        holder[:] = held
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(held)
    else:
        own = holder if isinstance(holder, set | dict) else vars(holder)
        own.clear()
        own.update(held)


def generator_state(value: object) -> Any:
    """Return a generator's state; None for any other object, and for one without a state (SystemRandom)."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if type(value) is random.Random:
        return value.getstate()
    return value.get_state() if isinstance(value, torch.Generator) else None


def set_generator_state(value: Any, state: Any) -> None:
    """Set a generator to a state of ``generator_state``."""
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        value.set_state(state)


def _differ(one: Any, other: Any) -> bool:
    """Return whether two states of a generator differ."""
    if isinstance(one, Tensor):
        return not torch.equal(one, other)
    return pickle.dumps(one) != pickle.dumps(other)


def _alike(one: Any, other: Any) -> bool:
    """Return whether two shallow copies hold the same objects, or equal numbers and texts."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(map(_same, one.values(), other.values()))
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | int | float) and bool(one == other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() == other.tobytes())
    return one is not None and torch.equal(one.to(other.device), other)


def _has_copies(value: Any) -> bool:
    """Return whether an object holds values only: no file, lock or thread."""
    try:
        copy.deepcopy(value)
    except Exception:  # whatever a class raises
        return False
    return True
