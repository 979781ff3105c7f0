"""One run that several orchestrators wrote, each its folder, read as one.

Edge servers with a SuperLink each (``edge-servers = "direct"``) record what they know: their own model, their
own traffic. What their models are together, u, is measured afterwards (``together.py``); in runs of before a
monitor that they reported to (``edge-servers = "monitor"``) recorded it.

Sites of nodes that gossip (``peers``, ``site``) record what their own nodes did. Each numbers its own events;
those of all are put in order by iteration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from hedgerow.sim.runs.common_settings import role_of
from hedgerow.sim.runs.folder import lost_replies
from hedgerow.sim.runs.recorder import read_config, read_rounds

__all__ = [
    "SERVERS",
    "SITES",
    "TOGETHER",
    "OrchestratorFolder",
    "joined_config",
    "joined_rounds",
    "parts_beneath",
    "parts_of_runs",
]

# What was measured of the models of several servers together, in the folder of the first.
TOGETHER = "together.jsonl"
_KEY, _DIRECT, _MONITOR, _SITE = "edge-servers", "direct", "monitor", "site"
# What servers of one run may have different, beside what each may change when it goes on.
_OWN = ("edge", _SITE, _KEY, "min-available-nodes", "device")
# Real seconds of a round, which are over when they are over at the last server.
_SLOWEST = ("gossip-seconds", "model-exchange-seconds", "modelled-gossip-seconds", "site-seconds")
# Of the metrics that each server has of its own model, and each site of its own nodes.
SERVERS, SITES = "servers-", "sites-"
# What a site counts in an event.
_COUNTS = ("receivers", "deliveries", "refused", "withheld", "unopened")


class OrchestratorFolder(NamedTuple):
    """A folder that one of the orchestrators of a run wrote."""

    folder: Path
    config: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> OrchestratorFolder | None:
        """Return what a run folder holds; None if it is that of a run with one orchestrator."""
        config = read_config(folder)
        said = config.get("run", {})
        if not isinstance(said, dict):
            return None
        several = said.get(_KEY) in (_DIRECT, _MONITOR) or (_SITE in said and said.get("peers"))
        if not several:
            return None
        return cls(folder, config, read_rounds(folder))

    @property
    def is_monitor(self) -> bool:
        """Whether it is what a monitor saw."""
        return bool(self.config["run"].get(_KEY) == _MONITOR)

    @property
    def is_site(self) -> bool:
        """Whether it is what a site's nodes did."""
        return _KEY not in self.config["run"]

    @property
    def number(self) -> int:
        """Which edge server or site."""
        return int(self.config["run"].get(_SITE if self.is_site else "edge", 0))

    @property
    def who(self) -> str:
        """The monitor, or which edge server or site."""
        if self.is_site:
            return f"site {self.number}"
        return "the monitor" if self.is_monitor else f"edge server {self.number}"


def parts_beneath(folder: Path) -> list[Path]:
    """Return the run folders of orchestrators in a folder, or one level below it."""
    places = sorted([*folder.glob("*/config.json"), *folder.glob("*/*/config.json")])
    return [place.parent for place in places if OrchestratorFolder.read(place.parent) is not None]


