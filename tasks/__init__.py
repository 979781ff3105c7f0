"""What is learnt: data sets, how they are dealt to nodes, models and metrics."""

from .datasets import DATASETS, CatalogueEntry, Dataset, DatasetNotFound, catalogue, load
from .federated import FederatedData, federated
from .images import SCALINGS
from .metrics import CentralMetrics, Evaluation, evaluate
from .models import MODELS, build_model, count_parameters, forward_macs
from .partitions import SCHEMES, Scheme, parse_scheme, partition, validate_scheme

__all__ = [
    "DATASETS",
    "MODELS",
    "SCALINGS",
    "SCHEMES",
    "CatalogueEntry",
    "CentralMetrics",
    "Dataset",
    "DatasetNotFound",
    "Evaluation",
    "FederatedData",
    "Scheme",
    "build_model",
    "catalogue",
    "count_parameters",
    "evaluate",
    "federated",
    "forward_macs",
    "load",
    "parse_scheme",
    "partition",
    "validate_scheme",
]
