"""EF21-P at a node: Rand-K up, and the server's Top-K down, as the strategy of the same name has them."""

import math

import numpy as np
import pytest
import torch

from hedgerow.clients.fedmud.ef21p import moved_by_largest, random_values
from hedgerow.strategies.fedmud import ef21p as server
from hedgerow.wire import LayerShape, encode_indices, rand_k, to_record, to_state_dict

LAYERS = (LayerShape("a.weight", (3, 4)), LayerShape("b.weight", (2, 1, 3, 3)))
D = 30
KEY = {"seed": 5, "round": 1, "partition_id": 2}


def weights(seed: int) -> dict[str, torch.Tensor]:
    stream = np.random.default_rng(seed)
    return {
        layer.key: torch.from_numpy(stream.normal(size=layer.shape).astype(np.float32)) for layer in LAYERS
    }


def coded(indices: list[int], size: int = D) -> torch.Tensor:
    return torch.from_numpy(encode_indices(np.array(indices), size))


def test_values_are_the_unscaled_entries_of_the_change() -> None:
    start, end = weights(0), weights(1)
    kept = rand_k(D, 7, **KEY)
    change = torch.cat([(end[key] - start[key]).flatten() for key in start])
    values = random_values(start, end, kept)
    assert values.dtype == torch.float32
    assert torch.equal(values, change[kept])


@pytest.mark.parametrize("scale", [True, False])
def test_rand_k_is_unbiased_where_the_server_scales_it(scale: bool) -> None:
    start, end, rounds = weights(0), weights(1), 4000
    method = server.BroadcastIterate(LAYERS, 32 * 6, scale, KEY["seed"])
    change = torch.cat([(end[key] - start[key]).flatten() for key in start]).numpy()
    total = np.zeros(D)
    for t in range(1, rounds + 1):
        kept = rand_k(D, method.keep, **{**KEY, "round": t})
        sent = to_record({"values": random_values(start, end, kept)})
        total += method.read(t, KEY["partition_id"], sent)
    expected = change * (1 if scale else method.keep / D)
    spread = np.abs(change).max() * (5 if scale else 1)
    assert np.abs(total / rounds - expected).max() < 5 * spread / math.sqrt(rounds)


def test_a_node_that_follows_holds_the_servers_iterate_bit_for_bit() -> None:
    method = server.BroadcastIterate(LAYERS, 32 * 6, True, 0)
    method.begin(weights(0))
    held = weights(0)
    for t in range(12):
        method.move(t, np.random.default_rng(t).normal(size=D))
        update = {k.partition("/")[2]: v for k, v in to_state_dict(method.log.since(t)).items()}
        held = moved_by_largest(held, update)
    assert all(torch.equal(held[key], value) for key, value in method.base().items())


def test_an_update_leaves_the_weights_that_it_is_added_to() -> None:
    held = weights(0)
    moved_by_largest(held, {"indices": coded([0, 29]), "values": torch.ones(2)})
    assert all(torch.equal(held[key], value) for key, value in weights(0).items())


@pytest.mark.parametrize(
    ("indices", "values", "match"),
    [
        (coded([0, 60], size=100), torch.ones(2), "bad padding|bad index"),
        (coded([0, 9])[:1], torch.ones(2), "wrong shape: indices have"),
        (coded([0, 9]).long(), torch.ones(2), "wrong dtype: indices are int64"),
        (coded([0, 9]).flip(0), torch.ones(2), "bad index|bad padding"),
        (coded([0, 9]), torch.ones(2, dtype=torch.float64), "values are torch.float64"),
        (coded([0, 9]), torch.ones(31), "K up to 30"),
        (None, torch.ones(1), r"keys \['values'\]; valid is \['indices', 'values'\]"),
    ],
)
def test_an_update_of_other_weights_is_refused(
    indices: torch.Tensor | None, values: torch.Tensor, match: str
) -> None:
    update = {"values": values} if indices is None else {"indices": indices, "values": values}
    with pytest.raises(ValueError, match=match):
        moved_by_largest(weights(0), update)
