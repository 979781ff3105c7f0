"""What a deployment starts, without starting it: command lines, node configs, order of the end."""

import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from hedgerow.sim import AppSpec, Deployment, StartError, SuperNode
from hedgerow.sim.deploy import launcher as deploy
from hedgerow.sim.deploy.launcher import FAST, THREADS
from hedgerow.sim.deploy.processes import Program
from hedgerow.sim.engine._compat import read_toml

# Plays flower-superlink and flower-supernode: says what it was started with, and waits.
FAKE = """#!{python} -IS
import json, os, sys, time
from pathlib import Path
name = Path(sys.argv[0]).name
env = {{key: value for key, value in os.environ.items() if key.startswith("FLWR")}}
print(json.dumps({{"name": name, "arguments": sys.argv[1:], "env": env}}), flush=True)
if name == "flower-supernode":
    refused = Path(sys.argv[0]).parent / "refused"
    left = int(refused.read_text()) if refused.exists() else 0
    if left:
        refused.write_text(str(left - 1))
        raise SystemExit("refused")
    print("INFO : SuperNode ID: 12345", flush=True)
time.sleep(float(os.environ.get("SECONDS_TO_LIVE", "60")))
"""

Deploy = Callable[..., Deployment]


@pytest.fixture
def spec(tmp_path: Path) -> AppSpec:
    config = {"lr": 0.5, "output-dir": "runs", "data-dir": "", "label": "plain"}
    return AppSpec("tiny-app", tmp_path / "app", config, {}, None)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("flower-superlink", "flower-supernode", "flwr"):
        (folder / name).write_text(FAKE.format(python=sys.executable))
        (folder / name).chmod(0o755)
    for module in ("launcher", "supernode", "flower_cli"):
        monkeypatch.setattr(f"hedgerow.sim.deploy.{module}.program", lambda name: str(folder / name))
    monkeypatch.setattr(deploy, "healthy", lambda *_: True)
    for key in (*FAST, THREADS):
        monkeypatch.delenv(key, raising=False)
    return folder


@pytest.fixture
def start(spec: AppSpec, fakes: Path) -> Iterator[Deploy]:
    made: list[Deployment] = []

    def build(num_nodes: int = 2, **options: object) -> Deployment:
        one = Deployment(spec, num_nodes, **options)  # type: ignore[arg-type]
        made.append(one)
        return one.__enter__()

    yield build
    for one in made:
        one.close()


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


# Command lines


def test_without_tls_everything_is_told_to_be_insecure(start: Deploy) -> None:
    one = start()
    for program in (one.superlink, *one.nodes):
        assert "--insecure" in program.command
        assert not any("ssl" in word or "auth" in word for word in program.command)
    assert read_toml(one.home / "cli" / "config.toml") == {
        "superlink.deployment.address": one.address,
        "superlink.deployment.insecure": True,
    }


def test_with_tls_every_node_has_its_key_and_trusts_the_ca(
    start: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Path] = []
    monkeypatch.setattr(
        Deployment, "_register", lambda _, keys: registered.extend(k.public for k in keys.nodes)
    )
    one = start(2, tls=True)
    ca = str(one.home / "keys" / "ca.crt")
    superlink = one.superlink.command
    assert "--enable-supernode-auth" in superlink
    assert option(superlink, "--ssl-ca-certfile") == ca
    assert [option(node.command, "--root-certificates") for node in one.nodes] == [ca] * 2
    private = [Path(option(node.command, "--auth-supernode-private-key")) for node in one.nodes]
    assert private == [path.with_suffix("") for path in registered]
    assert len(set(private)) == 2
    assert read_toml(one.home / "cli" / "config.toml")["superlink.deployment.root-certificates"] == ca
    assert not any("--insecure" in program.command for program in (one.superlink, *one.nodes))


def test_every_program_has_a_home_of_its_own_in_a_private_folder(start: Deploy) -> None:
    one = start()
    homes = [Path(program.env["FLWR_HOME"]) for program in (one.superlink, *one.nodes)]
    assert len(set(homes)) == 3
    assert {home.parent for home in homes} == {one.home}
    assert stat.S_IMODE(one.home.stat().st_mode) == 0o700


