"""A run's change of its initial model as an adapter of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.trained import initial_model, trained_model

# The largest rank of an adapter, unless the user says another.
MAX_RANK = 256
# A layer's change is an adapter of the rank at which this share of its norm is left.
_LEFT = 1e-6
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """Factors of the weights that a run changed, and all else that it changed in full.

    Parameters
    ----------
    factors : Mapping[str, tuple of Tensor]
        By module: A (r, in) and B (out, r), float32, whose product B A is the weight's change.
    whole : Mapping[str, Mapping[str, Tensor]]
        By module: the parameters and buffers that changed, of modules without factors.
    biases : Mapping[str, Tensor]
        By module: the biases that changed beside factors.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    whole: Mapping[str, Mapping[str, Tensor]]
    biases: Mapping[str, Tensor]


def adapter_of(before: nn.Module, after: nn.Module, max_rank: int = MAX_RANK) -> Adapter:
    """Return the adapter that leads from one model to the other.

    A linear weight whose change has at most half of the possible ranks becomes factors; every other change is
    stored in full.

    Raises
    ------
    ValueError
        If nothing changed by factors, or a weight's change has a rank above ``max_rank``.
    """
    old, new = before.state_dict(), after.state_dict()
    changed = [key for key in old if not torch.equal(old[key], new[key].to(old[key]))]
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    whole: dict[str, dict[str, Tensor]] = {}
    for key in changed:
        module, _, name = key.rpartition(".")
        layer = before.get_submodule(module)
        change = new[key].double() - old[key].double()
        if name == "weight" and isinstance(layer, nn.Linear) and (found := _factors(change)) is not None:
            factors[module] = found
        else:
            whole.setdefault(module, {})[key] = new[key]
    if not factors:
        raise ValueError("the run changed no linear weight by a product of low rank: no adapter describes it")
    biases = {module: whole.pop(module)[f"{module}.bias"] for module in factors.keys() & whole.keys()}
    for module, (a, _) in factors.items():
        if len(a) > max_rank:
            raise ValueError(
                f"--max-rank must be at least {len(a)}, the rank of the change of {module}, got {max_rank}: "
                "every merge adds the rank of an update"
            )
    return Adapter(factors, whole, biases)


def _factors(change: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return A and B of a matrix (out, in); None if its rank is more than half of the largest possible."""
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    left = s.square().flip(0).cumsum(0).flip(0).sqrt()  # the norm without the first k values
    rank = int((left > _LEFT * left[0]).sum())
    if 2 * rank > len(s):
        return None
    root = s[:rank].sqrt()
    return (root[:, None] * v[:rank]).float(), (u[:, :rank] * root).float()


def write_adapter(run: Path, folder: Path, app: str | None = None, max_rank: int = MAX_RANK) -> Adapter:
    """Write a run's adapter as PEFT reads it, ``PeftModel.from_pretrained(model, folder)``, and return it.

    ValueError as in ``adapter_of``.
    """
    trained = trained_model(run, app)[0]
    adapter = adapter_of(initial_model(run, app), trained, max_rank)
    ranks = {module: len(a) for module, (a, _) in adapter.factors.items()}
    largest = max(ranks.values())
    about: dict[str, Any] = {
        "peft_type": "LORA", "task_type": None, "inference_mode": True, "lora_dropout": 0.0,
        "bias": "lora_only" if adapter.biases else "none",
        "fan_in_fan_out": False, "base_model_name_or_path": None, "r": largest, "lora_alpha": largest,
        "target_modules": sorted(ranks), "rank_pattern": ranks, "alpha_pattern": ranks,
        "modules_to_save": sorted(adapter.whole) or None,
    }  # fmt: skip
    arrays = {
        f"{_PREFIX}{module}.lora_{side}.weight": value.contiguous()
        for module, (a, b) in adapter.factors.items()
        for side, value in (("A", a), ("B", b))
    }
    for module in ranks if adapter.biases else ():
        bias = trained.get_submodule(module).bias
        if isinstance(bias, Tensor):
            arrays[f"{_PREFIX}{module}.base_layer.bias"] = bias.detach().contiguous()
    for state in adapter.whole.values():
        arrays |= {_PREFIX + key: value.contiguous() for key, value in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "adapter_model.safetensors", lambda file: file.write(save(arrays)))
    text = json.dumps(about, indent=2) + "\n"
    write_file(folder / "adapter_config.json", lambda file: file.write(text.encode()))
    return adapter
