"""HSGD: floating-point operations and memory of one iteration at a hospital and at a device.

    python benchmarks/hsgd_work.py --data-dir DIR > results/hsgd/work.md

Counted on the library's own steps, in matrix products and convolutions, forward and backward, of a hospital
with a batch of 20 and of a device with its one sample; an exchange costs each side another forward pass of
its encoder. Memory is what an iteration holds: the parameters and their gradients, what the node received,
and what the forward pass keeps for the backward pass. The methods of one app do the same work an iteration,
so that what each computes to a target is this times its iterations.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from reports import report
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from hedgerow.clients.hsgd.step import (
    DeviceStack,
    HospitalStack,
    block_size,
    device_steps,
    encodings,
    hospital_steps,
)
from hedgerow.sim.runs.hooks import data_sets
from hedgerow.tasks import DatasetNotFound, load_vertical
from hedgerow.tasks.split_models import SplitModel, split_loss, split_model

BATCH = 20
MODELS = {"breast-cancer": "mlp", "mnist-5k": "cnn", "ecg5000": "lstm", "sepsis2019": "lstm"}


def flops(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def kept(work: Callable[[], Any]) -> int:
    """Return the bytes that the forward pass keeps, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(storages.values())


def hospital(model: SplitModel, shape: tuple[int, ...]) -> HospitalStack:
    return HospitalStack(
        flat(model.head)[None],
        flat(model.hospital)[None],
        torch.rand(1, BATCH, *shape),
        torch.rand(1, BATCH, model.device_encoding),
        torch.zeros(1, BATCH, dtype=torch.long),
    )


def device(model: SplitModel, shape: tuple[int, ...]) -> DeviceStack:
    return DeviceStack(
        flat(model.device)[None],
        flat(model.head)[None],
        torch.rand(1, 1, model.hospital_encoding),
        torch.rand(1, 1, *shape),
        torch.zeros(1, 1, dtype=torch.long),
    )


def flat(block: torch.nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in block.state_dict().values()])


def main(
    data_dir: Annotated[Path | None, typer.Option(help="where ecg5000 and sepsis2019 are")] = None,
) -> None:
    print("| data | party | parameters trained | MFLOP per step | MFLOP per exchange | memory, MB |")
    print("|---|---|---:|---:|---:|---:|")
    for name, kind in MODELS.items():
        try:
            data = load_vertical(name, data_dir, more=data_sets())
        except DatasetNotFound as missing:
            print(f"{name} left out: {str(missing).splitlines()[0]}", file=sys.stderr)
            continue
        shapes = data.hospital_train.shape[1:], data.device_train.shape[1:]
        model = split_model(kind, *shapes, len(data.classes), seed=0)
        at_hospital, at_device = hospital(model, shapes[0]), device(model, shapes[1])
        show(
            name,
            "hospital",
            block_size(model.head) + block_size(model.hospital),
            at_hospital,
            partial(hospital_steps, model, split_loss, at_hospital, [0.1]),
            partial(encodings, model.hospital, at_hospital.hospital, at_hospital.x1),
        )
        show(
            name,
            "device",
            block_size(model.device),
            at_device,
            partial(device_steps, model, split_loss, at_device, [0.1]),
            partial(encodings, model.device, at_device.device, at_device.x2),
        )


def show(
    name: str,
    party: str,
    trained: int,
    stack: tuple[Tensor, ...],
    step: Callable[[], Any],
    encode: Callable[[], Any],
) -> None:
    held = sum(part.nbytes for part in stack) + 4 * trained + kept(step)
    print(
        f"| {name} | {party} | {trained:,} | {flops(step) / 1e6:.3g} | {flops(encode) / 1e6:.3g} "
        f"| {held / 1e6:.2f} |"
    )
    report(f"a step of {name} {party}", flops(step) / 1e6, "MFLOP")


if __name__ == "__main__":
    typer.run(main)
