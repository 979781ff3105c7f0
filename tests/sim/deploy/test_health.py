"""The check of a container's health: only a service that says SERVING is healthy."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from hedgerow.sim.deploy import health
from hedgerow.sim.deploy.processes import free_ports


@pytest.mark.parametrize(("status", "code"), [(b"\x08\x01", 0), (b"\x08\x02", 1), (b"", 1)])
def test_only_a_program_that_serves_is_healthy(status: bytes, code: int) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    check = grpc.unary_unary_rpc_method_handler(lambda request, context: status)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert health.main([f"127.0.0.1:{port}"]) == code
    finally:
        server.stop(0).wait()


def test_a_program_that_is_gone_is_not_healthy() -> None:
    assert health.main([f"127.0.0.1:{free_ports(1)[0]}"]) == 1


def test_an_address_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main([]) == 2
    assert "HOST:PORT" in capsys.readouterr().err
