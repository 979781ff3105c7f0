"""HSGD: hybrid vertical and horizontal learning of hospitals and devices, and its baselines.

Reading order: ``algorithm`` (Algorithm 1, with its means (1) and (2)), ``exchange`` (the requests, replies
and bookings of a local interval), ``strategy`` (the settings).

- ``membership``: who is there, and how parties form groups; ``own_data`` on the parties' own data, with the
  evaluation of people held out there.
- ``privacy``: noise, and its account.
- ``theory``: costs, the bound, and plans; ``adaptive``: the choice of P, Q and eta during a run.
"""

from hedgerow.strategies.hsgd.adaptive import Adaptive, Probing
from hedgerow.strategies.hsgd.membership import PairingError
from hedgerow.strategies.hsgd.own_data import OwnDataSetup
from hedgerow.strategies.hsgd.privacy import EmbeddingNoise, UploadNoise
from hedgerow.strategies.hsgd.strategy import HSGD
from hedgerow.strategies.hsgd.theory import ModelledSystem

__all__ = [
    "HSGD",
    "Adaptive",
    "EmbeddingNoise",
    "ModelledSystem",
    "OwnDataSetup",
    "PairingError",
    "Probing",
    "UploadNoise",
]
