"""A node owner's policy, ``hedgerow-node.toml``: read and checked.

The node config's key ``policy`` or the environment variable HEDGEROW_NODE_POLICY names the file; a server can
set neither. Without a file a device has the defaults below, and a simulated node has no policy.
"""

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context

from hedgerow.clients.handlers import outcome
from hedgerow.clients.process_memory import can_limit_memory
from hedgerow.tasks.imports import is_import_path
from hedgerow.wire.checks import did_you_mean
from hedgerow.wire.printable import reason
from hedgerow.wire.process import is_simulated

POLICY_VARIABLE = "HEDGEROW_NODE_POLICY"
PRIVACY_MODES = ("none", "paper", "sound")
_MESSAGE_TYPE = re.compile(r"(train|evaluate|query)(\.[A-Za-z_]\w*)?")


class PolicyError(ValueError):
    """An invalid policy file; its node answers no message."""


@dataclass(frozen=True)
class Policy:
    """One node's policy. The defaults are those of a device without a file."""

    # Message types to answer; None for all of the app's.
    messages: tuple[str, ...] | None = None
    # Import paths ``module:function`` that a run may name, beside the node config's ``allow-imports``. The
    # suite's own models and data sets have names and need none.
    imports: tuple[str, ...] = ()
    # Files and folders that a run may name, absolute. ``data-dir`` and ``data`` of the node config and
    # HEDGEROW_DATA_DIR are always allowed.
    folders: tuple[Path, ...] = ()
    # Whether to answer ``query.state`` and ``query.restore``; the node config's ``share-state`` can also
    # forbid it.
    share_state: bool = True
    # Whether a server may read this node's model and objective. Never with ``privacy`` ``sound``.
    monitor: bool = False
    # Limits per run, >= 0: starts of a gossip method, and replacements of its state.
    max_hellos: int = 4
    max_restores: int = 1
    max_seconds: float = 3600.0  # time limit of a message, > 0
    max_bytes: int = 2**30  # size limit of a message's records, >= 1
    # Bytes that a process may allocate while it handles a message, >= 1, on Linux; None for no limit. It does
    # not apply to simulated nodes, which share a process.
    max_memory: int | None = None
    # {"allowed", "required"}: ``required`` answers only messages that reveal nothing about the records or go
    # into a secure sum. The node config's ``secure-sum = true`` is equivalent.
    secure_sums: str = "allowed"
    # {"none", "paper", "sound"}: the weakest accepted mode. All but ``none`` answer only messages that reveal
    # nothing about the records or are noised in such a mode.
    privacy: str = "none"
    # Different sums of each kind (moments of features, counts of classes) over the same records to report
    # without noise, over all runs, >= 0. The same sum may be reported again.
    max_pooled: int = 1
    # Answers, over all runs, that depend on records without noise or a secure sum, >= 0; None for no limit.
    max_unprotected: int | None = None
    # {"entropy", "seed"}: noise from the operating system, whatever a run asks for, or as the run asks.
    noise_source: str = "entropy"
    min_noise_multiplier: float = 0.0  # smallest noise of a release, in sensitivities
    max_clip: float = math.inf  # largest clipping norm that a run may set
    # Exact epsilon at ``delta`` of one release, and of all releases in the ledger.
    max_epsilon_per_release: float = math.inf
    max_epsilon: float = math.inf
    delta: float = 1e-6  # in (0, 1); choose it below 1 / records
    # The ledger of releases; None for ``hedgerow-ledger.jsonl`` in FLWR_HOME.
    ledger: Path | None = None

    @property
    def ledger_file(self) -> Path:
        """The path of the ledger."""
        home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
        return self.ledger or home / "hedgerow-ledger.jsonl"


def policies_of(contexts: Iterable[Context]) -> list[Policy | Exception | None]:
    """Return the policies of nodes as ``policy_of`` does, or its errors."""
    free = is_simulated() and not os.environ.get(POLICY_VARIABLE)
    return [
        None if free and not context.node_config.get("policy") else outcome(policy_of, context)
        for context in contexts
    ]


