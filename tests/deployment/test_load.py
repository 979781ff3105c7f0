"""What the requests of a hundred nodes cost their SuperLink; ``-s`` shows the numbers.

A hundred SuperNodes need forty gigabytes. Here threads send a SuperNode's request, signed and over TLS, to a
real SuperLink, and wait as ``hedgerow node`` does.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from flwr.proto.fleet_pb2 import (  # type: ignore[import-untyped]
    ActivateNodeRequest,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.node_pb2 import Node  # type: ignore[import-untyped]
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from hedgerow.sim import make_credentials
from hedgerow.sim.deploy.flower_cli import environment, healthy
from hedgerow.sim.deploy.pace import PollPace
from hedgerow.sim.deploy.processes import Program, free_ports, program

pytestmark = pytest.mark.slow
NODES, SECONDS = 100, 20.0


class Poller(threading.Thread):
    """Asks for messages, of which there are none."""

    def __init__(self, address: str, ca: Path) -> None:
        super().__init__(daemon=True)
        private, public = generate_key_pairs()
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, public),
        ]
        self.client = FleetHttpClient.from_server_address(
            address, False, str(ca), interceptors, retry_invoker=make_simple_http_retry_invoker()
        )
        key = public_key_to_bytes(public)
        self.client.RegisterNode(RegisterNodeFleetRequest(public_key=key))
        request = ActivateNodeRequest(public_key=key, heartbeat_interval=600)
        self.node = Node(node_id=self.client.ActivateNode(request).node_id)
        self.pace = PollPace()
        self.asked: list[float] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            self.asked.append(time.monotonic())
            self.client.PullMessages(PullMessagesRequest(node=self.node))
            self.pace.sleep()


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[tuple[str, Path, Program]]:
    keys, (port,) = make_credentials(tmp_path / "keys", 1), free_ports(1)
    command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.server_certificate)]
    command += ["--ssl-keyfile", str(keys.server_key)]
    own = Program("the SuperLink", command, environment(tmp_path), tmp_path / "superlink.log")
    own.start()
    try:
        own.wait_until(lambda: healthy(port, keys.ca), 120)
        yield f"127.0.0.1:{port}", keys.ca, own
    finally:
        own.stop()


def test_a_hundred_idle_nodes_ask_forty_times_a_second_at_most(
    superlink: tuple[str, Path, Program],
) -> None:
    address, ca, server = superlink
    pollers = [Poller(address, ca) for _ in range(NODES)]
    cpu = psutil.Process(server.pid).cpu_times
    for poller in pollers:  # All at the same time.
        poller.pace._active -= 3600
        poller.start()
    found = {}
    for phase, since in (("idle", 3600.0), ("active", 0.0), ("10 s later", 10.0)):
        for poller in pollers:
            poller.pace._active = time.monotonic() - since
        time.sleep(4)  # The waits of the phase before.
        begin, used = time.monotonic(), cpu()
        time.sleep(SECONDS if phase == "idle" else 4)
        seconds, now = time.monotonic() - begin, cpu()
        asked = sum(begin <= at <= begin + seconds for poller in pollers for at in poller.asked)
        share = (now.user + now.system - used.user - used.system) / seconds
        print(f"{phase}: {asked / seconds:.0f} requests a second, {share:.2f} of a core")
        found[phase] = asked / seconds
    for poller in pollers:
        poller.over.set()
    for poller in pollers:
        poller.join()
        poller.client.close()
    assert found["idle"] <= NODES / 2.4
