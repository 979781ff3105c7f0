"""Describe the environment of a run: machine, engine, versions, commits."""

import inspect
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("hedgerow", "flwr", "torch", "numpy", "scipy", "networkx")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPUINFO = Path("/proc/cpuinfo")


def environment(*, engine: str | None = None, app: Path | None = None) -> dict[str, Any]:
    """Return time, machine, engine, versions and commits as JSON values; None for unknown ones.

    Parameters
    ----------
    engine : str or None (default: None)
        ``"inprocess"``, ``"flower-simulation"`` or ``"flower-deployment"``.
    app : Path or None (default: None)
        The app's folder, whose repository's state is ``app-git``. ``git`` is the state of this library's
        checkout.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": engine,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "torch": _torch_build(),
        "threads": {"torch": _torch_threads(), **{name: os.environ.get(name) for name in _THREADS}},
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": _git_state(Path(__file__).resolve().parent),
        "app-git": None if app is None else _git_state(app),
    }


def code_folder(thing: Any) -> Path | None:
    """Return the folder of the code that defines a function or class; None if it has none."""
    try:
        return Path(inspect.getfile(thing)).resolve().parent
    except (TypeError, OSError):
        return None


def _cpu_model() -> str | None:
    try:
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except (OSError, UnicodeDecodeError):
        pass
    # Empty on most systems; the model's name on some without /proc.
    return platform.processor() or None


def _torch_build() -> dict[str, Any] | None:
    """Return the properties of torch that determine its kernels' bits: build and instruction set."""
    try:
        import torch  # noqa: PLC0415  # Reading a run needs no torch.
    except ImportError:
        return None
    return {
        "version": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),  # type: ignore[no-untyped-call]
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    }


def _torch_threads() -> int | None:
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return None
    return torch.get_num_threads()


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that holds a folder, and whether files differ from it."""
    command = ["git", "--no-optional-locks", "-C", str(folder)]
    try:
        commit = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(
            [*command, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip())}
