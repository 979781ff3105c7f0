"""QSGD's quantiser: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization", 2017.

Q(v)_i = ||v|| sign(v_i) xi_i, where s xi_i is s |v_i| / ||v||, rounded by chance so that E Q(v) = v.
"""

import numpy as np
from flwr.app import Array, ArrayRecord

from hedgerow.strategies import Row
from hedgerow.wire import PayloadError, Purpose, generator


def quantised(v, levels, seed, round, node):
    """Return the norm of v and its signed levels, in [-s, s]."""
    stream = generator(seed, round=round, partition_id=node, purpose=Purpose.COMPRESSION)
    norm = float(np.linalg.norm(v))
    scaled = levels * np.abs(v) / norm if norm else np.zeros(v.shape)
    up = stream.random(v.shape) < scaled - np.floor(scaled)
    return norm, (np.sign(v) * (np.floor(scaled) + up)).astype(np.int8)


def restored(norm, signed, levels):
    return norm * signed.astype(np.float64) / levels


def bits(size, levels):
    """Return what the paper counts: a float, and sign and level of each entry."""
    return 32 + size * int(np.ceil(np.log2(2 * levels + 1)))


def packed(norm, signed):
    return ArrayRecord({"norm": Array(np.array([norm], np.float32)), "levels": Array(signed)})


class Quantised:
    """How the server reads a node's arrays: as a quantised change of the model that it was sent."""

    changes = True

    def __init__(self, levels):
        self.levels = levels

    def read(self, record, sent, layout, node):
        if set(record) != {"norm", "levels"}:
            raise PayloadError("wrong keys", f"{sorted(record)}")
        norm, signed = record["norm"].numpy(), record["levels"].numpy()
        if norm.shape != (1,) or not np.isfinite(norm).all() or norm[0] < 0:
            raise PayloadError("bad norm", f"{norm}")
        if signed.dtype != np.int8 or signed.shape != sent.shape or np.abs(signed).max() > self.levels:
            raise PayloadError("bad levels", f"{signed.dtype}{signed.shape}")
        return Row(restored(norm[0], signed, self.levels), self.bits(layout))

    def bits(self, layout):
        return bits(layout.size, self.levels)
