"""A federation on one machine, and its records: the engine, runs, deployments, the command line.

The names below are imported when they are first used, so that ``hedgerow --help`` needs neither Flower nor
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hedgerow.sim.cli.checked import CheckedNodes, CheckedRounds
    from hedgerow.sim.deploy.certificates import EdgeCredentials, make_credentials, make_edge_credentials
    from hedgerow.sim.deploy.edges import EdgeDeployment
    from hedgerow.sim.deploy.launcher import Deployment
    from hedgerow.sim.deploy.processes import StartError
    from hedgerow.sim.deploy.supernode import SuperNode
    from hedgerow.sim.engine._compat import flower_identity, through_the_wire
    from hedgerow.sim.engine.faults import Delay, FaultModel
    from hedgerow.sim.engine.grid import InProcessGrid
    from hedgerow.sim.runs.app import AppSpec, LoadedApp, find_app, load_app
    from hedgerow.sim.runs.checkpoint import (
        CheckpointError,
        load_checkpoint,
        load_newest,
        read_checkpoint,
        read_model,
        save_checkpoint,
    )
    from hedgerow.sim.runs.diagram import DrawnNetwork
    from hedgerow.sim.runs.folder import read_config, read_rounds
    from hedgerow.sim.runs.hooks import Hooks, Verdict
    from hedgerow.sim.runs.launch import run_app
    from hedgerow.sim.runs.plan import plan_run
    from hedgerow.sim.runs.recorder import RunRecorder
    from hedgerow.sim.runs.results import RecordedRun, Results, load
    from hedgerow.sim.runs.serverapp import Experiment, server_app
    from hedgerow.sim.runs.settings import AppSettings, Setting, SettingsError
    from hedgerow.sim.runs.simulate import Simulation, simulate
    from hedgerow.sim.runs.sweep import plan_sweep
    from hedgerow.sim.runs.sweep_file import read_sweep
    from hedgerow.sim.runs.trained import load_model
    from hedgerow.sim.runs.watch import RoundMetrics, record_round

__all__ = [
    "AppSettings",
    "AppSpec",
    "CheckedNodes",
    "CheckedRounds",
    "CheckpointError",
    "Delay",
    "Deployment",
    "DrawnNetwork",
    "EdgeCredentials",
    "EdgeDeployment",
    "Experiment",
    "FaultModel",
    "Hooks",
    "InProcessGrid",
    "LoadedApp",
    "RecordedRun",
    "Results",
    "RoundMetrics",
    "RunRecorder",
    "Setting",
    "SettingsError",
    "Simulation",
    "StartError",
    "SuperNode",
    "Verdict",
    "find_app",
    "flower_identity",
    "load",
    "load_app",
    "load_checkpoint",
    "load_model",
    "load_newest",
    "make_credentials",
    "make_edge_credentials",
    "plan_run",
    "plan_sweep",
    "read_checkpoint",
    "read_config",
    "read_model",
    "read_rounds",
    "read_sweep",
    "record_round",
    "run_app",
    "save_checkpoint",
    "server_app",
    "simulate",
    "through_the_wire",
]

_MODULES = {
    "cli.checked": ("CheckedNodes", "CheckedRounds"),
    "deploy.certificates": ("EdgeCredentials", "make_credentials", "make_edge_credentials"),
    "deploy.edges": ("EdgeDeployment",),
    "deploy.launcher": ("Deployment",),
    "deploy.processes": ("StartError",),
    "deploy.supernode": ("SuperNode",),
    "engine._compat": ("flower_identity", "through_the_wire"),
    "engine.faults": ("Delay", "FaultModel"),
    "engine.grid": ("InProcessGrid",),
    "runs.app": ("AppSpec", "LoadedApp", "find_app", "load_app"),
    "runs.checkpoint": (
        "CheckpointError",
        "load_checkpoint",
        "load_newest",
        "read_checkpoint",
        "read_model",
        "save_checkpoint",
    ),
    "runs.diagram": ("DrawnNetwork",),
    "runs.folder": ("read_config", "read_rounds"),
    "runs.hooks": ("Hooks", "Verdict"),
    "runs.launch": ("run_app",),
    "runs.plan": ("plan_run",),
    "runs.recorder": ("RunRecorder",),
    "runs.results": ("Results", "RecordedRun", "load"),
    "runs.serverapp": ("Experiment", "server_app"),
    "runs.settings": ("AppSettings", "Setting", "SettingsError"),
    "runs.simulate": ("Simulation", "simulate"),
    "runs.sweep_file": ("read_sweep",),
    "runs.sweep": ("plan_sweep",),
    "runs.trained": ("load_model",),
    "runs.watch": ("RoundMetrics", "record_round"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
