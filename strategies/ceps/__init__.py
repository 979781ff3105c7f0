"""CEPS: sparse decentralised learning with one-bit messages, and its baselines."""

from hedgerow.strategies.ceps.baselines import DCDPSGD, DPDSGT, DPSGD, DFedAvgM, DFedSAM, Matcha
from hedgerow.strategies.ceps.strategy import CEPS, OneBitCode

__all__ = ["CEPS", "DCDPSGD", "DPDSGT", "DPSGD", "DFedAvgM", "DFedSAM", "Matcha", "OneBitCode"]
