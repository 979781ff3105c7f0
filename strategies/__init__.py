"""The server's side: strategies that decide and aggregate, and the planners beside them."""

from hedgerow.strategies.ceps.baselines import DCDPSGD, DPDSGT, DPSGD, DFedAvgM, DFedSAM, Matcha
from hedgerow.strategies.ceps.strategy import CEPS, OneBitCode
from hedgerow.strategies.compressed import Compressed
from hedgerow.strategies.exchange import Roster, RosterError
from hedgerow.strategies.fedmud.ef21p import EF21P
from hedgerow.strategies.fedmud.factored import FedHM, FedLMT, FedPara
from hedgerow.strategies.fedmud.fedbat import FedBAT
from hedgerow.strategies.fedmud.strategy import FedMUD
from hedgerow.strategies.gossip.monitor import DivergenceError, Monitor
from hedgerow.strategies.gossip.strategy import Gossip, GossipMethod
from hedgerow.strategies.hsgd.adaptive import Adaptive
from hedgerow.strategies.hsgd.groups import PairingError
from hedgerow.strategies.hsgd.noise import EmbeddingNoise
from hedgerow.strategies.hsgd.probes import Probing
from hedgerow.strategies.hsgd.strategy import HSGD
from hedgerow.strategies.privacy import Privacy
from hedgerow.strategies.rounds import RoundEnd, TooFewRepliesError
from hedgerow.strategies.router import Router
from hedgerow.strategies.sd_feel.strategy import FedAvg, Feel, HierFAvg, SDFeel
from hedgerow.strategies.similarity_free.strategy import InnerSolver, SimilarityFree
from hedgerow.strategies.topology import TOPOLOGIES, Mixing, as_graph, mixing

__all__ = [
    "CEPS",
    "DCDPSGD",
    "DPDSGT",
    "DPSGD",
    "EF21P",
    "HSGD",
    "TOPOLOGIES",
    "Adaptive",
    "Compressed",
    "DFedAvgM",
    "DFedSAM",
    "DivergenceError",
    "EmbeddingNoise",
    "FedAvg",
    "FedBAT",
    "FedHM",
    "FedLMT",
    "FedMUD",
    "FedPara",
    "Feel",
    "Gossip",
    "GossipMethod",
    "HierFAvg",
    "InnerSolver",
    "Matcha",
    "Mixing",
    "Monitor",
    "OneBitCode",
    "PairingError",
    "Privacy",
    "Probing",
    "Roster",
    "RosterError",
    "RoundEnd",
    "Router",
    "SDFeel",
    "SimilarityFree",
    "TooFewRepliesError",
    "as_graph",
    "mixing",
]
