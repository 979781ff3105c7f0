"""Loopback never uses a proxy; other addresses do where the environment says so."""

import pytest

from hedgerow.wire.links.proxies import host_of, is_loopback, proxy_of, without_proxy_here

PROXY = "http://proxy.example:3128"


@pytest.fixture(autouse=True)
def _no_proxy_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("http", "https", "grpc", "all", "no"):
        for name in (f"{key}_proxy", f"{key}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


HERE = [
    "127.0.0.1:8000",
    "127.3.2.1",
    "localhost:1",
    "http://127.0.0.1:80/health",
    "[::1]:9",
    "a.localhost:1",
]
THERE = [
    "192.168.1.10:8000",
    "fl.example.org:443",
    "https://fl.example.org",
    "[2001:db8::1]:8000",
    "localhost.example:1",
]


@pytest.mark.parametrize("address", [*HERE, *THERE])
def test_only_other_addresses_have_a_proxy(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_of(address) is None
    monkeypatch.setenv("http_proxy", PROXY)
    assert is_loopback(address) is (address in HERE)
    assert proxy_of(address) == (None if address in HERE else PROXY)
    monkeypatch.setenv("no_proxy", f"other.example,{host_of(address)}")
    assert proxy_of(address) is None


@pytest.mark.parametrize("key", ["http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY"])
def test_each_variable_that_names_a_proxy_counts(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(key, PROXY)
    assert proxy_of("192.168.1.10:8000") == PROXY


def test_exceptions_of_the_environment_stay() -> None:
    made = without_proxy_here({"no_proxy": "a.example, b.example", "NO_PROXY": "c.example", "PATH": "/bin"})
    assert made["PATH"] == "/bin"
    assert made["no_proxy"] == made["NO_PROXY"]
    assert made["no_proxy"].split(",")[:3] == ["a.example", "b.example", "c.example"]
    assert {"127.0.0.1", "localhost", "::1"} <= {*made["no_proxy"].split(",")}
    assert without_proxy_here(made) == made