def test_nothing_is_installed_and_nothing_is_told_to_anyone(start: Deploy) -> None:
    one = start()
    assert "--disable-runtime-dependency-installation" in one.superlink.command
    for program in (one.superlink, *one.nodes):
        assert program.env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        assert program.env["FLWR_TELEMETRY_ENABLED"] == "0"
        assert program.env["FLWR_DISABLE_UPDATE_CHECK"] == "1"


def test_nodes_share_the_cores_unless_the_user_says_otherwise(
    start: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "cores", lambda: 5)
    one = start(2)
    assert [node.env[THREADS] for node in one.nodes] == ["2", "2"]
    assert THREADS not in one.superlink.env
    assert THREADS not in start(1, fast=False).nodes[0].env
    monkeypatch.setattr(deploy, "cores", lambda: 1)
    assert start(2).nodes[0].env[THREADS] == "1"
    monkeypatch.setenv(THREADS, "4")
    assert start(1).nodes[0].env[THREADS] == "4"


def test_a_node_config_reaches_flower_as_it_was_said(start: Deploy) -> None:
    extra = [{"role": "device", "data-dir": "/a b/ü", "x": 0.5, "on": True}, {"role": 'the "hub"'}]
    one = start(2, node_config=extra)
    for i, node in enumerate(one.nodes):
        said = {"partition-id": i, "num-partitions": 2, **extra[i]}
        assert node.config == said
        if '"' not in str(extra[i]["role"]):  # Flower's own parser takes no escaped quotes
            assert parse_config_args([option(node.command, "--node-config")]) == said


# Start and end


def test_a_deployment_leaves_nothing_behind(start: Deploy) -> None:
    one = start()
    programs = [one.superlink, *one.nodes]
    assert all(program.running for program in programs)
    assert [node.node_id for node in one.nodes] == [12345] * 2
    one.close()
    assert not any(program.running for program in programs)
    assert not one.home.exists()


def test_sigterm_ends_what_was_started(spec: AppSpec, fakes: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    one = Deployment(spec, 2)

    def terminated() -> None:
        with one:
            assert all(program.running for program in (one.superlink, *one.nodes))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(SystemExit):
        terminated()
    assert not any(program.running for program in (one.superlink, *one.nodes))
    assert not one.home.exists()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("stage", ["_supernode", "_superlink"])
def test_an_error_at_any_stage_of_the_start_ends_what_was_started(
    start: Deploy, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Program] = []
    begin = Program.start
    monkeypatch.setattr(Program, "start", lambda self: (started.append(self), begin(self))[1])
    normal = getattr(Deployment, stage)

    def fail(self: Deployment, *arguments: object) -> object:
        if stage == "_supernode" and not self.nodes:
            return normal(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Deployment, stage, fail)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert len(started) == (2 if stage == "_supernode" else 0)
    assert not any(program.running for program in started)


def test_a_node_that_does_not_start_is_named_with_its_log(start: Deploy, fakes: Path) -> None:
    (fakes / "refused").write_text("1")
    with pytest.raises(StartError, match=r"the SuperNode of partition \d ended at its start(.|\n)*refused"):
        start()


def test_a_refused_node_is_started_again_until_it_is_taken(start: Deploy, fakes: Path) -> None:
    node: SuperNode = start(fast=False).nodes[1]
    node.kill()
    assert not node.running
    (fakes / "refused").write_text("2")
    node.restart(30, delay=0.1)
    assert node.running
    assert node.node_id == 12345
    assert (fakes / "refused").read_text() == "0"


def test_a_run_gets_its_settings_and_an_absolute_output_folder(
    start: Deploy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    one = start(env={"SECONDS_TO_LIVE": "0.1"})
    run = one.submit(one.plan("lr=0.1 output-dir=out"), echo=False)
    run.close()
    settings = read_toml(one.home / "run-config-0.toml")
    assert settings == {**one.spec.config, "lr": 0.1, "output-dir": str(tmp_path / "out")}
