"""FedMUD: low-rank model updates, and the methods that it is compared with."""

from hedgerow.strategies.fedmud.compressed_layers import DOWN, UP, CompressedLayers
from hedgerow.strategies.fedmud.ef21p import EF21P
from hedgerow.strategies.fedmud.fedbat import FedBAT
from hedgerow.strategies.fedmud.fedhm import FedHM
from hedgerow.strategies.fedmud.lora import FedExLoRA, LoRA
from hedgerow.strategies.fedmud.strategy import FedLMT, FedMUD, FedPara
from hedgerow.strategies.parts import SYNCS

__all__ = [
    "DOWN",
    "EF21P",
    "SYNCS",
    "UP",
    "CompressedLayers",
    "FedBAT",
    "FedExLoRA",
    "FedHM",
    "FedLMT",
    "FedMUD",
    "FedPara",
    "LoRA",
]
