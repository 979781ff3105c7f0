"""Whether a SuperLink or SuperNode with ``--health-server-address`` answers, for a container's health check.

Asks gRPC's standard health service, without TLS, as Flower offers it. It says that the program runs and
answers, not that a node has reached its SuperLink.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc

# An empty HealthCheckRequest is no bytes; the reply's field 1 is its status, and 1 is SERVING.
_SERVING = b"\x08\x01"


def answers(address: str, timeout: float = 5.0) -> bool:
    """Return whether the health service at ``host:port`` says within ``timeout`` seconds that it serves."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return bool(check(b"", timeout=timeout, wait_for_ready=False) == _SERVING)
        except grpc.RpcError:
            return False


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the one address given answers, else 1; 2 without an address."""
    if len(arguments) != 1:
        print("usage: python -m hedgerow.sim.deploy.health HOST:PORT", file=sys.stderr)
        return 2
    return 0 if answers(arguments[0]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
