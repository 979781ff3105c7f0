"""HSGD: hybrid vertical and horizontal learning of hospitals and devices, and its baselines.

Reading order: ``algorithm`` (Algorithm 1), ``interval`` (its requests and replies), ``means`` ((1) and (2):
plain or robust), ``strategy`` (the settings).

- Membership: ``members``, with ``setup`` for dealt data and ``own`` for the parties' own data; these use
  ``parties``, ``introductions``, ``matching`` and ``groups``.
- Messages: ``messages``, ``links`` (open or sealed), ``conversation`` (exchanges outside training).
- Cost and privacy: ``books``, ``costs``, ``system``, ``noise``.
- Theory, and the choice of P, Q and eta: ``theory``, ``estimates``, ``probes``, ``adaptive``.
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
