"""What a server that follows the protocol reads out of a run of HSGD, by what is on: attacks that are run.

A device learns from one person. In its first dense layer the change of a unit's weights is then that person's
features times the change of its bias: whatever is done to encodings, the upload tells the features.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from tests.strategies.hsgd.real_nodes import (
    BLOCKS,
    FEATURES,
    GROUPS,
    MODEL,
    PEOPLE,
    Server,
    World,
    arrays_of,
    run,
    strategy,
)
from torch.func import functional_call

from hedgerow.strategies import EmbeddingNoise, UploadNoise
from hedgerow.wire import SEAL_BYTES


def intervals(*quick: tuple[int, int]) -> Any:
    """Return the settings of P and Q, those that are not quick as slow ones."""
    every = [(1, 1), (4, 2), (20, 20)]
    marked = [pytest.param(*one, marks=() if one in quick else pytest.mark.slow) for one in every]
    return pytest.mark.parametrize(("P", "Q"), marked)


INTERVALS, OF_LABELS = intervals((4, 2)), intervals((1, 1))
NOISE = UploadNoise(1.0, 4.0)
Array = np.ndarray


def parameters(block: str, flat: Array) -> dict[str, torch.Tensor]:
    parts, start = {}, 0
    for key, value in BLOCKS[block].state_dict().items():
        parts[key] = torch.tensor(flat[start : start + value.numel()]).reshape(value.shape)
        start += value.numel()
    return parts


# Features, from what a party of one person uploads


def read_features(before: Array, after: Array, block: str) -> Array:
    """Return, of the unit that moved most, the change of its weights over that of its bias."""
    start, end = parameters(block, before.astype(np.float64)), parameters(block, after.astype(np.float64))
    (weight, bias, *_) = start
    moved = (end[bias] - start[bias]).numpy()
    unit = int(np.abs(moved).argmax())
    if not moved[unit]:
        return np.zeros(start[weight].shape[1])
    read: Array = (end[weight] - start[weight]).numpy()[unit] / moved[unit]
    return read


def of_devices(server: Server) -> Iterator[tuple[Array, Array]]:
    """Yield what is read of a device's person, and the truth, for each upload."""
    starts = [content for _, content, _ in sorted_by_node(server, "train.exchange")]
    ends = sorted_by_node(server, "train.update")
    for sent, (i, _, told) in zip(starts, ends, strict=True):
        if server.world.parties[i].role == "device":
            before, after = arrays_of(sent)["device"], arrays_of(told)["device"]
            yield read_features(before, after, "device"), server.world.parties[i].x[0].numpy()


def of_pairs(server: Server) -> Iterator[tuple[Array, Array]]:
    """Yield what is read of each person at its hospital, and the truth, from JFL's models of pairs."""
    started: dict[int, list[Array]] = {}
    for kind, i, content in server.sent:
        if kind == "train.exchange" and "hospital" in arrays_of(content):
            started.setdefault(i, []).append(arrays_of(content)["hospital"])
    for i, sent, told in server.asked("train.update"):
        if "hospital" in arrays_of(told):
            before, ids = started[i].pop(0), sent.config_records["config"]["ids"]
            for name, after in zip(ids, arrays_of(told)["hospital"], strict=True):  # type: ignore[arg-type]
                yield (
                    read_features(before, after, "hospital"),
                    server.world.x1[server.world.row(name)].numpy(),
                )


def sorted_by_node(server: Server, kind: str) -> list[tuple[int, RecordDict, RecordDict]]:
    return sorted(server.asked(kind), key=lambda one: one[0])


@lru_cache
def played(layout: str, P: int, Q: int, method: str, how: str) -> Server:
    """Return one recorded run: plain, with noisy encodings, sealed, or sealed with noisy uploads."""
    options: dict[str, Any] = {
        "plain": {},
        "noisy encodings": {"noise": EmbeddingNoise(1.0, 0.5, source="seed")},
        "sealed": {"sealed": True},
        "sealed and noisy": {"sealed": True, "upload_noise": NOISE},
    }[how]
    world = World(layout)
    _, ends, server = run(strategy(world, P, Q, method=method, **options), world, 2 if P == 1 else 1)
    epsilon = ends[-1].train.get("epsilon", math.inf)
    assert math.isfinite(epsilon) == (how == "sealed and noisy")
    return server


