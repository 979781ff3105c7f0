"""What is learnt: data sets, how they are dealt to nodes, models and metrics."""

from .datasets import DATASETS, CatalogueEntry, Dataset, DatasetNotFound, catalogue, load
from .federated import FederatedData, federated
from .images import SCALINGS
from .metrics import CentralMetrics, Evaluation, evaluate
from .models import MODELS, build_model, count_parameters, forward_macs
from .partitions import SCHEMES, Scheme, parse_scheme, partition, validate_scheme
from .vertical import (
    GROUP_SCHEMES,
    VERTICAL_DATASETS,
    GroupSplit,
    ImageCut,
    VerticalDataset,
    group_split,
    load_vertical,
    match_ids,
)

__all__ = [
    "DATASETS",
    "GROUP_SCHEMES",
    "MODELS",
    "SCALINGS",
    "SCHEMES",
    "VERTICAL_DATASETS",
    "CatalogueEntry",
    "CentralMetrics",
    "Dataset",
    "DatasetNotFound",
    "Evaluation",
    "FederatedData",
    "GroupSplit",
    "ImageCut",
    "Scheme",
    "VerticalDataset",
    "build_model",
    "catalogue",
    "count_parameters",
    "evaluate",
    "federated",
    "forward_macs",
    "group_split",
    "load",
    "load_vertical",
    "match_ids",
    "parse_scheme",
    "partition",
    "validate_scheme",
]
