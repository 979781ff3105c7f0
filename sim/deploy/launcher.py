"""A real deployment on loopback: a SuperLink, SuperNodes, and an app that runs on them.

These are the programs that run on devices, over HTTP, optionally with TLS and node authentication. Each
program has its own home, because Flower installs the app into it and nodes that share one may see half an
app. Everything lies in one private folder and ends with the deployment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from logging import WARNING
from pathlib import Path
from typing import Self

import tomli_w
from flwr.app import UserConfig, UserConfigValue
from flwr.common import log

from hedgerow.sim.deploy.certificates import Credentials, make_credentials
from hedgerow.sim.deploy.flower_cli import FlowerRun, RunEnd, environment, healthy
from hedgerow.sim.deploy.flower_run import submit
from hedgerow.sim.deploy.processes import Program, StartError, cores, free_ports, program, stop_all
from hedgerow.sim.deploy.supernode import SuperNode
from hedgerow.sim.deploy.users import NodeUsers, NoUsersError, give, own_copy, own_folder
from hedgerow.sim.deploy.warm import warm_path
from hedgerow.sim.runs.app import AppSpec, find_app
from hedgerow.sim.runs.plan import Plan, plan_run
from hedgerow.sim.signals import sigterm_raises, uninterrupted
from hedgerow.wire.links.certificates import ending
from hedgerow.wire.links.proxies import without_proxy_here

CONNECTION = "deployment"

# Public settings of the SuperLink that make a run start faster: its SuperExec asks for work every second.
FAST: Mapping[str, str] = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}

# Threads of a node's torch. Nodes on one machine share its cores: more threads than cores wait for each
# other, and the last bits of a loop over one node depend on the number of threads.
THREADS = "OMP_NUM_THREADS"

LOGS_GONE = "The logs of the nodes and servers are gone; --keep-logs keeps them."

# Node config keys that name files.
_FILES = ("data", "match-key-file", "constants", "policy")
# The environment variable that names the owner's policy.
POLICY_VARIABLE = "HEDGEROW_NODE_POLICY"


class Deployment:
    """A SuperLink and SuperNodes on this machine, for the length of a ``with`` block.

    SIGTERM ends the block as Ctrl-C does (in the main thread), because programs would outlive their owner and
    a ServerApp would keep all nodes busy. After a SIGKILL of the owner a guardian ends them.

    Parameters
    ----------
    app : AppSpec or str or Path
        The app: its folder, or a module inside it.
    num_nodes : int
        SuperNodes, >= 1; node i serves partition i.
    tls : bool or Credentials (default: False)
        Encrypt with certificates made for this deployment, or with given ones, and admit only registered
        nodes.
    node_config : Sequence[Mapping] or None (default: None)
        Further entries of each node's config, for example ``role`` or ``data-dir``; a ``partition-id``
        replaces i if these are not all nodes of a run.
    env : Mapping[str, str] or None (default: None)
        Added to the environment of every program.
    superlink_options : Sequence[str] (default: ())
        Added to the SuperLink's command, for example ``("--database", "state.db")``.
    port : int or None (default: None)
        The SuperLink's port; None for a free one.
    home : Path or None (default: None)
        The private folder, which is then kept; None for a temporary one.
    keep_logs : Path or None (default: None)
        Copy the folder of logs here at the end.
    own_users : bool (default: False)
        Start each node as its own user, if possible (``NodeUsers``). Only this user may read the node's home,
        its key and a copy of each file that its config names (``data``, ``match-key-file``, ``constants``,
        ``policy``). The node's ``predictions`` are copied back at the end.
    warm : bool (default: True)
        Fork ClientApps from a process that has imported Flower and torch (``warm.py``).
    fast : bool (default: True)
        Nodes ask for messages at the pace of ``pace.py``; set ``FAST`` at the SuperLink, and
        ``OMP_NUM_THREADS`` to each node's share of the cores, unless the environment does.
    patience : float (default: 180.0)
        Seconds for each program to start; one that ends is noticed at once.

    Attributes
    ----------
    superlink : Program
        The SuperLink.
    nodes : list of SuperNode
        The nodes, in the order of partition ids.
    users : list of int
        The nodes' user ids; empty if all run as this process's user, for the reason in ``no_users``.

    Raises
    ------
    ValueError
        If ``num_nodes`` < 1, or ``node_config`` does not have one entry per node.
    """

    def __init__(
        self,
        app: AppSpec | str | Path,
        num_nodes: int,
        *,
        tls: bool | Credentials = False,
        node_config: Sequence[Mapping[str, UserConfigValue]] | None = None,
        env: Mapping[str, str] | None = None,
        superlink_options: Sequence[str] = (),
        port: int | None = None,
        home: Path | None = None,
        keep_logs: Path | None = None,
        own_users: bool = False,
        warm: bool = True,
        fast: bool = True,
        patience: float = 180.0,
    ) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes must be an integer >= 1, got {num_nodes}")
        extra = [{}] * num_nodes if node_config is None else node_config
        if len(extra) != num_nodes:
            raise ValueError(
                f"node_config must have one entry for each of {num_nodes} nodes, got {len(extra)}"
            )
        self.spec = app if isinstance(app, AppSpec) else find_app(app)
        self.num_nodes = num_nodes
        self.tls = bool(tls)
        self._credentials = tls if isinstance(tls, Credentials) else None
        for warning in ending([tls.ca, tls.server_certificate]) if isinstance(tls, Credentials) else ():
            log(WARNING, "%s", warning)
        self._warm = warm
        self.patience = patience
        self.nodes: list[SuperNode] = []
        self.users: list[int] = []
        self.no_users = "" if own_users else "not asked for"
        # Files written by nodes, and where their owner wants a copy.
        self._brought_back: list[tuple[Path, Path]] = []
        self._configs: list[UserConfig] = [
            {"partition-id": i, "num-partitions": num_nodes, **more} for i, more in enumerate(extra)
        ]
        self._fast = fast
        self._more_env = {**_chosen(FAST), **(env or {})}
        share = max(1, cores() // num_nodes)
        self._node_env = {THREADS: str(share)} if fast else {}
        self._superlink_options = list(superlink_options)
        self._port = port
        self._runs: list[FlowerRun] = []
        self._keep_logs = keep_logs
        self._signals = ExitStack()
        self._temporary = home is None
        self._given_home = home

    # Start and end

    def __enter__(self) -> Self:
        self._signals.enter_context(sigterm_raises())
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all programs, nodes first; a second signal does not interrupt this."""
        with uninterrupted(), ExitStack() as steps:
            if self._temporary and hasattr(self, "home"):
                steps.callback(shutil.rmtree, self.home, ignore_errors=True)
            if self._keep_logs and hasattr(self, "home") and self.logs.is_dir():
                steps.callback(shutil.copytree, self.logs, self._keep_logs, dirs_exist_ok=True)
            for written, wanted in self._brought_back:
                if written.is_file():
                    steps.callback(shutil.copyfile, written, wanted)
            if hasattr(self, "superlink"):
                steps.callback(self.superlink.stop)
            # Nodes have nothing to save; a ServerApp has its checkpoint.
            steps.callback(stop_all, self.nodes, 8.0)
            for run in self._runs:
                steps.callback(run.close)
        self._signals.close()

    def _start(self) -> None:
        self.home = Path(self._given_home or tempfile.mkdtemp(prefix="hedgerow-deploy-")).absolute()
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._find_users()
        for folder in (self.logs, self.home / "cli", self.home / "superlink"):
            folder.mkdir(mode=0o700, exist_ok=True)
        keys = self._credentials
        if self.tls and keys is None:
            keys = make_credentials(self.home / "keys", self.num_nodes)
        port = self._port or free_ports(1)[0]
        self.address = f"127.0.0.1:{port}"
        self._ca = keys.ca if keys else None
        # For apps that check nodes against their registered keys.
        self._registry = keys.registry if keys else None
        if keys and self.users:
            _let_pass(keys.ca.parent)
        self._write_connection()
        self.superlink = self._superlink(port, keys)
        self.superlink.start()
        self.superlink.wait_until(lambda: healthy(port, self._ca), self.patience)
        if keys:
            self._register(keys)
        for i, port in enumerate(free_ports(self.num_nodes)):
            self.nodes.append(self._supernode(i, port, keys))
            self.nodes[i].start()
        for node in self.nodes:
            node.join(self.patience)

    def _superlink(self, port: int, keys: Credentials | None) -> Program:
        command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--disable-runtime-dependency-installation"]
        if keys is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.server_certificate)]
            command += ["--ssl-keyfile", str(keys.server_key), "--enable-supernode-auth"]
        command += self._superlink_options
        env = {**(FAST if self._fast else {}), **self._env("superlink")}
        return Program("the SuperLink", command, env, self.logs / "superlink.log")

    def _supernode(self, i: int, port: int, keys: Credentials | None) -> SuperNode:
        arguments = ["--superlink", self.address, "--port", str(port)]
        if keys is None:
            arguments += ["--insecure"]
        else:
            arguments += ["--root-certificates", str(keys.ca)]
            arguments += ["--auth-supernode-private-key", str(keys.nodes[i].private)]
        name = f"node{i}"
        env = {**self._node_env, **self._env(name)}
        if self._warm:
            env |= warm_path(self.home / name, env.get("PATH", ""))
        config, user = self._configs[i], None
        if self.users:
            user = self.users[i]
            if keys:
                give(keys.nodes[i].private, user)
            config, env = self._moved_in(name, config, env, user)
        log_file = self.logs / f"{name}.log"
        return SuperNode(self._partition(i), config, arguments, env, log_file, user, fast=self._fast)

    def _partition(self, i: int) -> int:
        return int(self._configs[i]["partition-id"])

    def _find_users(self) -> None:
        if self.no_users:
            return
        try:
            users = NodeUsers(self.num_nodes)
        except NoUsersError as error:
            self.no_users = str(error)
            return
        self._signals.callback(users.close)
        self.users = users.ids
        _let_pass(self.home)

    def _moved_in(
        self, name: str, config: UserConfig, env: Mapping[str, str], user: int
    ) -> tuple[UserConfig, dict[str, str]]:
        """Return config and environment of a node with copies of its files that only its user may read."""
        home = self.home / name
        own_folder(home, user)
        config, env = dict(config), {**env, "HOME": str(home)}
        for key in _FILES:
            file = Path(str(config.get(key, ""))).expanduser()
            if config.get(key) and file.exists():
                config[key] = str(own_copy(file, home / "files" / f"{key}{file.suffix}", user))
        policy = Path(env.get(POLICY_VARIABLE, "")).expanduser()
        if env.get(POLICY_VARIABLE) and policy.is_file():
            env[POLICY_VARIABLE] = str(own_copy(policy, home / "files" / "policy.toml", user))
        if wanted := config.get("predictions"):
            written = home / "predictions.csv"
            config["predictions"] = str(written)
            self._brought_back.append((written, Path(str(wanted)).expanduser().absolute()))
        return config, env

    def _register(self, keys: Credentials) -> None:
        known = [(self._partition(i), node.public) for i, node in enumerate(keys.nodes)]

        def register(node: tuple[int, Path]) -> tuple[int, str]:
            key, name = str(node[1]), f"partition-{node[0]}"
            try:
                shown = self.flwr(
                    "supernode", "register", key, CONNECTION, "--name", name, timeout=self.patience
                )
            except subprocess.TimeoutExpired as error:
                return 1, str(error)
            return shown.returncode, shown.stdout

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for (partition, _), (code, shown) in zip(known, pool.map(register, known), strict=True):
                if code:
                    raise StartError(f"the key of partition {partition} was not registered:\n{shown.strip()}")

    # Where things are

    @property
    def logs(self) -> Path:
        """The folder of the logs: ``superlink.log``, ``node0.log`` and so on."""
        return self.home / "logs"

    def _env(self, name: str) -> dict[str, str]:
        return without_proxy_here({**environment(self.home / name), **self._more_env})

    def _write_connection(self) -> None:
        folder = self.home / "cli"
        trust = {"root-certificates": str(self._ca)} if self._ca else {"insecure": True}
        text = tomli_w.dumps({"superlink": {CONNECTION: {"address": self.address, **trust}}})
        (folder / "config.toml").write_text(text, encoding="utf-8")

    # Runs

    def flwr(self, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run Flower's command line against this deployment; the connection's name is ``CONNECTION``."""
        return subprocess.run(
            [program("flwr"), *arguments],
            env=self._env("cli"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout,
        )

    def plan(self, *overrides: str) -> Plan:
        """Return a plan for this federation's size, without faults; overrides as in ``plan_run``."""
        plan = plan_run(self.spec, overrides, num_nodes=self.num_nodes)
        plan.check_no_faults()
        return plan

    def submit(self, plan: Plan | None = None, *, echo: bool = True, prefix: str = "") -> FlowerRun:
        """Submit a run and return at once; its log is followed until the deployment ends.

        ``plan`` comes from the method ``plan``; None for the app's defaults. ``echo`` prints the run's log as
        it comes, each line with the ``prefix``.
        """
        run_config = (plan or self.plan()).run_config
        if self._registry is not None and run_config.get("registry") == "":
            run_config = {**run_config, "registry": str(self._registry)}
        run = submit(
            [str(self.spec.folder), CONNECTION],
            run_config,
            self.home / f"run-config-{len(self._runs)}.toml",
            self._env("cli"),
            superlink=CONNECTION,
            echo=echo,
            prefix=prefix,
        )
        self._runs.append(run)
        return run

    def run(self, plan: Plan | None = None, *, echo: bool = True, timeout: float | None = None) -> RunEnd:
        """Submit a run and follow it to its end; TimeoutError if that takes over ``timeout`` seconds."""
        return self.submit(plan, echo=echo).wait(timeout)


def _let_pass(folder: Path) -> None:
    """Let other users open their own files in a folder, without listing it."""
    folder.chmod(0o711)


def _chosen(keys: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that the user's own environment has."""
    return {key: os.environ[key] for key in keys if key in os.environ}
