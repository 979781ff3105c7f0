"""Read the folders of several orchestrators (ServerApps) of one run as one run.

Edge servers with one SuperLink each (``edge-servers = "direct"``) record their own model and traffic. The
global model u is evaluated afterwards (``trained.py``).

Sites of gossiping nodes (``peers``, ``site``) record their own nodes. Each numbers its own events; the joined
run orders all events by iteration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from hedgerow.sim.runs.common_settings import LENGTHS, role_of
from hedgerow.sim.runs.folder import lost_replies, read_config, read_rounds

# Evaluations of the global model of several servers, in the folder of the first.
TOGETHER = "together.jsonl"
_KEY, _DIRECT, _SITE = "edge-servers", "direct", "site"
# Settings that may differ between the servers of one run, besides those that may change on resume.
_OWN = ("edge", _SITE, _KEY, "min-available-nodes", "device")
# Real seconds of a round, of which the slowest server's count.
_SLOWEST = ("gossip-seconds", "model-exchange-seconds", "modelled-gossip-seconds", "site-seconds")
# Prefixes of means over servers' metrics of their own models, and over sites' metrics of their own nodes.
SERVERS, SITES = "servers-", "sites-"
# Counts of a site in an event.
_COUNTS = ("receivers", "deliveries", "refused", "withheld", "unopened")


class OrchestratorFolder(NamedTuple):
    """The run folder of one of the orchestrators of a run."""

    folder: Path
    config: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> OrchestratorFolder | None:
        """Read a run folder; return None if its run has a single orchestrator."""
        config = read_config(folder)
        run = config.get("run", {})
        if not isinstance(run, dict):
            return None
        several = run.get(_KEY) == _DIRECT or (_SITE in run and run.get("peers"))
        if not several:
            return None
        return cls(folder, config, read_rounds(folder))

    @property
    def is_site(self) -> bool:
        """Whether it is a site's."""
        return _KEY not in self.config["run"]

    @property
    def number(self) -> int:
        """Number of the edge server or site."""
        return int(self.config["run"].get(_SITE if self.is_site else "edge", 0))

    @property
    def who(self) -> str:
        """Name of the orchestrator, for messages."""
        return f"{'site' if self.is_site else 'edge server'} {self.number}"


def parts_beneath(folder: Path) -> list[Path]:
    """Return the run folders of orchestrators in a folder and one level below."""
    places = sorted([*folder.glob("*/config.json"), *folder.glob("*/*/config.json")])
    return [place.parent for place in places if OrchestratorFolder.read(place.parent) is not None]


def parts_of_runs(folders: Iterable[Path]) -> tuple[list[list[OrchestratorFolder]], list[Path]]:
    """Return the parts of each run, and the folders of runs with one part.

    Raises ValueError if two folders are of the same server in runs that cannot be distinguished.
    """
    groups: dict[str, list[OrchestratorFolder]] = {}
    single = []
    for folder in folders:
        if (part := OrchestratorFolder.read(folder)) is None:
            single.append(folder)
        else:
            groups.setdefault(_identity(part, ()), []).append(part)
    runs = []
    for group in groups.values():
        if _twice(group) is None:
            runs.append(group)
            continue
        # Several runs with the same settings: on one machine they differ in their ports.
        by_peers: dict[str, list[OrchestratorFolder]] = {}
        for part in group:
            by_peers.setdefault(_identity(part, ("peers",)), []).append(part)
        for one in by_peers.values():
            if (twin := _twice(one)) is not None:
                raise ValueError(
                    f"{twin[0].folder} and {twin[1].folder} are both of {twin[0].who}, from runs with the "
                    "same settings; give the folders of only one run"
                )
            runs.append(one)
    single += [group[0].folder for group in runs if len(group) == 1]
    return [sorted(group, key=lambda part: part.number) for group in runs if len(group) > 1], single


def _identity(part: OrchestratorFolder, more: Sequence[str]) -> str:
    run = part.config["run"]
    kept = {key: value for key, value in run.items() if not _is_own(key) or key in more}
    return json.dumps(kept, sort_keys=True, default=str)


def _is_own(key: str) -> bool:
    """Return whether a setting may differ between servers of one run; ``iterations`` may not."""
    return key in _OWN or (role_of(key).may_change and key not in LENGTHS)


def _twice(parts: Sequence[OrchestratorFolder]) -> tuple[OrchestratorFolder, OrchestratorFolder] | None:
    seen: dict[str, OrchestratorFolder] = {}
    for part in parts:
        if (twin := seen.setdefault(part.who, part)) is not part:
            return twin, part
    return None


