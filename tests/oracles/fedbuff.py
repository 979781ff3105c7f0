"""Algorithm 1 of J. Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", as one loop.

It is the documentation and the oracle of the buffered driver, and knows nothing of it. Time is simulated: a
client's reply comes a given number of seconds after it was sent the model. At one instant all replies are
taken, in the order of clients; then the free clients begin, with the newest model.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Update(NamedTuple):
    """The model after an update, when it was made, and of whom with which staleness, in order of arrival."""

    w: Array
    seconds: float
    taken: list[tuple[int, int]]


def run(
    w0: Array,
    trained: Callable[[int, int, Array], Array],
    *,
    weights: Sequence[float],
    seconds: Callable[[int, int], float],
    K: int,
    updates: int,
    concurrency: int,
    factor: Callable[[int], float] = lambda tau: 1 / np.sqrt(1 + tau),
    draw: Callable[[list[int], int, int], list[int]] = lambda free, count, sent: free[:count],
    lost: Callable[[int, int], bool] = lambda client, number: False,
) -> list[Update]:
    """Run Algorithm 1.

    ``trained(client, number, w)`` is what a client replies in its own round ``number``, which takes
    ``seconds(client, number)`` and may be ``lost``; ``draw`` selects the clients that begin.
    """
    w, version, now, sent = np.array(w0), 0, 0.0, 0
    numbers = [0] * len(weights)
    # Of each working client: when it replies, the version that it was sent, its round, and its update.
    working: dict[int, tuple[float, int, int, Array]] = {}
    buffer: list[tuple[int, int, Array]] = []
    made: list[Update] = []
    while len(made) < updates:
        if len(buffer) >= K:  # lines 9 to 11
            taken, buffer = buffer[:K], buffer[K:]
            total = sum(weights[i] for i, _, _ in taken)
            step = sum(weights[i] * factor(version - v) * delta for i, v, delta in taken) / total
            w = w + step
            made.append(Update(w, now, [(i, version - v) for i, v, _ in taken]))
            version += 1
            continue
        free = [i for i in range(len(weights)) if i not in working]
        count = concurrency - len(working)
        for i in draw(free, count, sent) if len(free) > count else free:
            numbers[i] = max(version + 1, numbers[i] + 1)
            reply = trained(i, numbers[i], w)
            working[i] = now + seconds(i, numbers[i]), version, numbers[i], reply - w
            sent += 1
        now = min(when for when, _, _, _ in working.values())
        for i in sorted(working):
            when, v, number, delta = working[i]
            if when == now:
                del working[i]
                if not lost(i, number):
                    buffer.append((i, v, delta))  # lines 6 to 8
    return made
