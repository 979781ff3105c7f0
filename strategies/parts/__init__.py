"""Additions to a run beside its algorithm; no part knows a method."""

from hedgerow.strategies.parts.acknowledgements import Acknowledgements
from hedgerow.strategies.parts.compression import CompressedChanges, ErrorFeedback
from hedgerow.strategies.parts.downlink import SYNCS, Downlink, Download, Sync, UpdateLog
from hedgerow.strategies.parts.followed import Followed
from hedgerow.strategies.parts.iterations import LocalIterations
from hedgerow.strategies.parts.part import Part, Parts
from hedgerow.strategies.parts.server_step import ServerStep

__all__ = [
    "SYNCS",
    "Acknowledgements",
    "CompressedChanges",
    "Downlink",
    "Download",
    "ErrorFeedback",
    "Followed",
    "LocalIterations",
    "Part",
    "Parts",
    "ServerStep",
    "Sync",
    "UpdateLog",
]