def policy_of(context: Context) -> Policy | None:
    """Return a node's policy; None for a simulated node without one. PolicyError for an invalid file."""
    named = context.node_config.get("policy") or os.environ.get(POLICY_VARIABLE, "")
    if not named:
        if is_simulated():
            return None
        policy = Policy()
    elif not isinstance(named, str):
        raise PolicyError(f"policy must be the path of a TOML file, got {named!r} in the node config")
    else:
        policy = read_policy(Path(named).expanduser())
    return replace(policy, secure_sums="required") if context.node_config.get("secure-sum") else policy


def read_policy(path: Path) -> Policy:
    """Return the policy in a file, with its paths relative to the file's folder.

    PolicyError if the file cannot be read, or names the first key that is unknown or invalid.
    """
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, ValueError) as error:
        because = reason(error, file=False)
        raise PolicyError(
            f"policy must be a TOML file that this node can read, got {path}: {because}"
        ) from error
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in _KEYS:
            near = did_you_mean(key, _KEYS)
            raise PolicyError(
                f"policy {path}: unknown key {key!r}; {near or 'known keys are ' + ', '.join(_KEYS)}"
            )
        valid, is_valid = _KEYS[key]
        if not is_valid(value):
            raise PolicyError(f"policy {path}: {key} must be {valid}, got {value!r}")
        values[key.replace("-", "_")] = tuple(value) if isinstance(value, list) else value
    _check_together(path, found)
    folder = path.absolute().parent
    for key in ("folders", "ledger"):
        if key in values:
            value = values[key]
            placed = [folder / Path(one).expanduser() for one in ([value] if key == "ledger" else value)]
            values[key] = placed[0] if key == "ledger" else tuple(placed)
    return Policy(**values)


def _check_together(path: Path, found: Mapping[str, Any]) -> None:
    if "max-memory" in found and not can_limit_memory():
        raise PolicyError(
            f"policy {path}: max-memory must be left out, got {found['max-memory']!r}: no process's memory "
            "can be limited on this system"
        )
    if found.get("privacy") == "sound":
        for key, value, valid in (("monitor", True, "false"), ("noise-source", "seed", "'entropy'")):
            if found.get(key) == value:
                raise PolicyError(
                    f"policy {path}: {key} must be {valid} with privacy = 'sound', got {value!r}"
                )
        return
    for key in ("min-noise-multiplier", "max-clip", "max-epsilon-per-release", "max-epsilon"):
        if key in found:
            raise PolicyError(
                f"policy {path}: privacy must be 'sound' with {key}, got {found.get('privacy', 'none')!r}: "
                "other modes give no guarantee"
            )


def _texts(is_one: Callable[[str], object]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list) and all(isinstance(one, str) and bool(is_one(one)) for one in value)
    )


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(above: float, below: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and above < value < below
    )


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


_POSITIVE = ("a finite number > 0", _number(0))
# The valid values of each key in words, and a check.
_KEYS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "messages": (
        "a list of message types, ['query.whoami', 'train']",
        _texts(_MESSAGE_TYPE.fullmatch),
    ),
    "imports": ("a list of import paths, ['module:function']", _texts(is_import_path)),
    "folders": ("a list of paths", _texts(bool)),
    "share-state": ("true or false", _flag),
    "monitor": ("true or false", _flag),
    "max-hellos": ("an integer >= 0", _whole(0)),
    "max-restores": ("an integer >= 0", _whole(0)),
    "max-seconds": _POSITIVE,
    "max-bytes": ("an integer >= 1", _whole(1)),
    "max-memory": ("an integer >= 1", _whole(1)),
    "secure-sums": ("'allowed' or 'required'", lambda value: value in ("allowed", "required")),
    "privacy": (f"one of {', '.join(PRIVACY_MODES)}", lambda value: value in PRIVACY_MODES),
    "max-pooled": ("an integer >= 0", _whole(0)),
    "max-unprotected": ("an integer >= 0", _whole(0)),
    "noise-source": ("'entropy' or 'seed'", lambda value: value in ("entropy", "seed")),
    "min-noise-multiplier": _POSITIVE,
    "max-clip": _POSITIVE,
    "max-epsilon-per-release": _POSITIVE,
    "max-epsilon": _POSITIVE,
    "delta": ("a number in (0, 1)", _number(0, 1)),
    "ledger": ("the path of a file", lambda value: isinstance(value, str) and bool(value)),
}
