"""The layers of a model that a node trains and keeps itself, and that no message has.

Papers: M. G. Arivazhagan et al., "Federated Learning with Personalization Layers" (FedPer: the last layers);
X. Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from flwr.app import RecordDict
from torch import Tensor

from hedgerow.clients.instructions import only_config
from hedgerow.clients.node_state import NodeState
from hedgerow.wire.calls import Call
from hedgerow.wire.frozen import LOCAL_LAYERS, local_keys

_MEMORY = "local-layers"


def asks_for_layers(call: Call) -> bool:
    """Return whether the message asks the node to keep layers of its own."""
    return any(LOCAL_LAYERS in config for config in call.content.config_records.values())


def kept_here(call: Call, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of the layers that the message asks the node to keep."""
    patterns = only_config(call).get(LOCAL_LAYERS, "")
    return local_keys(str(patterns), keys) if patterns else ()


def own_layers(call: Call, home: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the node's own layers, as its last reply that counted left them; else of ``home``."""
    if not (keys := kept_here(call, home)):
        return {}
    last = NodeState.of(call, _MEMORY).arrays
    return {
        key: torch.tensor(last[key]).to(home[key])
        if key in last and last[key].shape == home[key].shape
        else home[key].clone()
        for key in keys
    }


def keep_layers(call: Call, state: Mapping[str, Tensor]) -> None:
    """Keep the trained layers of a reply."""
    NodeState.of(call, _MEMORY).keep(state)


def each_its_own(calls: Sequence[Call]) -> Sequence[Call]:
    """Return calls that share no content if their nodes have own layers, and so different models."""
    return [
        replace(call, content=RecordDict({**call.content})) if asks_for_layers(call) else call
        for call in calls
    ]