def errors(pairs: Iterator[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return each guess's relative error, and its cosine with the truth."""
    wrong, cosines = [], []
    for guess, truth in pairs:
        if not guess.any():  # Its ReLUs are all off, so that it does not learn.
            continue
        wrong.append(np.linalg.norm(guess - truth) / np.linalg.norm(truth))
        length = np.linalg.norm(guess) * np.linalg.norm(truth)
        cosines.append(abs(guess @ truth) / length if length else 0.0)
    return np.array(wrong), np.array(cosines)


def blind(count: int, features: int) -> float:
    """Return the mean cosine of guesses that know nothing with as many people."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 100 * count, features))
    return float(np.mean(abs((a * b).sum(1)) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)))


@INTERVALS
@pytest.mark.parametrize("how", ["plain", "noisy encodings", "sealed"])
def test_uploads_of_devices_tell_every_feature_whatever_is_done_to_encodings(
    how: str, P: int, Q: int
) -> None:
    wrong, _ = errors(of_devices(played("devices", P, Q, "hsgd", how)))
    assert len(wrong) >= 0.9 * GROUPS * PEOPLE * (2 if P == 1 else P // Q)
    # A division of two changes in float32, of which noise on encodings makes some small.
    assert wrong.max() < (1e-3 if how == "noisy encodings" else 1e-4)


@INTERVALS
def test_noisy_uploads_of_devices_tell_no_more_than_a_guess(P: int, Q: int) -> None:
    server = played("devices", P, Q, "hsgd", "sealed and noisy")
    wrong, cosines = errors(of_devices(server))
    assert np.median(wrong) > 0.8
    assert cosines.mean() < blind(len(cosines), FEATURES[1]) + 4 * 0.25 / math.sqrt(len(cosines))


@INTERVALS
@pytest.mark.parametrize("layout", ["devices", "edges"])
@pytest.mark.parametrize("how", ["plain", "sealed"])
def test_the_hospitals_features_are_in_the_models_of_jfls_pairs(
    how: str, layout: str, P: int, Q: int
) -> None:
    wrong, _ = errors(of_pairs(played(layout, P, Q, "jfl", how)))
    assert len(wrong) >= 0.9 * GROUPS * PEOPLE * (2 if P == 1 else 1)
    assert wrong.max() < 1e-4


@INTERVALS
@pytest.mark.parametrize("layout", ["devices", "edges"])
def test_noisy_models_of_pairs_tell_no_more_than_a_guess(layout: str, P: int, Q: int) -> None:
    wrong, cosines = errors(of_pairs(played(layout, P, Q, "jfl", "sealed and noisy")))
    assert np.median(wrong) > 0.8
    assert cosines.mean() < blind(len(cosines), FEATURES[0]) + 4 * 0.25 / math.sqrt(len(cosines))


# Labels in layout edges, from head, encodings and the head that is uploaded


def seen_rows(content: RecordDict, key: str, count: int, length: int) -> Array:
    """Return encodings as the server sees them: of a sealed share, what its bytes would be as numbers."""
    if key in arrays_of(content):
        return arrays_of(content)[key].astype(np.float64)
    share = content.config_records["sealed"][key][0]  # type: ignore[index]
    with np.errstate(invalid="ignore"):  # Of NaN that sealed bytes happen to be.
        numbers = np.frombuffer(share[SEAL_BYTES:], "<f4")[-count * length :].astype(np.float64)  # type: ignore[index]
    return np.tanh(np.nan_to_num(numbers).reshape(count, length))


def seen_head(content: RecordDict, start: Array) -> Array:
    """Return the head that a hospital tells; sealed, the server takes the last that it sent."""
    return arrays_of(content).get("head", start)


def solved_labels(head: Array, moved: Array, z1: Array, z2: Array) -> Array:
    """Return labels from a head's change: a sum over people of (p - y) times what the server knows."""
    theta = parameters("head", head.astype(np.float64))
    one, other = (torch.tensor(z) for z in (z1, z2))

    def logit(theta: dict[str, torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional_call(MODEL.head, theta, (a[None], b[None]))[0, 0]

    gradients = torch.func.vmap(torch.func.grad(logit), (None, 0, 0))(theta, one, other)
    columns = torch.cat([part.reshape(len(one), -1) for part in gradients.values()], 1).T.numpy()
    p = torch.sigmoid(torch.func.vmap(logit, (None, 0, 0))(theta, one, other)).numpy()
    residual = np.linalg.lstsq(columns, -moved, rcond=1e-6)[0]  # (p - y) times a positive number
    if not residual.any():
        return np.zeros(len(p))
    # Of its sign alone where the steps were many: p is between 0 and 1.
    return (residual < 0).astype(float) if np.isfinite(residual).all() else (p > 0.5).astype(float)


def labels_right(server: Server, P: int, Q: int) -> Array:
    """Return for each label that is read whether it is right."""
    right = []
    for m in range(GROUPS):
        edge = GROUPS + m
        exchanged = {i: [one for one in server.asked("train.exchange") if one[0] == i] for i in (m, edge)}
        updated = [one for one in server.asked("train.update") if one[0] == m]
        start = np.zeros(0)
        for number, (_, sent, told) in enumerate(exchanged[m]):
            start = arrays_of(sent).get("head", start)
            head = seen_head(told, start)
            later = exchanged[m][number + 1][2] if (number + 1) % (P // Q) else updated[number][2]
            after = arrays_of(later).get("head", start)
            ids = list(sent.config_records["config"]["ids"])  # type: ignore[arg-type]
            z1 = seen_rows(told, "zeta1", len(ids), MODEL.hospital_encoding)
            z2 = seen_rows(exchanged[edge][number][2], "zeta2", len(ids), MODEL.device_encoding)
            guess = solved_labels(head, (after - head).astype(np.float64), z1, z2)
            truth = np.array([server.world.y[server.world.row(name)] for name in ids])
            right += list(guess == truth)
    return np.array(right)


def over_seeds(how: dict[str, Any], P: int, Q: int, count: int) -> Array:
    """Return the same over some runs; all take part, as many of each class: how many, the head tells."""
    world, right = World("edges"), []
    for seed in range(count):
        hsgd = strategy(world, P, Q, seed=seed, **how)
        _, _, server = run(hsgd, world, 2 if P == 1 else 1)
        right.append(labels_right(server, P, Q))
    return np.concatenate(right)


@OF_LABELS
def test_labels_are_in_head_encodings_and_uploaded_head_of_a_plain_run(P: int, Q: int) -> None:
    right = over_seeds({}, P, Q, 1 if Q == 1 else 2)
    assert right.mean() == 1.0 if Q == 1 else right.mean() > 0.9


@OF_LABELS
@pytest.mark.parametrize("noisy", [False, True])
def test_labels_are_not_in_what_the_server_sees_of_a_sealed_run(
    P: int, Q: int, noisy: bool, devices: Any
) -> None:
    how: dict[str, Any] = {"sealed": True, **({"upload_noise": NOISE} if noisy else {})}
    right = over_seeds(how, P, Q, 6 if P == 20 else 3)
    assert len(right) == 96
    assert right.mean() < 0.5 + 4.5 * 0.5 / math.sqrt(len(right))


# Labels in JFL, both layouts, from each pair's uploaded head alone


def signs_right(server: Server) -> Array:
    """Return for each pair whether its label is the sign in which the last bias of its head moved."""
    right = []
    started: dict[int, list[Array]] = {}
    for kind, i, content in server.sent:
        if kind == "train.exchange" and "head" in arrays_of(content):
            started.setdefault(i, []).append(arrays_of(content)["head"])
    for i, sent, told in server.asked("train.update"):
        if "head" in arrays_of(told):
            before, ids = started[i].pop(0)[-1], sent.config_records["config"]["ids"]
            for name, after in zip(ids, arrays_of(told)["head"], strict=True):  # type: ignore[arg-type]
                right.append((after[-1] > before) == server.world.y[server.world.row(name)].item())
    return np.array(right)


def test_the_last_bias_is_where_the_labels_are_looked_for() -> None:
    *_, (name, last) = BLOCKS["head"].state_dict().items()
    assert name.endswith("bias")
    assert last.shape == (1,)


@INTERVALS
@pytest.mark.parametrize("layout", ["devices", "edges"])
@pytest.mark.parametrize("how", ["plain", "sealed"])
def test_the_label_of_a_pair_of_jfl_is_in_its_uploaded_head(how: str, layout: str, P: int, Q: int) -> None:
    right = signs_right(played(layout, P, Q, "jfl", how))
    assert len(right) >= GROUPS * PEOPLE
    assert right.all()


@INTERVALS
def test_noisy_heads_of_pairs_tell_no_more_of_the_label_than_a_guess(P: int, Q: int) -> None:
    world, right = World("edges"), []
    for seed in range(8):
        hsgd = strategy(world, P, Q, method="jfl", upload_noise=NOISE, seed=seed)
        right.append(signs_right(run(hsgd, world, 1)[2]))
    found = np.concatenate(right)
    assert len(found) == 8 * GROUPS * PEOPLE
    assert found.mean() < 0.5 + 4.5 * 0.5 / math.sqrt(len(found))
