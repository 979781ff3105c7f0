"""A deployment of several edge servers or sites on loopback, each with a SuperLink, SuperNodes and a run.

Every server is an independent orchestrator and exchanges models with the others over direct links
(``wire/links/peers.py``). There is no hub: this module only starts and ends them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from flwr.app import UserConfigValue
from rich.console import Console
from rich.table import Table

from hedgerow.sim.deploy.certificates import EdgeCredentials, make_edge_credentials
from hedgerow.sim.deploy.flower_cli import FlowerRun, RunEnd
from hedgerow.sim.deploy.launcher import LOGS_GONE, Deployment
from hedgerow.sim.deploy.processes import free_ports, stop_all
from hedgerow.sim.runs.app import AppSpec
from hedgerow.sim.runs.folder import read_rounds
from hedgerow.sim.runs.joined import parts_of_runs
from hedgerow.sim.runs.plan import Plan, absolute_output, plan_run, toml_value
from hedgerow.sim.runs.trained import evaluate_together
from hedgerow.sim.signals import sigterm_raises, uninterrupted
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB, PEER_TO_PEER

# The servers' names in output, and the losses that their tables report.
_NAMES = {"edge": "Edge server", "site": "Site"}
_LOST = {"edge": "lost links", "site": "lost payloads"}


def edge_overrides(
    edge: int,
    peers: Sequence[str],
    keys: EdgeCredentials | None = None,
    output_dir: str = "",
) -> list[str]:
    """Return the run config's overrides for the run of one edge server.

    Parameters
    ----------
    edge : int
        The server's number.
    peers : Sequence[str]
        ``host:port`` of each server.
    keys : EdgeCredentials or None (default: None)
        This server's credentials, with TLS.
    output_dir : str (default: "")
        The folder of the run folders, one per server; empty for the app's own setting.
    """
    settings: dict[str, UserConfigValue] = {
        "edge-servers": "direct",
        "num-servers": len(peers),
        "edge": edge,
        "peers": ",".join(peers),
        **_files(keys),
    }
    if output_dir:
        settings["output-dir"] = str(Path(output_dir) / f"edge{edge}")
    return _texts(settings)


def site_overrides(
    site: int, peers: Sequence[str], keys: EdgeCredentials | None = None, output_dir: str = ""
) -> list[str]:
    """Return the run config's overrides for the run of one site; parameters as above."""
    settings: dict[str, UserConfigValue] = {
        "site": site,
        "peers": ",".join(peers),
        "monitor": False,
        **_files(keys),
    }
    if output_dir:
        settings["output-dir"] = str(Path(output_dir) / f"site{site}")
    return _texts(settings)


def _files(keys: EdgeCredentials | None) -> dict[str, UserConfigValue]:
    """Return the settings that name a server's credentials."""
    if keys is None:
        return {}
    return {
        "peer-ca": str(keys.superlink.ca),
        "peer-certificate": str(keys.peer_certificate),
        "peer-key": str(keys.peer_key),
    }


def _texts(settings: Mapping[str, UserConfigValue]) -> list[str]:
    return [f"{key}={toml_value(value)}" for key, value in settings.items()]


class EdgeDeployment:
    """Edge servers on this machine, each a ``Deployment``, for the length of a ``with`` block.

    Parameters
    ----------
    spec : AppSpec
        The app, which has the settings of ``edge_overrides`` or, with ``sites``, of ``site_overrides``.
    partitions : Sequence[Sequence[int]]
        The partition ids of each server's SuperNodes.
    tls : bool (default: False)
        Encrypt and authenticate all links with certificates made for this deployment: between SuperNodes and
        their SuperLink, and between servers.
    node_config : Sequence[Mapping] or None (default: None)
        As in ``Deployment``, by partition id.
    keep_logs : Path or None (default: None)
        Copy the logs here at the end, a folder per server.
    sites : bool (default: False)
        Whether the servers are sites of gossiping nodes.

    Attributes
    ----------
    servers : list of Deployment
        By number.
    peers : list of str
        The address at which each server listens for the others.
    keys : list of EdgeCredentials
        Each server's credentials, with TLS.
    """

    def __init__(
        self,
        spec: AppSpec,
        partitions: Sequence[Sequence[int]],
        *,
        tls: bool = False,
        node_config: Sequence[Mapping[str, UserConfigValue]] | None = None,
        keep_logs: Path | None = None,
        sites: bool = False,
    ) -> None:
        self.who = "site" if sites else "edge"
        self.spec, self.partitions, self.tls = spec, [list(own) for own in partitions], tls
        self.num_nodes = sum(map(len, partitions))
        self._configs = [{}] * self.num_nodes if node_config is None else node_config
        self._keep_logs = keep_logs
        self.servers: list[Deployment] = []
        self.keys: list[EdgeCredentials] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(sigterm_raises())
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="hedgerow-edges-"))
        self._open.callback(shutil.rmtree, self.home, ignore_errors=True)
        count = len(self.partitions)
        ports = free_ports(2 * count)
        self.peers = [f"127.0.0.1:{port}" for port in ports[:count]]
        if self.tls:
            self.keys = make_edge_credentials(self.home / "keys", self.partitions)
        for d, own in enumerate(self.partitions):
            name = f"{self.who}{d}"
            configs = [{"partition-id": i, "num-partitions": self.num_nodes, **self._configs[i]} for i in own]
            one = Deployment(
                self.spec,
                len(own),
                tls=self.keys[d].superlink if self.tls else False,
                node_config=configs,
                port=ports[count + d],
                home=self.home / name,
                keep_logs=self._keep_logs and self._keep_logs / name,
            )
            self.servers.append(self._open.enter_context(one))

    def close(self) -> None:
        """End all programs; a second signal does not interrupt this."""
        with uninterrupted():
            # All nodes at once, which is faster than one deployment after another.
            stop_all([node for server in self.servers for node in server.nodes], 8.0)
            self._open.close()

    def plan(self, edge: int, *overrides: str, output_dir: str = "") -> Plan:
        """Return the plan of one server's run; overrides and errors as in ``plan_run``."""
        keys = self.keys[edge] if self.tls else None
        if self.who == "site":
            own = site_overrides(edge, self.peers, keys, output_dir)
        else:
            own = edge_overrides(edge, self.peers, keys, output_dir)
        return plan_run(self.spec, [*overrides, *own], num_nodes=self.num_nodes)

    def submit(self, edge: int, plan: Plan, *, echo: bool = True) -> FlowerRun:
        """Submit one server's run and return at once."""
        return self.servers[edge].submit(plan, echo=echo, prefix=f"{self.who} {edge} | ")


