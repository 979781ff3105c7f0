"""A federation on one machine, and its records: the engine, runs, deployments, the command line.

The names below are imported when they are first used, so that ``hedgerow --help`` needs neither Flower nor
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hedgerow.sim.deploy.launcher import Deployment
    from hedgerow.sim.deploy.supernode import SuperNode
    from hedgerow.sim.engine.faults import Delay, FaultModel
    from hedgerow.sim.engine.grid import InProcessGrid
    from hedgerow.sim.runs.app import find_app, load_app
    from hedgerow.sim.runs.launch import run_app
    from hedgerow.sim.runs.model_files import read_model
    from hedgerow.sim.runs.plan import plan_run
    from hedgerow.sim.runs.recorder import RunRecorder, read_config, read_rounds
    from hedgerow.sim.runs.results import load
    from hedgerow.sim.runs.serverapp import Experiment, server_app
    from hedgerow.sim.runs.settings import Setting, SettingsError, read_settings
    from hedgerow.sim.runs.simulate import Simulation, simulate

__all__ = [
    "Delay",
    "Deployment",
    "Experiment",
    "FaultModel",
    "InProcessGrid",
    "RunRecorder",
    "Setting",
    "SettingsError",
    "Simulation",
    "SuperNode",
    "find_app",
    "load",
    "load_app",
    "plan_run",
    "read_config",
    "read_model",
    "read_rounds",
    "read_settings",
    "run_app",
    "server_app",
    "simulate",
]

_MODULES = {
    "deploy.launcher": ("Deployment",),
    "deploy.supernode": ("SuperNode",),
    "engine.faults": ("Delay", "FaultModel"),
    "engine.grid": ("InProcessGrid",),
    "runs.app": ("find_app", "load_app"),
    "runs.launch": ("run_app",),
    "runs.model_files": ("read_model",),
    "runs.plan": ("plan_run",),
    "runs.recorder": ("RunRecorder", "read_config", "read_rounds"),
    "runs.results": ("load",),
    "runs.serverapp": ("Experiment", "server_app"),
    "runs.settings": ("Setting", "SettingsError", "read_settings"),
    "runs.simulate": ("Simulation", "simulate"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
