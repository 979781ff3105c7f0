"""The types of the messages between the suite's strategies and its ClientApps.

Beside them stand Flower's own ``train`` and ``evaluate``. A handler of a plain ClientApp is registered by the
part after the dot: ``@app.query("publish")`` answers ``PUBLISH``.
"""

__all__ = [
    "ENCODE",
    "EXCHANGE",
    "GOSSIP",
    "GRADIENT",
    "HELLO",
    "INTRA",
    "MERGE",
    "MESSAGE_FORMAT",
    "MONITOR",
    "NO_MESSAGE",
    "NO_MONITOR",
    "PAIR",
    "POOL",
    "PROBE",
    "PUBLISH",
    "RESTORE",
    "SCORE",
    "SETUP",
    "STANDARDISE",
    "STATE",
    "STATISTICS",
    "SUM_KEYS",
    "SUM_SHARES",
    "UNMASK",
    "UPDATE",
    "UPLOAD",
    "WHOAMI",
]

# The version of all messages, which a node tells when it introduces itself, as docs/formats.md says.
MESSAGE_FORMAT = 1
# Every node: who it is; what it keeps between rounds, and to take it back.
WHOAMI = "query.whoami"
STATE, RESTORE = "query.state", "query.restore"
# Nodes with data of their own: moments of the features; what all of them take off and divide by.
STATISTICS, STANDARDISE = "query.statistics", "query.standardise"
# Secure sums: a node's public keys; what takes the masks off a sum.
SUM_KEYS, SUM_SHARES = "query.sum_keys", "query.sum_shares"
# SD-FEEL's edge servers, where they are nodes: take the mean of the clients' models; take one gossip step.
INTRA, GOSSIP = "train.intra", "train.gossip"
# Gossip: a node is told its settings; tells its neighbours its state; takes theirs; shows its model.
HELLO, PUBLISH, MONITOR = "query.hello", "query.publish", "query.monitor"
# Gossip: the communication step. HSGD: the local steps of an interval.
UPDATE = "train.update"
# HSGD: whose people a party has; the encodings of a batch; within a secure sum, what the steps made.
PAIR, EXCHANGE, UPLOAD = "query.pair", "train.exchange", "train.upload"
# HSGD on own data: sums of features and what devices lack of labels; the masks of devices' sums; what was
# agreed on; encodings of people who do not train, and how well they are told.
POOL, UNMASK, SETUP = "query.pool", "query.unmask", "query.setup"
ENCODE, SCORE = "evaluate.encode", "evaluate.score"
# FedMUD: merges for nodes that do not train in a round.
MERGE = "query.merge"
# What a node says that answers no monitor, or no message of the type at all: a server need not ask again.
NO_MONITOR = "this node answers no monitor"
NO_MESSAGE = "this node does not answer messages of this type"
# SimilarityFree: curvature and gradient variance at a model. SD-FEEL: these and the gradient, which tells of
# the data what an update does, and is training to a node's policy.
PROBE, GRADIENT = "query.probe", "train.gradient"
