"""What the methods of the FedMUD family train at a node, and what they send.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), eqs. (3) to (9) and, for the baselines, its Section 5.
"""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from logging import INFO
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.clients.fedmud.factored_model import FactoredModel
from hedgerow.clients.fedmud.fedbat import BinarisedWork
from hedgerow.clients.fedmud.frozen_base import Evolution
from hedgerow.clients.instructions import (
    choice,
    flag,
    local_steps,
    only_config,
    positive,
    step_size,
    string,
    strings,
    whole,
)
from hedgerow.clients.local_task import LocalTask
from hedgerow.clients.sent_models import home_arrays
from hedgerow.clients.training.batches import DROP_LAST, augmented_work, epoch_batches, fails_on_one
from hedgerow.clients.training.work import Asked, LocalWork, State
from hedgerow.wire.calls import Call
from hedgerow.wire.compress import rand_k
from hedgerow.wire.elias_fano import added
from hedgerow.wire.frozen import FROZEN_CHECKSUM
from hedgerow.wire.layers import held_layers, trained_numbers
from hedgerow.wire.lowrank import BUDGETS, LAYOUTS, VARIANTS, VIEWS, Factorisation
from hedgerow.wire.records import finite_views, received_state
from hedgerow.wire.seeds import Purpose, torch_generator
from hedgerow.wire.sign_shares import SignUpdates

Work = LocalWork | BinarisedWork


@dataclass(frozen=True)
class Instruction:
    """A message to one node, and the node's task."""

    call: Call
    config: ConfigRecord
    task: LocalTask

    @classmethod
    def of(cls, call: Call, task: LocalTask) -> "Instruction":
        """Read a message; ValueError unless it has one ConfigRecord."""
        return cls(call, only_config(call), task)

    def method(self) -> "NodeMethod":
        """Return the requested method; ValueError if its keys are invalid."""
        return METHODS[choice(self.config, "method", tuple(METHODS))](self)

    @property
    def version(self) -> int:
        """The base's version nu."""
        return whole(self.config, "version", 0)

    @property
    def batch_size(self) -> int:
        """The mini-batch size B."""
        return whole(self.config, "batch-size", 1)

    @property
    def learning_rate(self) -> float:
        """The step size of local SGD."""
        return step_size(self.config, "learning-rate")

    @property
    def stream(self) -> dict[str, int]:
        """The seed of all draws of this node in this round."""
        return {
            "seed": whole(self.config, "seed", 0),
            "round": whole(self.config, "server-round", 0),
            "partition_id": self.call.partition_id,
        }

    def plan(self) -> Factorisation:
        """Return the message's factors for this node's model; ValueError if the server's differ."""
        config = self.config
        plan = _plan(
            self.task.model,
            keys=tuple(strings(config, "layers")),
            variant=choice(config, "variant", VARIANTS),
            ratio=positive(config, "ratio"),
            budget=choice(config, "budget", BUDGETS),
            init_a=positive(config, "init-a"),
            layout=choice(config, "layout", LAYOUTS),
            tight=flag(config, "tight"),
            view=choice(config, "view", VIEWS) if "view" in config else VIEWS[0],
        )
        if (sent := string(config, "fingerprint")) != plan.fingerprint:
            raise ValueError(
                f"fingerprint must be {plan.fingerprint!r}, that of this node's model, got {sent!r} in the "
                "message's config: server and node have different models"
            )
        return plan

    def compressed_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the compressed layers of a method without factors, by key."""
        return {
            layer.key: layer.shape for layer in held_layers(self.task.model, strings(self.config, "layers"))
        }

    def rest(self, compressed: Collection[str]) -> State:
        """Return the uncompressed arrays: copied, on the task's device, of the model's dtypes.

        Frozen ones are shared: never change them.

        A ValueError if keys or shapes do not match the model, or a value is not finite.
        """
        own = {k: v for k, v in self.task.model.state_dict().items() if k not in compressed}
        home = self.home(compressed)
        shapes = {key: tuple(value.shape) for key, value in own.items() if key not in home}
        sent = received_state(self._record("arrays"), shapes, self.task.x.device)
        return {key: value.to(own[key].dtype) for key, value in sent.items()} | home

    def home(self, compressed: Collection[str]) -> State:
        """Return the uncompressed frozen arrays, see ``clients/frozen.py``."""
        if FROZEN_CHECKSUM not in self.config:
            return {}
        there = {*compressed, *self._record("arrays")}
        return home_arrays(
            self.call, self.task, [key for key in self.task.model.state_dict() if key not in there]
        )

    def factors(self, plan: Factorisation) -> State:
        """Return the factors to start from: the message's, or freshly drawn ones; ValueError if invalid."""
        if plan.has_base and "factors" not in self.call.content.array_records:
            return plan.init(whole(self.config, "run-seed", 0), self.version)
        factors = {key: torch.tensor(values) for key, values in finite_views(self._record("factors")).items()}
        plan.check(factors)
        return factors

    def local_work(self, start: Mapping[str, Tensor]) -> LocalWork:
        """Return the local epochs from a start."""
        part, augmentation = self.task.part, self.task.augmentation
        epochs = local_steps(self.config, "local-epochs", len(part))
        size = self.batch_size
        batches = epoch_batches(
            part, **self.stream, epochs=epochs, batch_size=size, shortest=self._shortest()
        )
        asked = Asked(part, size, **self.stream, epochs=epochs, augmentation=augmentation)
        work = LocalWork(start, self.task.x, self.task.y, batches, self.learning_rate, asked)
        return augmented_work(work, augmentation, **self.stream)

    def batches_per_epoch(self) -> int:
        """Return the number of mini-batches of one local epoch."""
        full, rest = divmod(len(self.task.part), self.batch_size)
        return full + (rest >= self._shortest() if full and rest else rest > 0)

    def _shortest(self) -> int:
        """Return the size of the smallest last batch of an epoch that is used, by the run's ``drop-last``."""
        samples, size = len(self.task.part), self.batch_size
        drop = str(self.call.context.run_config.get("drop-last", "auto"))
        if drop not in DROP_LAST:
            raise ValueError(f"drop-last must be one of {', '.join(DROP_LAST)}, got {drop!r}")
        if drop != "auto":
            return size if drop == "always" else 1
        single = size > 1 and samples > size and samples % size == 1
        if not single or not fails_on_one(self.task.model, self.task.x[self.task.part[:1]]):
            return 1
        _log_drop(self.call.context.run_id, self.call.partition_id, samples)
        return 2

    def _record(self, name: str) -> ArrayRecord:
        records = self.call.content.array_records
        if name not in records:
            raise ValueError(f"the message must have the ArrayRecord {name!r}, got {sorted(records)}")
        return records[name]


