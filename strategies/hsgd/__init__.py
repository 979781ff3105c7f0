"""HSGD: hybrid vertical and horizontal learning of hospitals and devices, and its baselines.

Reading order: ``algorithm`` (Algorithm 1), ``means`` ((1) and (2)), ``exchange`` (the requests and replies
of a local interval), ``messages`` (their records, checks and bookings), ``strategy`` (the settings).

- Membership: ``parties`` (who is there, introductions, keys of sealed links) and ``membership`` (how parties
  form groups), with ``own_data`` for the parties' local data and ``evaluation`` of people held out there.
- Cost and privacy: ``costs`` and ``privacy``.
- Theory, and the choice of P, Q and eta: ``theory`` and ``adaptive``.
"""

from hedgerow.strategies.hsgd.adaptive import Adaptive, Probing
from hedgerow.strategies.hsgd.costs import ModelledSystem
from hedgerow.strategies.hsgd.own_data import OwnDataSetup
from hedgerow.strategies.hsgd.parties import PairingError
from hedgerow.strategies.hsgd.privacy import EmbeddingNoise, UploadNoise
from hedgerow.strategies.hsgd.strategy import HSGD

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
