"""``hedgerow node`` becomes Flower's SuperNode; before that it names the proxy to its SuperLink."""

import os
from typing import Any

import pytest
from typer.testing import CliRunner

from hedgerow.sim.cli import app


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
    assert became["arguments"][1:] == ["--superlink", address, "--insecure"]
    assert "127.0.0.1" in became["env"]["no_proxy"]
