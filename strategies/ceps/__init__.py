"""CEPS: sparse decentralised learning with one-bit messages, and its baselines."""

from hedgerow.strategies.ceps.baselines import (
    BEER,
    DCDPSGD,
    DPDSGT,
    DPSGD,
    SGP,
    ChocoSGD,
    DFedAvgM,
    DFedSAM,
    Matcha,
)
from hedgerow.strategies.ceps.strategy import CEPS, OneBitCode

__all__ = [
    "BEER",
    "CEPS",
    "DCDPSGD",
    "DPDSGT",
    "DPSGD",
    "SGP",
    "ChocoSGD",
    "DFedAvgM",
    "DFedSAM",
    "Matcha",
    "OneBitCode",
]
