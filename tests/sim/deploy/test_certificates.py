"""Keys and certificates: what OpenSSL and Flower take, and what nobody else can read."""

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from hedgerow.sim import make_credentials, make_edge_credentials
from hedgerow.sim.deploy.certificates import Credentials


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return make_credentials(tmp_path_factory.mktemp("parent") / "keys", 2, days=3)


def handshake(made: Credentials, hostname: str, ca: Path) -> None:
    """Let a client that trusts ``ca`` call a server with the made certificate by ``hostname``."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.server_certificate, made.server_key)
    client = ssl.create_default_context(cafile=str(ca))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=hostname)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (here, there):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert here.version() == "TLSv1.3"


@pytest.mark.parametrize("hostname", ["127.0.0.1", "localhost"])
def test_a_client_that_trusts_the_ca_takes_the_server(made: Credentials, hostname: str) -> None:
    handshake(made, hostname, made.ca)


def test_the_server_is_refused_under_another_name(made: Credentials) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, "example.org", made.ca)


def test_the_server_is_refused_by_who_trusts_another_ca(made: Credentials, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, "localhost", make_credentials(tmp_path, 0).ca)


def test_private_keys_are_for_their_owner_alone(made: Credentials) -> None:
    private = [made.server_key, *(node.private for node in made.nodes)]
    assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o600] * 3
    assert stat.S_IMODE(made.ca.parent.stat().st_mode) == 0o700


def test_the_ca_key_is_not_kept(made: Credentials) -> None:
    kept = {made.ca, made.server_certificate, made.server_key, made.registry, made.ca.with_name(".gitignore")}
    kept |= {path for node in made.nodes for path in (node.private, node.public)}
    assert set(made.ca.parent.iterdir()) == kept


def test_every_node_has_a_p384_key_of_its_own(made: Credentials) -> None:
    keys = [load_ssh_private_key(node.private.read_bytes(), None) for node in made.nodes]
    assert all(isinstance(key, EllipticCurvePrivateKey) and key.curve.name == "secp384r1" for key in keys)
    registered = [load_ssh_public_key(node.public.read_bytes()) for node in made.nodes]
    assert [key.public_key() for key in keys] == registered
    assert registered[0] != registered[1]


def test_keys_that_devices_may_rely_on_are_never_overwritten(made: Credentials) -> None:
    before = made.ca.read_bytes()
    with pytest.raises(FileExistsError):
        make_credentials(made.ca.parent, 2)
    assert made.ca.read_bytes() == before


def test_edge_servers_have_certificates_of_one_ca_for_both_ways_and_their_own_names(tmp_path: Path) -> None:
    made = make_edge_credentials(
        tmp_path / "keys", [[0, 1], [2]], hosts=[["10.0.0.1"], ["hub.local"]], days=2
    )
    assert made[0].superlink.ca.read_bytes() == made[1].superlink.ca.read_bytes()
    handshake(made[1].superlink, "hub.local", made[0].superlink.ca)
    ca = x509.load_pem_x509_certificate(made[0].superlink.ca.read_bytes())
    for d, one in enumerate(made):
        certificate = x509.load_pem_x509_certificate(one.peer_certificate.read_bytes())
        certificate.verify_directly_issued_by(ca)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [f"edge-{d}"]
        ways = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert {way._name for way in ways} == {"serverAuth", "clientAuth"}
        assert stat.S_IMODE(one.peer_key.stat().st_mode) == 0o600
    assert [node.private.name for node in made[1].superlink.nodes] == ["node2"]
    assert "partition = 2" in made[1].superlink.registry.read_text()
    with pytest.raises(ValueError, match=r"hosts must be .*got '10.0.0.1:80': write 10.0.0.1"):
        make_edge_credentials(
            tmp_path / "others", [[0], [1]], hosts=[["hub.local"], ["hub.local", "10.0.0.1:80"]]
        )
    assert not (tmp_path / "others").exists()
    with pytest.raises(ValueError, match="hosts must be one or more"):
        make_edge_credentials(tmp_path / "others", [[0]], hosts=[[]])
    with pytest.raises(ValueError, match="edges must be an integer from 1 to 1000, got 0"):
        make_edge_credentials(tmp_path / "others", [])


IP_OR_NAME = [
    "10.0.0.1",
    "::1",
    "2001:db8::7",
    "fl.example.org",
    "hub",
    "a-b.c_d.example",
    "*.example.org",
    "xn--mnchen-3ya.example",
    "a" * 63,
    "1.example",
]
NEITHER: dict[str, str | None] = {
    "192.168.1.10:8000": "192.168.1.10",
    "https://fl.example.org": "fl.example.org",
    "[::1]": "::1",
    "[2001:db8::7]:8000": "2001:db8::7",
    "fl example org": None,
    "": None,
    " ": None,
    "fl.example.org/x": "fl.example.org",
    "fl.example.org:8000": "fl.example.org",
    " fl.example.org": "fl.example.org",
    "münchen.example": "xn--mnchen-3ya.example",
    "192.168.1.256": None,
    "10.0.0": None,
    "10.0.0.0/8": "10.0.0.0",
    "fe80::1%eth0": None,
    "-a.example": None,
    "a..b": None,
    ".example": None,
    "example.": "example",
    "https://fl.example.org./x": "fl.example.org",
    "0.0.0.0": None,
    "::": None,
    "0.0.0.0:8000": None,
    "239.0.0.1": None,
    "ff02::1": None,
    "fe80::g": None,
    "cafe:1:2": None,
    "a" * 64: None,
    "a@b": "b",
    "*": None,
    "a.*.b": None,
    "grpc://10.0.0.1:1/": "10.0.0.1",
    "a,b": None,
}


@pytest.mark.parametrize("host", IP_OR_NAME)
def test_a_name_or_an_address_is_certified(host: str, tmp_path: Path) -> None:
    made = make_credentials(tmp_path, 0, hosts=[host])
    certificate = x509.load_pem_x509_certificate(made.server_certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [host]


@pytest.mark.parametrize("host", NEITHER)
def test_what_no_check_can_match_is_refused_before_a_file_is_written(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hosts must be DNS names or IP addresses") as refused:
        make_credentials(tmp_path / "keys", 1, hosts=["10.0.0.1", host])
    remedy = NEITHER[host]
    assert (f": write {remedy}" in str(refused.value)) is (remedy is not None)
    assert ("write" in str(refused.value)) is (remedy is not None)
    assert not (tmp_path / "keys").exists()
