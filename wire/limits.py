"""What one message may ask for at most, where nothing else that the receiver knows bounds it.

A size that a message declares is held against the model, the plan or the bytes at hand; these are for the
numbers that none of them bounds. They are far above what a run needs, and far below what ends a process.
"""

__all__ = [
    "MAX_EXAMPLES",
    "MAX_FEATURES",
    "MAX_PLACES",
    "MAX_SAMPLES",
    "MAX_STEPS",
    "MAX_WORD",
    "MAX_WORK_BYTES",
]

# Local steps, epochs or iterations.
MAX_STEPS = 2**20
# Samples of all mini-batches, 1 GiB of indices.
MAX_SAMPLES = 2**27
# Bytes of the sensing submatrix that a one-bit message is decoded with.
MAX_WORK_BYTES = 2**32
# Features of a sample, where a model is built for a shape that a message tells.
MAX_FEATURES = 2**24
# Examples that a node says it has: whole numbers up to it are exact in float64, and no sum overflows.
MAX_EXAMPLES = 2**53
# Places of a federation that takes as many as come.
MAX_PLACES = 100_000
# Characters of a name, role or group that a node introduces itself with.
MAX_WORD = 100
