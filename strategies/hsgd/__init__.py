"""HSGD: hybrid vertical and horizontal learning of hospitals and devices, and its baselines."""

from hedgerow.strategies.hsgd.adaptive import Adaptive
from hedgerow.strategies.hsgd.groups import PairingError
from hedgerow.strategies.hsgd.noise import EmbeddingNoise, UploadNoise
from hedgerow.strategies.hsgd.own import OwnData
from hedgerow.strategies.hsgd.probes import Probing
from hedgerow.strategies.hsgd.strategy import HSGD
from hedgerow.strategies.hsgd.system import ModelledSystem

__all__ = [
    "HSGD",
    "Adaptive",
    "EmbeddingNoise",
    "ModelledSystem",
    "OwnData",
    "PairingError",
    "Probing",
    "UploadNoise",
]