def joined_config(parts: Sequence[OrchestratorFolder]) -> dict[str, Any]:
    """Return the config that a run's parts share."""
    config = parts[-1].config
    kept = {key: value for key, value in config["run"].items() if not _is_own(key) or key == "output-dir"}
    return {**config, "run": {**kept, **({} if parts[-1].is_site else {_KEY: _DIRECT})}}


def joined_rounds(parts: Sequence[OrchestratorFolder]) -> list[dict[str, Any]]:
    """Return the rounds of a run.

    Of edge servers: traffic is the sum over servers, simulated and real seconds are the largest; ``train``
    has the slowest server's real seconds and all lost links. If u was evaluated, ``central`` and ``train``
    have its metrics; otherwise ``servers-loss`` is the mean of the servers' losses of their own models.

    Of sites: all events by iteration. Counts are sums; ``sites-disagreement`` and the other metrics are means
    over the sites, weighted by the number of their nodes that took part.
    """
    if parts[0].is_site:
        return _events(parts)
    measured: dict[int, list[Mapping[str, Any]]] = {}
    for part in parts:
        for record in part.rounds:
            measured.setdefault(record["round"], []).append(record)
    first = parts[0].folder
    evaluated = read_rounds(first, TOGETHER) if os.path.lexists(first / TOGETHER) else []
    together = {one["round"]: one for one in evaluated}
    # Each server's last record up to a round, for cumulative counts.
    known: dict[Path, Mapping[str, Any]] = {}
    out = []
    for number in sorted(measured):
        known |= {
            part.folder: record for part in parts for record in part.rounds if record["round"] == number
        }
        joined = _summed(number, measured[number], list(known.values()))
        if (u := together.get(number)) is not None:
            joined |= {"central": u["central"], "train": {**u["train"], **joined["train"]}}
        out.append(joined)
    return out


def _measured(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the servers' measurements of a round: the slowest one's real seconds, and all lost links."""
    measured = [record["train"] for record in records]
    seconds = {
        key: max(one[key] for one in measured if key in one)
        for key in _SLOWEST
        if any(key in one for one in measured)
    }
    lost: dict[str, int] = {}
    for one in measured:
        for key, count in one.items():
            if key.startswith("lost-"):
                lost[key] = lost.get(key, 0) + count
    return {**seconds, **lost}


def _summed(
    number: int, here: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    central = {
        SERVERS + name: fmean(values)
        for name in here[0]["central"]
        if len(values := [one["central"][name] for one in here if _is_number(one["central"].get(name))])
        == len(here)
    }
    links: dict[str, dict[str, int]] = {}
    for record in known:
        for name, traffic in record.get("by_link", {}).items():
            into = links.setdefault(name, dict.fromkeys(traffic, 0))
            for key, count in traffic.items():
                into[key] += count
    return {
        "round": number,
        "train": _measured(here),
        "evaluate": {},
        "central": central,
        "iterations": _largest([one["iterations"] for one in known]),
        "total_iterations": None,
        "bits": sum(one["bits"] for one in known),
        "payload_bytes": sum(one["payload_bytes"] for one in known),
        "by_link": dict(sorted(links.items())),
        "sim_seconds": _largest([one["sim_seconds"] for one in known]),
        "wall_seconds": max(one["wall_seconds"] for one in here),
        "sent": sum(one["sent"] for one in here),
        "accepted": sum(one["accepted"] for one in here),
        "rejected": lost_replies(here),
    }


def _events(sites: Sequence[OrchestratorFolder]) -> list[dict[str, Any]]:
    """Return the events of all sites; if a resumed site repeats one, its last record counts."""
    by_site = [{record["iterations"]: record for record in part.rounds} for part in sites]
    known: dict[int, Mapping[str, Any]] = {}
    out = []
    for number, iteration in enumerate(sorted(set[int]().union(*by_site))):
        known |= {site: records[iteration] for site, records in enumerate(by_site) if iteration in records}
        here = [records[iteration] for records in by_site if iteration in records]
        joined = _summed(number, here, list(known.values()))
        out.append({**joined, "train": {**joined["train"], **_of_nodes([one["train"] for one in here])}})
    return out


def _of_nodes(sites: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the sites' counts in an event, and the weighted means of their metrics."""
    counts = {
        key: sum(one.get(key, 0) for one in sites) for key in _COUNTS if any(key in one for one in sites)
    }
    active = [one for one in sites if one.get("receivers")]
    weights = [one["receivers"] for one in active]
    means = {
        SITES + key: float(np.average([one[key] for one in active], weights=weights))
        for key in (active[0] if active else ())
        if all(isinstance(one.get(key), float) for one in active) and key not in _SLOWEST
    }
    return {**counts, **means}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _largest(numbers: Sequence[Any]) -> Any:
    return None if None in numbers else max(numbers)
