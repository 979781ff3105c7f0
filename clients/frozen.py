"""The frozen arrays of a model at a node: its own, verified by the run's checksum."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from torch import Tensor

from hedgerow.clients.local_task import LocalTask
from hedgerow.clients.training.work import StackRow
from hedgerow.wire.calls import Call
from hedgerow.wire.frozen import FROZEN, FROZEN_CHECKSUM, checksum_of
from hedgerow.wire.records import view

# The last verified arrays of this process, by checksum and keys, each on its device. Never change them.
_VERIFIED: OrderedDict[tuple[str, frozenset[str], torch.device], dict[str, Tensor]] = OrderedDict()
_MOST = 4


def stored(call: Call) -> Call:
    """Store the frozen arrays that a message has in the node's context; return it without them."""
    if not isinstance(record := call.content[FROZEN], ArrayRecord):
        return call
    call.context.state[FROZEN] = record
    rest = RecordDict({key: one for key, one in call.content.items() if key != FROZEN})
    return Call(rest, call.context, call.message_type, call.app)


def at_home(
    config: ConfigRecord, context: Context, task: LocalTask, keys: Collection[str]
) -> dict[str, Tensor]:
    """Return the arrays that a message does not have, on the task's device; shared: never change them.

    ValueError if the message has no checksum of them, or neither the node's model nor the run's initial one
    nor what the server sent has it.
    """
    expected = config.get(FROZEN_CHECKSUM)
    device = task.x.device
    known = (str(expected), frozenset(keys), device)
    if known not in _VERIFIED:
        if not isinstance(expected, str):
            raise ValueError(
                f"the message's arrays must have all keys of the model, got none for {sorted(keys)}"
            )
        for state in _candidates(context, task):
            if all(key in state for key in keys) and checksum_of(state, keys) == expected:
                _VERIFIED[known] = {key: state[key].detach().clone().to(device) for key in keys}
                break
        else:
            raise ValueError(
                f"this node must hold the run's frozen arrays, such as {min(keys)}, got others: the server "
                "sends them with the next message"
            )
        while len(_VERIFIED) > _MOST:
            _VERIFIED.popitem(last=False)
    return dict(_VERIFIED[known])


def _candidates(context: Context, task: LocalTask) -> Iterator[Mapping[str, Tensor]]:
    yield task.model.state_dict()
    if FROZEN in context.state.array_records:
        own = task.model.state_dict()
        for_model = context.state.array_records[FROZEN]
        yield {k: torch.tensor(view(a)).to(own[k].dtype) for k, a in for_model.items() if k in own}
    if task.initial is not None:
        yield task.initial().state_dict()


def check_unchanged(home: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if training has changed a frozen array."""
    if isinstance(state, StackRow):  # Stacks write only what is averaged.
        return
    for key, value in home.items():
        if not torch.equal(_bits(state[key].to(value)), _bits(value)):
            raise ValueError(
                f"training must leave {key!r} as it is, which the run takes for frozen: pass frozen=() to "
                "the strategy, or the keys that no training changes"
            )


def _bits(value: Tensor) -> Tensor:
    """Return a tensor's bytes: NaN equals itself there, and every dtype can be compared."""
    return value.detach().reshape(-1).contiguous().view(torch.uint8)
