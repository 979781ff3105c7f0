"""The server's side: strategies that decide and aggregate, and the planners beside them."""

from hedgerow.strategies.aggregate import (
    Aggregator,
    FlowerAggregation,
    Mean,
    Robust,
    ServerUpdate,
    WeightedMean,
    means_of,
)
from hedgerow.strategies.aggregate.secure_sums import SecureSum
from hedgerow.strategies.aggregate.sum_noise import SumNoise
from hedgerow.strategies.buffer import Buffer
from hedgerow.strategies.ceps import (
    BEER,
    CEPS,
    DCDPSGD,
    DPDSGT,
    DPSGD,
    SGP,
    ChocoSGD,
    DFedAvgM,
    DFedSAM,
    Matcha,
    OneBitCode,
)
from hedgerow.strategies.ceps.privacy import Privacy
from hedgerow.strategies.compressed import Compressed
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import (
    Ask,
    Coding,
    Columns,
    Exchange,
    Models,
    Question,
    RoundFailedError,
    Row,
    Steps,
    Together,
    together,
)
from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.fedmud import EF21P, FedBAT, FedExLoRA, FedHM, FedLMT, FedMUD, FedPara, LoRA
from hedgerow.strategies.gossip import (
    DivergenceError,
    Gossip,
    GossipMethod,
    Monitor,
    NoisyReleases,
    PayloadSizes,
    Site,
)
from hedgerow.strategies.hsgd import (
    HSGD,
    Adaptive,
    EmbeddingNoise,
    ModelledSystem,
    PairingError,
    Probing,
    UploadNoise,
)
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.method import Method
from hedgerow.strategies.node import Node, Shapes
from hedgerow.strategies.own_data import OwnNodes
from hedgerow.strategies.parts import (
    Acknowledgements,
    CompressedChanges,
    EngineTime,
    ErrorFeedback,
    Part,
    ServerAdagrad,
    ServerAdam,
    ServerMomentum,
    ServerStep,
    ServerYogi,
)
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.round_end import EvaluateFn, RoundCallback, RoundEnd, TooFewRepliesError
from hedgerow.strategies.router import NODE_TO_NODE, Router
from hedgerow.strategies.scaffold import Scaffold
from hedgerow.strategies.schedules import Diminishing, Fixed, Schedule, StepDecay
from hedgerow.strategies.sd_feel import (
    EdgeServerSDFeel,
    FedAvg,
    Feel,
    HierFAvg,
    SDFeel,
    Stragglers,
)
from hedgerow.strategies.similarity_free import InnerSolver, SimilarityFree
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.strategies.topology import (
    DIRECTED_TOPOLOGIES,
    TOPOLOGIES,
    Mixing,
    as_digraph,
    as_graph,
    laplacian,
    metropolis,
    mixing,
    push_weights,
)
from hedgerow.strategies.whoami import RosterError
from hedgerow.wire.links.peers import PeerCredentials

# Names of earlier states.
Run, Moved = RoundContext, ServerUpdate

__all__ = [
    "BEER",
    "CEPS",
    "DCDPSGD",
    "DIRECTED_TOPOLOGIES",
    "DPDSGT",
    "DPSGD",
    "EF21P",
    "HSGD",
    "NODE_TO_NODE",
    "SGP",
    "TOPOLOGIES",
    "Acknowledgements",
    "Adaptive",
    "Aggregator",
    "Ask",
    "Buffer",
    "ChocoSGD",
    "Coding",
    "Columns",
    "Compressed",
    "CompressedChanges",
    "DFedAvgM",
    "DFedSAM",
    "Diminishing",
    "DivergenceError",
    "EdgeServerSDFeel",
    "EmbeddingNoise",
    "EngineTime",
    "ErrorFeedback",
    "EvaluateFn",
    "Exchange",
    "FedAvg",
    "FedBAT",
    "FedExLoRA",
    "FedHM",
    "FedLMT",
    "FedMUD",
    "FedPara",
    "FederatedStrategy",
    "Federation",
    "Feel",
    "Fixed",
    "FlowerAggregation",
    "Gossip",
    "GossipMethod",
    "HierFAvg",
    "InnerSolver",
    "LoRA",
    "Matcha",
    "Mean",
    "Method",
    "Mixing",
    "ModelledSystem",
    "Models",
    "Monitor",
    "Node",
    "NoisyReleases",
    "OneBitCode",
    "OwnNodes",
    "PairingError",
    "Part",
    "PayloadSizes",
    "PeerCredentials",
    "Privacy",
    "Probing",
    "Question",
    "Registry",
    "Reply",
    "Robust",
    "Roster",
    "RosterError",
    "RoundCallback",
    "RoundContext",
    "RoundEnd",
    "RoundFailedError",
    "Router",
    "Row",
    "SDFeel",
    "Scaffold",
    "Schedule",
    "SecureSum",
    "ServerAdagrad",
    "ServerAdam",
    "ServerMomentum",
    "ServerStep",
    "ServerUpdate",
    "ServerYogi",
    "Shapes",
    "SimilarityFree",
    "Site",
    "StepDecay",
    "Steps",
    "Stragglers",
    "SumNoise",
    "Together",
    "TooFewRepliesError",
    "UploadNoise",
    "WeightedMean",
    "as_digraph",
    "as_graph",
    "laplacian",
    "means_of",
    "metropolis",
    "mixing",
    "only_arrays",
    "push_weights",
    "together",
]