def parts_of_runs(folders: Iterable[Path]) -> tuple[list[list[OrchestratorFolder]], list[Path]]:
    """Return the parts of each run, and the folders of runs with one part.

    Raises
    ------
    ValueError
        If two folders belong to the same server, in runs that cannot be distinguished.
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
        # The same settings more than once: on one machine each run has ports of its own.
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
    return [sorted(group, key=_order) for group in runs if len(group) > 1], single


def _identity(part: OrchestratorFolder, more: Sequence[str]) -> str:
    said = part.config["run"]
    kept = {key: value for key, value in said.items() if not _is_own(key) or key in more}
    return json.dumps(kept, sort_keys=True, default=str)


def _is_own(key: str) -> bool:
    """Return whether servers of one run may have different values of a setting: all go equally far."""
    return key in _OWN or (role_of(key).may_change and key != "iterations")


def _twice(parts: Sequence[OrchestratorFolder]) -> tuple[OrchestratorFolder, OrchestratorFolder] | None:
    seen: dict[str, OrchestratorFolder] = {}
    for part in parts:
        if (twin := seen.setdefault(part.who, part)) is not part:
            return twin, part
    return None


def _order(part: OrchestratorFolder) -> tuple[bool, int]:
    return part.is_monitor, part.number


def joined_config(parts: Sequence[OrchestratorFolder]) -> dict[str, Any]:
    """Return the config of the run: what its parts have in common."""
    first, said = parts[-1].config, dict(parts[-1].config["run"])
    kept = {key: value for key, value in said.items() if not _is_own(key) or key == "output-dir"}
    return {**first, "run": {**kept, **({} if parts[-1].is_site else {_KEY: _DIRECT})}}


def joined_rounds(parts: Sequence[OrchestratorFolder]) -> list[dict[str, Any]]:
    """Return the rounds of a run.

    Traffic is the servers' sum, simulated and real seconds the latest's; ``train`` has real seconds of the
    slowest and lost links of all. Where u was measured afterwards, ``central`` and ``train`` have what it
    was; elsewhere ``servers-loss`` is the mean of what servers say of their own models. With a monitor, as
    runs of before had one, rounds are those that it saw.

    Of sites they are the events of all, by iteration: counts are sums, and ``sites-disagreement`` is the mean
    of what sites say of their own nodes, weighted by how many of these took part; so is all that they say so.
    """
    servers = [part for part in parts if not part.is_monitor]
    if servers[0].is_site:
        return _events(servers)
    measured = _by_round(servers)
    for part in parts:
        if part.is_monitor:
            return [
                {**record, "train": {**record["train"], **_measured(measured.get(record["round"], []))}}
                for record in part.rounds
            ]
    together = {one["round"]: one for one in _lines(servers[0].folder / TOGETHER)}
    # Of each server its last record up to a round, for what is counted since the start.
    known: dict[Path, Mapping[str, Any]] = {}
    out = []
    for number in sorted(measured):
        known |= {
            part.folder: record for part in servers for record in part.rounds if record["round"] == number
        }
        record = _summed(number, measured[number], list(known.values()))
        if (u := together.get(number)) is not None:
            record |= {"central": u["central"], "train": {**u["train"], **record["train"]}}
        out.append(record)
    return out


def _lines(file: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    )


def _by_round(servers: Sequence[OrchestratorFolder]) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for part in servers:
        for record in part.rounds:
            found.setdefault(record["round"], []).append(record)
    return found


def _measured(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what servers measured in a round: real seconds of the slowest, and the links that all lost."""
    told = [record["train"] for record in records]
    seconds = {
        key: max(one[key] for one in told if key in one) for key in _SLOWEST if any(key in o for o in told)
    }
    lost: dict[str, int] = {}
    for one in told:
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
    told = [{record["iterations"]: record for record in part.rounds} for part in sites]
    known: dict[int, Mapping[str, Any]] = {}
    out = []
    for number, iteration in enumerate(sorted(set[int]().union(*told))):
        known |= {site: records[iteration] for site, records in enumerate(told) if iteration in records}
        here = [records[iteration] for records in told if iteration in records]
        joined = _summed(number, here, list(known.values()))
        out.append({**joined, "train": {**joined["train"], **_of_nodes([one["train"] for one in here])}})
    return out


def _of_nodes(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what sites report of their nodes in an event: sums of counts, and means."""
    counts = {key: sum(one.get(key, 0) for one in told) for key in _COUNTS if any(key in one for one in told)}
    heard = [one for one in told if one.get("receivers")]
    means = {
        SITES + key: float(
            np.average([one[key] for one in heard], weights=[one["receivers"] for one in heard])
        )
        for key in (heard[0] if heard else ())
        if all(isinstance(one.get(key), float) for one in heard) and key not in _SLOWEST
    }
    return {**counts, **means}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _largest(numbers: Sequence[Any]) -> Any:
    return None if None in numbers else max(numbers)
