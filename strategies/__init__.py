"""The server's side: strategies that decide and aggregate, and the planners beside them."""

from hedgerow.strategies.compressed import Compressed
from hedgerow.strategies.ef21p import EF21P
from hedgerow.strategies.exchange import Roster, RosterError
from hedgerow.strategies.factored import FedHM, FedLMT, FedPara
from hedgerow.strategies.fedbat import FedBAT
from hedgerow.strategies.fedmud import FedMUD
from hedgerow.strategies.rounds import RoundEnd, TooFewRepliesError
from hedgerow.strategies.sd_feel import FedAvg, Feel, HierFAvg, SDFeel
from hedgerow.strategies.similarity_free import InnerSolver, SimilarityFree
from hedgerow.strategies.topology import TOPOLOGIES, Mixing, as_graph, mixing

__all__ = [
    "EF21P",
    "TOPOLOGIES",
    "Compressed",
    "FedAvg",
    "FedBAT",
    "FedHM",
    "FedLMT",
    "FedMUD",
    "FedPara",
    "Feel",
    "HierFAvg",
    "InnerSolver",
    "Mixing",
    "Roster",
    "RosterError",
    "RoundEnd",
    "SDFeel",
    "SimilarityFree",
    "TooFewRepliesError",
    "as_graph",
    "mixing",
]
