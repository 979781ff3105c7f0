"""Learning tasks: data sets, their partition among nodes, models and metrics."""

from .datasets import Dataset, load, preprocessing
from .federated import FederatedData, federated
from .files import Reading
from .groups import GROUP_SCHEMES, group_split, match_ids, validate_group_scheme
from .images import AUGMENTATIONS, SCALINGS, augmented, check_augmentation
from .imports import is_import_path
from .layout import ChannelsLast
from .metrics import (
    CentralMetrics,
    Evaluation,
    SplitEvaluation,
    evaluate,
    evaluate_split,
    logit_metrics,
    normalised_utility,
    split_logits,
)
from .models import MODELS, build_model, check_takes, count_parameters, forward_macs, input_type
from .own_data import (
    NODE_DATA_KEYS,
    OWN,
    Classes,
    Moments,
    OwnData,
    OwnSource,
    Standardisation,
    in_training,
    moments,
    num_features,
    parse_classes,
    parse_standardise,
    read_own,
)
from .partitions import SCHEMES, Scheme, parse_scheme, partition, validate_scheme
from .pretrained import minilm, minilm_full
from .regression import LinearData, linear_part, sparse_truth
from .sources import DATASETS, VERTICAL_DATASETS, CatalogueEntry, DatasetNotFound, catalogue
from .split_models import SPLIT_MODELS, SplitModel, split_loss, split_model, weighted_loss
from .splits import write_group_split, write_groups, write_split
from .text import NO_TOKEN, padded
from .vertical import VerticalDataset, load_vertical

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "GROUP_SCHEMES",
    "MODELS",
    "NODE_DATA_KEYS",
    "NO_TOKEN",
    "OWN",
    "SCALINGS",
    "SCHEMES",
    "SPLIT_MODELS",
    "VERTICAL_DATASETS",
    "CatalogueEntry",
    "CentralMetrics",
    "ChannelsLast",
    "Classes",
    "Dataset",
    "DatasetNotFound",
    "Evaluation",
    "FederatedData",
    "LinearData",
    "Moments",
    "OwnData",
    "OwnSource",
    "Reading",
    "Scheme",
    "SplitEvaluation",
    "SplitModel",
    "Standardisation",
    "VerticalDataset",
    "augmented",
    "build_model",
    "catalogue",
    "check_augmentation",
    "check_takes",
    "count_parameters",
    "evaluate",
    "evaluate_split",
    "federated",
    "forward_macs",
    "group_split",
    "in_training",
    "input_type",
    "is_import_path",
    "linear_part",
    "load",
    "load_vertical",
    "logit_metrics",
    "match_ids",
    "minilm",
    "minilm_full",
    "moments",
    "normalised_utility",
    "num_features",
    "padded",
    "parse_classes",
    "parse_scheme",
    "parse_standardise",
    "partition",
    "preprocessing",
    "read_own",
    "sparse_truth",
    "split_logits",
    "split_loss",
    "split_model",
    "validate_group_scheme",
    "validate_scheme",
    "weighted_loss",
    "write_group_split",
    "write_groups",
    "write_split",
]
