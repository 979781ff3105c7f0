"""The settings that mean the same in every app, in groups: what is learnt, how nodes train, what a run is.

An app puts them among its own and may give them other defaults and other help (``settings.override``).
"""

from collections.abc import Callable, Mapping
from math import inf

from hedgerow.sim.runs.kinds import choice, flag, number, text, whole
from hedgerow.sim.runs.settings import Setting

__all__ = ["RUN_SETTINGS", "SEED", "STACK_SETTINGS", "task_settings"]

# What is learnt: default and help. What is valid is known to the rooms of tasks and clients.
_TASK = {
    "dataset": ("mnist-5k", "a name of `hedgerow data`, or `module:function`"),
    "data-dir": ("", "where its files are"),
    "scaling": ("standard", "pixels with mean 0 and deviation 1 a channel; `unit`: in [0, 1]"),
    "partition": ("iid", "how the data are dealt to nodes"),
    "model": ("lenet", "what is trained"),
    "device": ("cpu", "where nodes train"),
}


def task_settings(texts: Mapping[str, tuple[str, Callable[[str], object]]]) -> dict[str, Setting]:
    """Return what says what is learnt.

    Parameters
    ----------
    texts : Mapping[str, tuple[str, Callable[[str], object]]]
        For each key what is valid, in words and as a check: ``hedgerow.clients.TASK_TEXTS``, or some of it.
    """
    return {key: Setting(_TASK[key][0], text(*check), _TASK[key][1]) for key, check in texts.items()}


SEED = Setting(0, whole(0), "keys everything that is drawn")

# How a machine trains the nodes that it simulates; nothing of it changes what a run means.
STACK_SETTINGS: Mapping[str, Setting] = {
    "training-mode": Setting(
        "auto",
        choice("auto", "loop", "stack"),
        "`loop`: one node after the other, which gives bits (docs/bits.md); `stack`: many at once",
    ),
    "stack-nodes": Setting(0, whole(0), "the most nodes in a stack (0: as memory and caches hold)"),
}

RUN_SETTINGS: Mapping[str, Setting] = {
    "evaluate-every": Setting(5, whole(1), "rounds between evaluations"),
    "train-loss-samples": Setting(
        0, whole(0), "training samples that the loss is taken over, the same each time (0: all)"
    ),
    # What nodes that are devices need.
    "round-timeout": Setting(
        600.0, number("a number of seconds > 0", lambda v: 0 < v < inf), "seconds until a reply is too late"
    ),
    "min-replies": Setting(1, whole(0), "fewest valid replies of a round"),
    # Who carries the messages, and what is kept of the run.
    "engine": Setting(
        "flower",
        choice("flower", "inprocess"),
        "`inprocess`: the ServerApp runs the nodes itself, also under `flwr run`",
    ),
    "output-dir": Setting("runs", text("a folder"), "where run folders go"),
    "checkpoint-every": Setting(10, whole(1), "rounds between checkpoints"),
    "checkpoint-nodes": Setting(
        "auto",
        choice("auto", "always", "never"),
        "whether a checkpoint holds what nodes keep; `auto`: in simulation, not from devices",
    ),
    "resume": Setting("", text("the folder of an earlier run, or empty"), "a run folder to go on with"),
    "quiet": Setting(False, flag(), "no progress"),
}
