"""Limits of numbers in a message that nothing else bounds.

A receiver checks a declared size against the model, the plan or the received bytes; these limits are for all
other numbers. They are far above what a run needs, and far below what would exhaust a process.
"""

# Local steps, epochs or iterations.
MAX_STEPS = 2**20
# Samples of all mini-batches, 1 GiB of indices.
MAX_SAMPLES = 2**27
# Bytes of the sensing submatrix for decoding a one-bit message.
MAX_WORK_BYTES = 2**32
# Features of a sample, if a model is built for a shape from a message.
MAX_FEATURES = 2**24
# Examples of a node: integers up to this are exact in float64.
MAX_EXAMPLES = 2**53
# A metric's size, far below what would make a weighted sum of many infinite.
MAX_METRIC = 1e30
# Nodes of a federation without a fixed number of nodes.
MAX_PLACES = 100_000
# Characters of a name, role or group in a node's introduction.
MAX_WORD = 100
