"""Where a run comes from: the machine, who ran its nodes, the versions, the commits."""

import inspect
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["code_folder", "environment"]

_PACKAGES = ("hedgerow", "flwr", "torch", "numpy", "scipy", "networkx")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPUINFO = Path("/proc/cpuinfo")


def environment(*, engine: str | None = None, app: Path | None = None) -> dict[str, Any]:
    """Return time, machine, engine, versions and commits, as JSON values; None for what is not known.

    Parameters
    ----------
    engine : str or None (default: None)
        Who runs the nodes: ``"inprocess"``, ``"flower-simulation"`` or ``"flower-deployment"``.
    app : Path or None (default: None)
        The app's folder, for ``app-git``: the state of the repository that holds it. ``git`` is that of the
        checkout that this library runs from.
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
    """Return the folder of the code that defines a function or a class; None where it has none."""
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
    # Empty on most systems, and the model's name where there is no /proc.
    return platform.processor() or None


def _torch_build() -> dict[str, Any] | None:
    """Return what decides on the bits of torch's kernels: its build, and the instructions that it uses."""
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
    """Return commit and whether files differ from it, of the repository that holds a folder."""
    command = ["git", "--no-optional-locks", "-C", str(folder)]
    try:
        commit = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(
            [*command, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip())}
