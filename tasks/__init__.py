"""What is learnt: data sets, how they are dealt to nodes, models and metrics."""

from .datasets import DATASETS, CatalogueEntry, Dataset, DatasetNotFound, catalogue, load
from .federated import FederatedData, federated
from .groups import GROUP_SCHEMES, GroupSplit, group_split, match_ids, validate_group_scheme
from .images import SCALINGS
from .imports import is_import_path
from .metrics import (
    CentralMetrics,
    Evaluation,
    SplitEvaluation,
    evaluate,
    evaluate_split,
    logit_metrics,
    split_logits,
)
from .models import MODELS, build_model, count_parameters, forward_macs
from .partitions import SCHEMES, Scheme, parse_scheme, partition, validate_scheme
from .split_models import SPLIT_MODELS, SplitModel, split_loss, split_model
from .vertical import (
    VERTICAL_DATASETS,
    ImageCut,
    VerticalDataset,
    load_vertical,
)

__all__ = [
    "DATASETS",
    "GROUP_SCHEMES",
    "MODELS",
    "SCALINGS",
    "SCHEMES",
    "SPLIT_MODELS",
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
    "SplitEvaluation",
    "SplitModel",
    "VerticalDataset",
    "build_model",
    "catalogue",
    "count_parameters",
    "evaluate",
    "evaluate_split",
    "federated",
    "forward_macs",
    "group_split",
    "is_import_path",
    "load",
    "load_vertical",
    "logit_metrics",
    "match_ids",
    "parse_scheme",
    "partition",
    "split_logits",
    "split_loss",
    "split_model",
    "validate_group_scheme",
    "validate_scheme",
]