def deploy_edges(
    spec: AppSpec,
    overrides: Sequence[str],
    partitions: Sequence[Sequence[int]],
    *,
    output_dir: str = "",
    tls: bool = False,
    node_config: Sequence[Mapping[str, UserConfigValue]] | None = None,
    keep_logs: bool = False,
    sites: bool = False,
) -> int:
    """Run an app on new edge servers or sites; return 0 if every run completed, else 1.

    Parameters
    ----------
    spec, overrides, partitions
        The app, the user's overrides, and the SuperNodes of each server.
    output_dir : str (default: "")
        The folder of the run folders, one per server; empty for the app's own setting.
    tls, node_config, sites
        As in ``EdgeDeployment``.
    keep_logs : bool (default: False)
        Keep the logs in ``logs-<time>`` beside the run folders.

    Raises
    ------
    StartError
        If a program does not start.
    """
    folder = str(
        absolute_output({"output-dir": output_dir or str(spec.config.get("output-dir", "runs"))})[
            "output-dir"
        ]
    )
    logs = Path(folder) / time.strftime("logs-%Y%m%d-%H%M%S") if keep_logs else None
    started = time.monotonic()
    with EdgeDeployment(
        spec, partitions, tls=tls, node_config=node_config, keep_logs=logs, sites=sites
    ) as edges:
        who, guarded = "sites" if sites else "edge servers", "TLS, authenticated" if tls else "no TLS"
        print(
            f"{len(partitions)} {who}, {edges.num_nodes} SuperNodes ({guarded}), "
            f"up after {time.monotonic() - started:.0f} s",
            flush=True,
        )
        plans = [edges.plan(d, *overrides, output_dir=folder) for d in range(len(partitions))]
        runs = [edges.submit(d, plan) for d, plan in enumerate(plans)]
        ends = [run.wait() for run in runs]
        print(_table(runs, ends, edges.who))
        for d, end in enumerate(ends):
            if end.exit_code:
                status = f"{end.status} {end.details}".rstrip()
                print(f"{_NAMES[edges.who]} {d}, run {end.run_id}: {status}", file=sys.stderr)
    if logs:
        print(f"Logs: {logs}", flush=True)
    code = max(end.exit_code for end in ends)
    if code and not logs:
        print(LOGS_GONE, file=sys.stderr)
    return code


def _table(runs: Sequence[FlowerRun], ends: Sequence[RunEnd], who: str) -> str:
    """Return a table of each server's run, and of their mean model u, for a terminal."""
    table = Table(title=f"{_NAMES[who].lower()}s", title_justify="left")
    # No server of a site sees a loss.
    measured = ("loss", "accuracy") if who == "edge" else ()
    for column in (who, "status", "round", *measured, "hub MB", "peer MB", _LOST[who]):
        table.add_column(column, justify="right")
    folders = [run.folder for run in runs]
    rows = [
        (str(d), end.status, read_rounds(folder) if folder is not None else [])
        for d, (folder, end) in enumerate(zip(folders, ends, strict=True))
    ]
    if measured and (u := _together([folder for folder in folders if folder is not None])):
        rows.append(("u", "evaluated", u))
    for name, status, rounds in rows:
        last: Mapping[str, Any] = rounds[-1] if rounds else {}
        central, links = last.get("central", {}), last.get("by_link", {})
        prefix = _LOST[who].replace(" ", "-")
        lost = sum(count for one in rounds for key, count in one["train"].items() if key.startswith(prefix))
        table.add_row(
            name,
            status,
            str(last.get("round", "")),
            *(f"{central[name]:.4f}" if name in central else "" for name in measured),
            f"{_megabytes(links, HUB_TO_NODE, NODE_TO_HUB):.3f}",
            f"{_megabytes(links, PEER_TO_PEER):.3f}",
            str(lost),
        )
    console = Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    lines = [f"Run folder of {_NAMES[who].lower()} {d}: {run.folder}" for d, run in enumerate(runs)]
    return capture.get() + "\n".join(lines)


def _together(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the rounds of the servers' mean model; none, with a warning, if it cannot be measured."""
    try:
        runs, _ = parts_of_runs(folders)
        return evaluate_together(runs[0]) if runs else []
    except (OSError, ValueError) as error:
        print(f"u was not measured: {error}", file=sys.stderr)
        return []


def _megabytes(links: Mapping[str, Mapping[str, int]], *legs: str) -> float:
    return sum(links[leg]["payload_bytes"] for leg in legs if leg in links) / 1e6
