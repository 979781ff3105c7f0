"""What passes between server and nodes: records, calls, seeds, the ledger of bits, the clock.

The names below are imported when they are first used, so that the ledger and the clock need neither Flower
nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hedgerow.wire.blocks import Blocks, block_of, in_block
    from hedgerow.wire.budget import Budget
    from hedgerow.wire.calls import (
        LINKS_RECORD,
        NODE_RECORD,
        SEALED_RECORD,
        SECRET_RECORD,
        Batched,
        BatchHandler,
        Call,
        ColumnHandler,
        Delivery,
        InColumns,
    )
    from hedgerow.wire.clock import Clock, Compute, Rates
    from hedgerow.wire.codec import Codec
    from hedgerow.wire.compress import (
        COMPRESSORS,
        Compressor,
        RandK,
        ScaledSign,
        Ternary,
        TopK,
        pack_update,
        parse_compressor,
        rand_k,
        record_payload,
        unpack_update,
        validate_compressor,
    )
    from hedgerow.wire.elias_fano import decode_indices, encode_indices, index_bits
    from hedgerow.wire.gaussian_dp import (
        gaussian_delta,
        gaussian_epsilon,
        optimal_zcdp_epsilon,
        zcdp,
        zcdp_epsilon,
    )
    from hedgerow.wire.layers import LayerShape, layers_of
    from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB, PEER_TO_PEER, Ledger, Traffic, Transfer
    from hedgerow.wire.limits import MAX_EXAMPLES, MAX_SAMPLES, MAX_STEPS
    from hedgerow.wire.lowrank import FactoredLayer, Factorisation
    from hedgerow.wire.masked_sums import MASKED, MASKED_SUM, default_neighbours, survivors_needed
    from hedgerow.wire.message_types import (
        HELLO,
        MESSAGE_FORMAT,
        MONITOR,
        NO_MONITOR,
        PUBLISH,
        RESTORE,
        STANDARDISE,
        STATE,
        STATISTICS,
        SUM_KEYS,
        SUM_SHARES,
        UPDATE,
        WHOAMI,
    )
    from hedgerow.wire.onebit import OneBit
    from hedgerow.wire.records import (
        Layout,
        PayloadError,
        finite_views,
        lazy_array,
        payload_bytes,
        to_record,
        to_state_dict,
        view,
    )
    from hedgerow.wire.robust_means import AGGREGATIONS, Aggregation, parse_aggregation
    from hedgerow.wire.sealed import SEAL_BYTES, SealingKey
    from hedgerow.wire.seeds import Purpose, generator, torch_generator
    from hedgerow.wire.vector_codecs import CODECS, Dense, Quantised, Sparse, parse_codec

__all__ = [
    "AGGREGATIONS",
    "CODECS",
    "COMPRESSORS",
    "HELLO",
    "HUB_TO_NODE",
    "LINKS_RECORD",
    "MASKED",
    "MASKED_SUM",
    "MAX_EXAMPLES",
    "MAX_SAMPLES",
    "MAX_STEPS",
    "MESSAGE_FORMAT",
    "MONITOR",
    "NODE_RECORD",
    "NODE_TO_HUB",
    "NO_MONITOR",
    "PEER_TO_PEER",
    "PUBLISH",
    "RESTORE",
    "SEALED_RECORD",
    "SEAL_BYTES",
    "SECRET_RECORD",
    "STANDARDISE",
    "STATE",
    "STATISTICS",
    "SUM_KEYS",
    "SUM_SHARES",
    "UPDATE",
    "WHOAMI",
    "Aggregation",
    "BatchHandler",
    "Batched",
    "Blocks",
    "Budget",
    "Call",
    "Clock",
    "Codec",
    "ColumnHandler",
    "Compressor",
    "Compute",
    "Delivery",
    "Dense",
    "FactoredLayer",
    "Factorisation",
    "InColumns",
    "LayerShape",
    "Layout",
    "Ledger",
    "OneBit",
    "PayloadError",
    "Purpose",
    "Quantised",
    "RandK",
    "Rates",
    "ScaledSign",
    "SealingKey",
    "Sparse",
    "Ternary",
    "TopK",
    "Traffic",
    "Transfer",
    "block_of",
    "decode_indices",
    "default_neighbours",
    "encode_indices",
    "finite_views",
    "gaussian_delta",
    "gaussian_epsilon",
    "generator",
    "in_block",
    "index_bits",
    "layers_of",
    "lazy_array",
    "optimal_zcdp_epsilon",
    "pack_update",
    "parse_aggregation",
    "parse_codec",
    "parse_compressor",
    "payload_bytes",
    "rand_k",
    "record_payload",
    "survivors_needed",
    "to_record",
    "to_state_dict",
    "torch_generator",
    "unpack_update",
    "validate_compressor",
    "view",
    "zcdp",
    "zcdp_epsilon",
]

# In which the names are looked for: those that need neither Flower nor torch first.
_MODULES = (
    "budget", "clock", "gaussian_dp", "ledger", "limits", "message_types", "robust_means", "seeds", "layers",
    "calls", "records", "blocks", "elias_fano", "compress", "vector_codecs", "lowrank", "onebit",
    "masked_sums", "sealed",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in map(import_module, (f"{__name__}.{module}" for module in _MODULES)):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
