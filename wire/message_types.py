"""The types of the messages between the suite's strategies and its ClientApps.

Flower's own ``train`` and ``evaluate`` are used too. A plain ClientApp registers a handler by the part after
the dot: ``@app.query("publish")`` answers ``PUBLISH``.
"""

# The version of all messages, which is part of a node's introduction, see docs/formats.md.
MESSAGE_FORMAT = 1
# Every node: who it is; what it keeps between rounds, and to take it back.
WHOAMI = "query.whoami"
STATE, RESTORE = "query.state", "query.restore"
# Nodes with their own data: moments of the features; the common mean and deviation.
STATISTICS, STANDARDISE = "query.statistics", "query.standardise"
# Secure sums: a node's public keys; the shares that unmask a sum.
SUM_KEYS, SUM_SHARES = "query.sum_keys", "query.sum_shares"
# SD-FEEL's edge servers that are nodes: the mean of the clients' models; one gossip step.
INTRA, GOSSIP = "train.intra", "train.gossip"
# Gossip: a node's settings; its payloads for its neighbours; its model for the monitor.
HELLO, PUBLISH, MONITOR = "query.hello", "query.publish", "query.monitor"
# Gossip: the communication step. HSGD: the local steps of an interval.
UPDATE = "train.update"
# HSGD: the ids of a party's people; the encodings of a batch.
PAIR, EXCHANGE = "query.pair", "train.exchange"
# HSGD on own data: sums of features, and labels for devices; the masks of devices' sums; the terms of the
# run; encodings of people who do not train, and their scores.
POOL, UNMASK, SETUP = "query.pool", "query.unmask", "query.setup"
ENCODE, SCORE = "evaluate.encode", "evaluate.score"
# FedMUD: merges for nodes that do not train in a round.
MERGE = "query.merge"
# Errors of a node without a monitor, or without a handler of the type: the server does not ask again.
NO_MONITOR = "this node answers no monitor"
NO_MESSAGE = "this node does not answer messages of this type"
# SimilarityFree: curvature and gradient variance at a model. SD-FEEL: these and the gradient, which reveals
# as much about the data as an update and counts as training in a node's policy.
PROBE, GRADIENT = "query.probe", "train.gradient"
