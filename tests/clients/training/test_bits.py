"""The contract for bits of docs/bits.md: what a node learns does not tell who stands beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clients.training.digests import learnt, weights

from hedgerow.clients import TrainingMode

STACKED = ("lenet", "logistic", "mlp", "cnn-431k")
ROOT = Path(__file__).parents[3]

# Other processors than the one at hand: each library's own way to be told what it may use.
OTHERS = [
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "MKL_CBWR=COMPATIBLE",
    "MKL_CBWR=AVX2",
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_DEBUG_CPU_TYPE=5",
    "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE",
]


def elsewhere(settings: str, names: str, batches: str, modes: str) -> dict[str, dict[str, str]]:
    """What the program of digests tells under such settings; skips what this processor cannot do."""
    changes = dict(pair.split("=") for pair in settings.split())
    if "avx2" in settings.lower() and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    command = [sys.executable, "-m", "tests.clients.training.digests", names, batches, modes]
    out = subprocess.run(
        command, env={**os.environ, **changes}, cwd=ROOT, check=True, capture_output=True, timeout=600
    )
    told: dict[str, dict[str, str]] = json.loads(out.stdout)
    if changes.get("ATEN_CPU_CAPABILITY") == "default":
        assert told["capability"] == "DEFAULT"
    return told


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
CALLS: list[tuple[str, int, TrainingMode, tuple[int, ...]]] = [
    *((name, batch, "stack", GREY) for name in STACKED for batch in (1, 5, 10, 32)),
    *((name, 5, "loop", GREY) for name in ("lenet", "cnn4")),
    # Where models are small.
    *(
        (name, batch, "auto", shape)
        for name, shape in (("lenet", GREY), ("lenet", COLOUR), ("logistic", GREY))
        for batch in (1, 10)
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_call_of_any_size_on_any_threads_teaches_a_node_the_same_bits(call: Any) -> None:
    found = learnt(*call)
    assert len(set(found.values())) == 1, found


def test_so_it_is_where_all_libraries_use_their_least_instructions() -> None:
    told = elsewhere(OTHERS[-1], "lenet,mlp", "5", "stack,loop")
    del told["capability"]
    assert told.pop("weights") == weights(), "initial weights are the same on every processor"
    assert [found for found in told.values() if len(set(found.values())) != 1] == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHERS)
def test_so_it_is_under_other_instruction_sets_for_every_model(settings: str) -> None:
    stacked = elsewhere(settings, ",".join(STACKED), "1,5,10,32", "stack")
    looped = elsewhere(settings, ",".join((*STACKED, "cnn4")), "1,5,10,32", "loop")
    for told in (stacked, looped):
        del told["capability"]
        assert told.pop("weights") == weights()
        assert [found for found in told.values() if len(set(found.values())) != 1] == []
