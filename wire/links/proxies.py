"""HTTP proxies that the environment names: never for this machine, and named for any other address."""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

# As host names, and as the network that some programs understand.
_HERE = ("localhost", "127.0.0.1", "::1", "127.0.0.0/8")


def host_of(address: str) -> str:
    """Return the host of ``host``, ``host:port``, ``[::1]:port`` or a URL."""
    return urlsplit(address if "//" in address else f"//{address}").hostname or ""


def is_loopback(address: str) -> bool:
    """Return whether an address is this machine's own."""
    host = host_of(address)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def without_proxy_here(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose programs use no proxy for this machine; other exceptions stay."""
    listed = [one.strip() for key in ("no_proxy", "NO_PROXY") for one in env.get(key, "").split(",")]
    exceptions = ",".join(dict.fromkeys([*filter(None, listed), *_HERE]))
    return {**env, "no_proxy": exceptions, "NO_PROXY": exceptions}


def proxy_of(address: str) -> str | None:
    """Return the proxy by which this process's environment reaches an address; None for none."""
    host, proxies = host_of(address), getproxies_environment()
    if is_loopback(address) or proxy_bypass_environment(host, proxies):
        return None
    return next((proxies[kind] for kind in ("https", "http", "grpc", "all") if kind in proxies), None)
