"""``hedgerow node`` becomes Flower's SuperNode; before that it names the proxy to its SuperLink."""

import os
from typing import Any

import pytest
from typer.testing import CliRunner

from hedgerow.sim.cli import app
from hedgerow.sim.deploy.pace import POLL, paced
from hedgerow.sim.deploy.processes import program


@pytest.mark.parametrize(
    ("address", "exception", "named"),
    [
        ("192.168.1.10:8000", "", True),
        ("192.168.1.10:8000", "192.168.1.10", False),
        ("fl.example.org:443", ".example.com", True),
        ("127.0.0.1:8000", "", False),
    ],
)
def test_a_proxy_to_the_superlink_is_named_and_none_is_used_on_this_machine(
    address: str, exception: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: dict[str, Any] = {}
    monkeypatch.setattr(
        os, "execve", lambda path, arguments, env: became.update(env=env, arguments=arguments)
    )
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", exception)
    shown = CliRunner().invoke(app, ["node", "--superlink", address, "--insecure"])
    assert shown.exit_code == 0, shown.output
    assert ("is reached through the proxy http://proxy.example:3128" in shown.output) is named
    assert became["arguments"] == paced(program("flower-supernode"), ["--superlink", address, "--insecure"])
    assert "127.0.0.1" in became["env"]["no_proxy"]


@pytest.mark.parametrize(
    ("options", "variable", "used"),
    [([], None, None), (["--poll", "0.5-2"], "1-3", "0.5-2"), ([], "1-3", "1-3")],
)
def test_the_owner_bounds_how_often_the_node_asks(
    options: list[str], variable: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: dict[str, str] = {}
    monkeypatch.setattr(os, "execve", lambda path, arguments, env: became.update(env))
    monkeypatch.delenv(POLL, raising=False)
    if variable is not None:
        monkeypatch.setenv(POLL, variable)
    shown = CliRunner().invoke(app, ["node", "--superlink", "127.0.0.1:9", "--insecure", *options])
    assert shown.exit_code == 0, shown.output
    assert became.get(POLL) == used


def test_other_bounds_are_refused_before_the_node_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it started"))
    shown = CliRunner().invoke(app, ["node", "--superlink", "127.0.0.1:9", "--insecure", "--poll", "3"])
    assert shown.exit_code == 2
    assert "poll must be the shortest and the longest wait in seconds" in shown.output
