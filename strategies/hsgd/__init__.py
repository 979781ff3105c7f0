"""HSGD: hybrid vertical and horizontal learning of hospitals and devices, and its baselines.

To read in this order: ``algorithm`` (Algorithm 1), ``interval`` (what its exchanges ask and how replies are
read), ``means`` ((1) and (2), plain, robust or within secure sums), ``strategy`` (what a user sets).

- Who takes part: ``members`` before each round, with ``setup`` on dealt data and ``own`` on the parties' own;
  ``parties``, ``introductions``, ``matching`` and ``groups`` are what these need.
- What is sent: ``messages``, ``links`` (open or sealed), ``conversation`` (questions beside training).
- What it costs and reveals: ``books``, ``costs``, ``system``, ``noise``.
- The theory, and P, Q and eta by it: ``theory``, ``estimates``, ``probes``, ``adaptive``.
"""

from hedgerow.strategies.hsgd.adaptive import Adaptive
from hedgerow.strategies.hsgd.groups import PairingError
from hedgerow.strategies.hsgd.noise import EmbeddingNoise, UploadNoise
from hedgerow.strategies.hsgd.own import OwnDataSetup
from hedgerow.strategies.hsgd.probes import Probing
from hedgerow.strategies.hsgd.strategy import HSGD
from hedgerow.strategies.hsgd.system import ModelledSystem

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