@lru_cache(maxsize=4096)
def _log_drop(run_id: int, partition_id: int, samples: int) -> None:
    """Log once a run, in this process, what is left out."""
    log(
        INFO,
        "drop-last: each epoch leaves out one of node %d's %d samples, as the model cannot train on one",
        partition_id,
        samples,
    )


class NodeMethod:
    """A method at one node in one round. This class is the dense one, FedAvg, and the base of the others.

    ``model`` is the trained one, on the training device, as scratch space. ``compressed`` has the shapes of
    the coded weights, and ``evolution`` describes how their base is updated; None without a base. Missing or
    invalid keys of the instruction are ValueErrors.
    """

    model: nn.Module
    evolution: Evolution | None = None
    # Whether a part of the trained state is sent, not a code of its change.
    sends_state = True

    def __init__(self, instruction: Instruction) -> None:
        self.instruction, self.plan = instruction, instruction.plan()
        self.model = instruction.task.model
        self.compressed: Mapping[str, tuple[int, ...]] = {}

    def work(self, rest: State, base: State) -> Work:
        """Return the local training, from the uncompressed arrays and the base."""
        return self.instruction.local_work(rest | base)

    def sent(self, state: Mapping[str, Tensor], base: State) -> State:
        """Return the part of the trained state that is sent."""
        return dict(state)

    def summed_arrays(self, rest: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the arrays whose changes a secure sum adds up, in the order of the keys.

        ``rest`` are the uncompressed arrays. ValueError if the method's replies cannot be summed.
        """
        return dict(sorted(rest.items()))


class _Factored(NodeMethod):
    """Factors of updates of the base, or of the weights themselves."""

    model: FactoredModel

    def __init__(self, instruction: Instruction) -> None:
        super().__init__(instruction)
        self.run_seed = whole(instruction.config, "run-seed", 0)
        self.model = _wrapped(instruction.task.model, self.plan)
        self.compressed = {layer.key: layer.shape for layer in self.plan.layers}
        self.evolution = Evolution(self.compressed, "merges", self._merged) if self.plan.has_base else None

    def work(self, rest: State, base: State) -> Work:
        frozen = self.plan.frozen(self.run_seed, self.instruction.version)
        factors = self.instruction.factors(self.plan)
        return self.instruction.local_work(self.model.state_from(rest, factors, frozen, base))

    def sent(self, state: Mapping[str, Tensor], base: State) -> State:
        return self.model.factors_of(state) | self.model.rest_of(state)

    def summed_arrays(self, rest: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        factors = {key: value.numpy() for key, value in self.instruction.factors(self.plan).items()}
        return super().summed_arrays({**factors, **rest})

    def _merged(self, base: State, version: int, factors: Mapping[str, Tensor]) -> State:
        self.plan.check(factors)
        return self.plan.merge(base, factors, self.plan.frozen(self.run_seed, version))  # eq. (5)


class _FedEx(_Factored):
    """LoRA's factors, of a base to which the server adds products of other ranks (FedEx-LoRA)."""

    def _merged(self, base: State, version: int, factors: Mapping[str, Tensor]) -> State:
        return self.plan.of_ranks(factors).merge(base, factors, {})

    def summed_arrays(self, rest: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        raise ValueError("method must be 'factored' within a sum: the server multiplies each node's factors")


class _MovingWeights(NodeMethod):
    """Weights that server and nodes update in the same way; a method sets the code of a node's change."""

    sends_state = False

    def __init__(self, instruction: Instruction) -> None:
        super().__init__(instruction)
        self.compressed = instruction.compressed_shapes()
        self.evolution = Evolution(self.compressed, "updates", self.moved)

    @abstractmethod
    def moved(self, base: State, version: int, update: Mapping[str, Tensor]) -> State:
        """Return the weights after the server's update; ValueError if it is invalid."""

    def summed_arrays(self, rest: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        raise ValueError(
            "method must be 'factored' within a sum: others send other entries of each node, or signs"
        )


class _EF21P(_MovingWeights):
    """EF21-P (K. Gruntkowska et al., 2023): K entries of the weights' change are sent.

    Nodes hold w, which the server moves by Top-K of x - w. As in the experiments of S. Li et al. (FedMUD),
    the compressed change is that of several local epochs. The indices of Rand-K come from the seed, so only
    values are sent; the server may scale them by D / K, which makes them unbiased.
    """

    def __init__(self, instruction: Instruction) -> None:
        super().__init__(instruction)
        size, keep = sum(map(math.prod, self.compressed.values())), whole(instruction.config, "keep", 1)
        self.kept = rand_k(size, keep, **instruction.stream)

    def sent(self, state: Mapping[str, Tensor], base: State) -> State:
        rest = {key: value for key, value in state.items() if key not in base}
        change = torch.cat([(state[key] - value.to(state[key])).flatten() for key, value in base.items()])
        return rest | {"values": change[torch.from_numpy(self.kept).to(change.device)].to(torch.float32)}

    def moved(self, base: State, version: int, update: Mapping[str, Tensor]) -> State:
        whole = torch.cat([value.flatten() for value in base.values()]).numpy()
        moved = torch.from_numpy(added(whole, {key: value.numpy() for key, value in update.items()}))
        parts = torch.split(moved, [value.numel() for value in base.values()])
        return {key: part.reshape(base[key].shape) for key, part in zip(base, parts, strict=True)}


class _FedBAT(_MovingWeights):
    """FedBAT: a learnt bit per weight's change is sent, for all weights or those drawn."""

    def __init__(self, instruction: Instruction) -> None:
        super().__init__(instruction)
        sizes = {key: math.prod(shape) for key, shape in self.compressed.items()}
        self.code = SignUpdates(sizes, whole(instruction.config, "signs", 0), instruction.stream["seed"])

    def work(self, rest: State, base: State) -> Work:
        stream = torch_generator(**self.instruction.stream, purpose=Purpose.COMPRESSION)
        kept = self.code.drawn(self.instruction.version)
        return BinarisedWork(self.instruction.local_work(rest | base), base, stream, kept)

    def moved(self, base: State, version: int, update: Mapping[str, Tensor]) -> State:
        steps = self.code.read({key: value.numpy() for key, value in update.items()}, version)
        return {
            key: base[key] + torch.from_numpy(step).reshape(base[key].shape) for key, step in steps.items()
        }


METHODS: Mapping[str, type[NodeMethod]] = {
    "factored": _Factored,
    "fedex": _FedEx,
    "dense": NodeMethod,
    "ef21p": _EF21P,
    "fedbat": _FedBAT,
}


# A model's plans and wrapped copies are made once per process, not per node and round.


@lru_cache(maxsize=16)
def _plan(model: nn.Module, keys: Sequence[str], **arguments: Any) -> Factorisation:
    layers = held_layers(model, keys)
    trained = trained_numbers(model, layers)
    return Factorisation.plan(layers, num_parameters=trained, skip_front=0, skip_back=0, **arguments)


_wrapped = lru_cache(maxsize=4)(FactoredModel)
