"""Additions to a run beside its algorithm; no part knows a method."""

from hedgerow.strategies.parts.acknowledgements import Acknowledgements
from hedgerow.strategies.parts.compression import CompressedChanges, ErrorFeedback
from hedgerow.strategies.parts.downlink import SYNCS, Downlink, Download, Sync, UpdateLog
from hedgerow.strategies.parts.engine_time import EngineTime
from hedgerow.strategies.parts.followed import Followed
from hedgerow.strategies.parts.iterations import LocalIterations
from hedgerow.strategies.parts.part import Part, Parts
from hedgerow.strategies.parts.server_optimisers import (
    ServerAdagrad,
    ServerAdam,
    ServerMomentum,
    ServerYogi,
    parse_server_step,
)
from hedgerow.strategies.parts.server_step import ServerStep

__all__ = [
    "SYNCS",
    "Acknowledgements",
    "CompressedChanges",
    "Downlink",
    "Download",
    "EngineTime",
    "ErrorFeedback",
    "Followed",
    "LocalIterations",
    "Part",
    "Parts",
    "ServerAdagrad",
    "ServerAdam",
    "ServerMomentum",
    "ServerStep",
    "ServerYogi",
    "Sync",
    "UpdateLog",
    "parse_server_step",
]
