"""Secure sums of every method that has them, with its real client: as the plain run, losses, refusals."""

import math

import numpy as np
import pytest
from flwr.app import RecordDict
from tests.strategies.summed_methods import (
    METHODS,
    N,
    distance,
    grid_of,
    run,
    task,
)
from tests.strategies.summing import LossyGrid

from hedgerow.strategies import Compressed, SecureSum
from hedgerow.wire import (
    MASKED,
    to_record,
    view,
)
from hedgerow.wire.masked_sums import Grid

# Within a sum models are cast to float32 once a round, in a plain run too.
FLOAT32 = 2**-23


def rounding(rounds: int) -> float:
    """Return how far rounding moves float32 models, where training does not make small differences large."""
    return rounds * (4 * Grid(N).error(SecureSum().clip, N, 0.5 * N) + 4 * FLOAT32)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_is_the_plain_one_within_the_rounding(name: str) -> None:
    make = METHODS[name][0]
    plain, before = run(make(), grid_of(name))
    summed, ends = run(make(secure_sum=True), grid_of(name))
    assert 0 < distance(summed, plain) < rounding(3)
    assert [(end.accepted, end.rejected) for end in ends] == [(N, {})] * 3
    assert ends[-1].iterations == before[-1].iterations
    if name in ("sd-feel", "fedavg by examples", "fedmud", "fedlmt"):
        assert ends[-1].train["train-loss"] == pytest.approx(before[-1].train["train-loss"], abs=1e-4)


@pytest.mark.parametrize("name", ["fedpaq", "fedmud+bkd"])
def test_a_server_that_sends_one_member_another_model_learns_nothing(name: str) -> None:
    def another(kind: str, node: int, content: RecordDict) -> RecordDict | None:
        if (kind, node) != ("train", 2):
            return None
        arrays = {key: view(array) + 0.5 for key, array in content["arrays"].items()}
        return RecordDict({**content, "arrays": to_record(arrays)})

    make, client = METHODS[name]
    _, ends = run(
        make(secure_sum=True, min_train_nodes=4), LossyGrid(N, client=client(task), push=another), rounds=1
    )
    # Nobody can open what that member sealed, nor it what the others did: there is no sum of all, and when
    # the round is tried again it is left out.
    assert ends[0].accepted == N - 1
    assert ends[0].rejected == {"sum not unmasked": N, "bad sum shares": 1}


@pytest.mark.parametrize("name", ["fedavg", "fedpaq", "fedmud"])
def test_a_server_reads_every_update_of_a_plain_run_and_none_of_a_summed_one(name: str) -> None:
    make = METHODS[name][0]
    plain, summed = grid_of(name), grid_of(name)
    run(make(), plain, rounds=1)
    run(make(secure_sum=True), summed, rounds=1)
    told = {
        node: np.concatenate([view(a).ravel() for r in c.array_records.values() for a in r.values()])
        for kind, node, c in plain.replies
        if kind == "train"
    }
    # What a plain run tells is the node's own model, another of each.
    assert len({one.tobytes() for one in told.values()}) == N
    masked = {node: view(c[MASKED][MASKED]) for kind, node, c in summed.replies if kind == "train"}
    for node, words in masked.items():
        # Uniform words: each bit is a coin, within five deviations, and no two nodes' are alike.
        bits = np.unpackbits(words.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / math.sqrt(bits.size)
        assert all(np.mean(words == other) < 0.05 for at, other in masked.items() if at != node)
    for kind, _, content in summed.replies:
        if kind == "train":
            metrics = {key for record in content.metric_records.values() for key in record}
            assert metrics <= {"num-steps", "base-version", "need-base"}
            assert set(content) == {MASKED, "shares", "metrics"}


def test_only_the_entries_that_all_keep_travel() -> None:
    grid = grid_of("fedpaq")
    run(METHODS["fedpaq"][0](secure_sum=True), grid, rounds=1)
    words = {view(c[MASKED][MASKED]).size for kind, _, c in grid.replies if kind == "train"}
    parameters = 8 * 12 + 12 + 12 * 12 + 12 + 12 * 3 + 3
    # And weight, share clipped, the loss, and that there is one.
    assert words == {int(0.3 * parameters) + 4}


# Refusals


def test_masked_updates_are_not_compressed() -> None:
    with pytest.raises(ValueError, match="strategy must have no secure_sum, got SimilarityFree with one"):
        Compressed(METHODS["fedavg"][0](secure_sum=True), "topk(0.1)")
