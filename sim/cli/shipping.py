"""A run's trained model as one file for other programs, and beside it what its nodes did to raw data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.folder import read_config
from hedgerow.sim.runs.trained import Scale, trained_model
from hedgerow.tasks import input_type, load, preprocessing
from hedgerow.wire.extras import needed
from hedgerow.wire.printable import shown

_OWN = "own-data"


@dataclass(frozen=True)
class Shipped:
    """A model, an input of two samples that it takes, and what is written beside its file."""

    model: nn.Module
    sample: Tensor
    about: Mapping[str, Any]


def shipped(run: Path, app: str | None = None, input_shape: Sequence[int] | None = None) -> Shipped:
    """Return the trained model of a run for ``write_onnx`` and ``write_torchscript``.

    Parameters
    ----------
    run : Path
        The run folder.
    app : str or None (default: None)
        As in ``load_model``.
    input_shape : Sequence[int] or None (default: None)
        The shape of one sample; None for that of the run's data.

    Raises
    ------
    ValueError
        If the model or its input shape does not follow from the run, or the model does not take such samples.
    """
    config = read_config(run)
    settings, own = config.get("run", {}), config.get(_OWN)
    # Of own data, a copy of an app builds the model that the app does.
    model, constants = trained_model(run, app or (own and config.get("copy-of")))
    if own is None:
        found, constants = _dealt(settings)
    else:
        found = own["input-shape"]
    shape = list(input_shape or found or ())
    if not shape:
        raise ValueError("--input-shape must be given: it does not follow from the settings of this run")
    model = model.cpu().eval()
    sample = _sample(model, shape)
    with torch.inference_mode():
        logits = model(sample)
    about = {
        "run": run.resolve().name,
        "app": config.get("app"),
        "input": {"name": "x", "shape": ["N", *shape], "dtype": str(sample.dtype).removeprefix("torch.")},
        "output": {"name": "y", "shape": ["N", *logits.shape[1:]]},
        "classes": settings.get("classes") or None,
        # x = (raw - mean) / std for each channel of an image, else for each feature.
        "preprocessing": constants and {"mean": list(constants[0]), "std": list(constants[1])},
    }
    return Shipped(model, sample, about)


def write_onnx(model: Shipped, file: Path) -> Path:
    """Write a model as ONNX, for any number of samples, and return the file of its preprocessing.

    MissingExtraError without the extra ``onnx``; ValueError if torch cannot export the model.
    """
    needed("onnx", "onnx")
    needed("onnxscript", "onnx")

    def save(path: Path) -> None:
        dynamic = {"x": {0: torch.export.Dim("N")}}
        torch.onnx.export(
            _Named(model.model), (model.sample,), path, input_names=["x"], output_names=["y"],
            dynamic_shapes=dynamic, external_data=False, dynamo=True, verbose=False,
        )  # fmt: skip

    return _written(model, file, "ONNX", save)


def write_torchscript(model: Shipped, file: Path) -> Path:
    """Write a model as TorchScript, traced, and return the file of its preprocessing; ValueError as above."""

    def save(path: Path) -> None:
        with torch.inference_mode():
            traced = torch.jit.trace(model.model, model.sample)  # type: ignore[no-untyped-call]
        traced.save(str(path))

    return _written(model, file, "TorchScript", save)


class _Named(nn.Module):
    """A model whose input is called x, as the file's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def _written(model: Shipped, file: Path, kind: str, save: Callable[[Path], None]) -> Path:
    """Save to a new file that then takes the place of the old one, and describe it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.partial")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(new)
    except OSError:
        raise
    except Exception as error:  # torch's exporters raise anything
        new.unlink(missing_ok=True)
        line = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"the model {type(model.model).__name__} cannot be written as {kind}: {type(error).__name__}: "
            f"{shown(line, 200)}"
        ) from error
    new.replace(file)
    beside = file.with_name(f"{file.name}.json")
    text = json.dumps({"format": kind, **model.about}, indent=2) + "\n"
    write_file(beside, lambda stream: stream.write(text.encode()))
    return beside


def _dealt(settings: Mapping[str, Any]) -> tuple[Sequence[int] | None, Scale | None]:
    """Return the shape of a sample of a data set that the run dealt, and how its pixels were scaled."""
    if not {"dataset", "scaling"} & settings.keys() or "num-groups" in settings:
        return None, None
    named = str(settings["dataset"]), str(settings.get("data-dir", "")) or None
    named_scaling = (*named, str(settings.get("scaling", "standard")))
    return load(*named_scaling).input_shape, preprocessing(*named_scaling)


def _sample(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return two samples of zeros of the type that the model takes."""
    try:
        dtype = input_type(model, tuple(shape))
    except Exception as error:  # a user's model may raise anything
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"--input-shape must be that of a sample that the model takes, got {list(shape)}: "
            f"{shown(why, 200)}"
        ) from error
    return torch.zeros((2, *shape), dtype=dtype)
