"""The server's side: strategies that decide and aggregate, and the planners beside them."""

from hedgerow.strategies.exchange import Roster, RosterError
from hedgerow.strategies.rounds import RoundEnd, TooFewRepliesError
from hedgerow.strategies.sd_feel import FedAvg, Feel, HierFAvg, SDFeel
from hedgerow.strategies.topology import TOPOLOGIES, Mixing, as_graph, mixing

__all__ = [
    "TOPOLOGIES",
    "FedAvg",
    "Feel",
    "HierFAvg",
    "Mixing",
    "Roster",
    "RosterError",
    "RoundEnd",
    "SDFeel",
    "TooFewRepliesError",
    "as_graph",
    "mixing",
]
