"""Keys and certificates: what OpenSSL and Flower take, and what nobody else can read."""

import ssl
import stat
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import make_credentials, make_edge_credentials
from hedgerow.sim.deploy.certificates import Credentials, KeptCA, add_nodes, renew_certificates, revoke_node
from hedgerow.strategies import Registry


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


PASSPHRASE = "correct horse"


@pytest.fixture
def ca(tmp_path: Path) -> KeptCA:
    return KeptCA(tmp_path / "ca.key", PASSPHRASE)


@pytest.fixture
def kept(tmp_path: Path, ca: KeptCA) -> Credentials:
    return make_credentials(tmp_path / "keys", 2, hosts=["localhost", "10.0.0.1"], days=20, keep_ca=ca)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def bound(kept: Credentials) -> dict[str, int]:
    return {node["key"]: node["partition"] for node in tomllib.loads(kept.registry.read_text())["node"]}


# The CA


def test_a_kept_ca_is_encrypted_for_its_owner_and_never_overwritten(kept: Credentials, ca: KeptCA) -> None:
    assert stat.S_IMODE(ca.key.stat().st_mode) == 0o600
    with pytest.raises(TypeError):
        load_pem_private_key(ca.key.read_bytes(), None)
    before = ca.key.read_bytes()
    with pytest.raises(FileExistsError):
        make_credentials(kept.ca.parent.with_name("others"), 1, keep_ca=ca)
    assert ca.key.read_bytes() == before
    assert not kept.ca.parent.with_name("others").exists()
    assert PASSPHRASE not in repr(ca)


def test_a_short_passphrase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 8 characters"):
        KeptCA(tmp_path / "ca.key", "1234567")


# Certificates


def test_a_renewed_certificate_is_taken_by_nodes_that_have_the_old_ca(
    kept: Credentials, ca: KeptCA, tmp_path: Path
) -> None:
    before = contents(kept.ca.parent)
    assert renew_certificates(kept.ca.parent, ca, days=100) == [kept.server_certificate]
    after = contents(kept.ca.parent)
    assert {name for name in after if after[name] != before.get(name)} == {"server.pem"}
    renewed = x509.load_pem_x509_certificate(kept.server_certificate.read_bytes())
    assert renewed.not_valid_after_utc - datetime.now(UTC) > timedelta(days=99)
    handshake(kept, "localhost", kept.ca)
    handshake(kept, "10.0.0.1", kept.ca)


def test_a_ca_that_would_end_first_is_renewed_too_and_both_its_copies_are_good(
    kept: Credentials, ca: KeptCA, tmp_path: Path
) -> None:
    old = tmp_path / "old.crt"
    old.write_bytes(kept.ca.read_bytes())
    assert renew_certificates(kept.ca.parent, ca, days=3650) == [
        kept.ca,
        kept.server_certificate,
    ]
    handshake(kept, "localhost", kept.ca)
    handshake(kept, "localhost", old)


def test_a_renewal_may_give_other_hosts(kept: Credentials, ca: KeptCA) -> None:
    renew_certificates(kept.ca.parent, ca, days=30, hosts=["hub.local"])
    handshake(kept, "hub.local", kept.ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(kept, "localhost", kept.ca)


def test_a_renewal_that_is_refused_changes_nothing(kept: Credentials, ca: KeptCA, tmp_path: Path) -> None:
    before = contents(kept.ca.parent)
    other = KeptCA(tmp_path / "other.key", PASSPHRASE)
    make_credentials(tmp_path / "others", 0, keep_ca=other)
    for key, days, hosts, why in (
        (KeptCA(ca.key, "another phrase"), 30, None, "passphrase"),
        (other, 30, None, "another CA"),
        (ca, 0, None, "days must be"),
        (ca, 30, ["a b"], "hosts must be"),
    ):
        with pytest.raises(ValueError, match=why):
            renew_certificates(kept.ca.parent, key, days=days, hosts=hosts)
    assert contents(kept.ca.parent) == before
    with pytest.raises(ValueError, match="one that hedgerow deploy keys made"):
        renew_certificates(tmp_path, ca, days=30)


# Nodes


def test_added_nodes_change_no_key_that_is_there(kept: Credentials) -> None:
    kept.registry.write_text("# ours\n" + kept.registry.read_text() + 'role = "hospital"\n')
    before = contents(kept.ca.parent)
    added = add_nodes(kept.ca.parent, 2)
    after = contents(kept.ca.parent)
    assert {name for name in after if after[name] != before.get(name)} == {
        "nodes.toml", "node2", "node2.pub", "node3", "node3.pub",
    }  # fmt: skip
    assert [stat.S_IMODE(node.private.stat().st_mode) for node in added] == [0o600] * 2
    assert bound(kept) == {f"node{i}.pub": i for i in range(4)}
    assert kept.registry.read_text().startswith("# ours\n")
    assert tomllib.loads(kept.registry.read_text())["node"][1]["role"] == "hospital"
    Registry.read(kept.registry)


def test_a_revoked_node_is_out_of_the_registry_and_its_place_can_be_given_anew(
    kept: Credentials,
) -> None:
    old = kept.nodes[0].public.read_bytes()
    public = revoke_node(kept.ca.parent, 0)
    assert public.read_bytes() == old
    assert bound(kept) == {"node1.pub": 1}
    assert not kept.nodes[0].private.exists()
    assert [node.private.name for node in add_nodes(kept.ca.parent, 1)] == ["node0"]
    assert kept.nodes[0].public.read_bytes() != old
    assert bound(kept) == {"node1.pub": 1, "node0.pub": 0}
    Registry.read(kept.registry)
    with pytest.raises(ValueError, match=r"one of \[0, 1\], got 2"):
        revoke_node(kept.ca.parent, 2)


# When certificates end


def test_a_node_warns_at_its_start(
    kept: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.execve", lambda *_: None)
    short = make_credentials(tmp_path / "short", 0, days=20)
    start = ["node", "--superlink", "127.0.0.1:1", "--root-certificates"]
    assert "Warning: the certificate" in hedgerow(*start, str(short.ca)).output
    assert "certificate" not in hedgerow(*start, str(kept.ca)).output


# The command


def test_the_command_keeps_a_ca_and_renews_adds_and_revokes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEDGEROW_CA_PASSPHRASE", PASSPHRASE)
    keys, ca = str(tmp_path / "keys"), ["--ca", str(tmp_path / "ca.key")]
    assert hedgerow("deploy", "keys", keys, "--nodes", "2", "--days", "20", *ca).exit_code == 0
    shown = hedgerow("deploy", "keys", keys)
    assert (shown.exit_code, "server.pem: valid until" in shown.output) == (1, True)
    assert "ends on" in shown.output
    assert hedgerow("deploy", "keys", keys, "--renew", *ca).exit_code == 0
    assert hedgerow("deploy", "keys", keys).exit_code == 0
    assert "register" in hedgerow("deploy", "keys", keys, "--add", "1").output
    assert "flwr supernode unregister" in hedgerow("deploy", "keys", keys, "--revoke", "1").output
    assert sorted(file.name for file in Path(keys).glob("node?")) == ["node0", "node2"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--nodes 1 --add 1", "at most one of"),
        ("--renew", "--ca FILE"),
        ("--add 1 --ca x", "--ca must be used with --nodes or --renew"),
        ("--revoke 0 --host a", "--host must be used with"),
        ("--revoke 7", "must be one of"),
        ("--edges 2", "--edges must be used with --nodes"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: str, why: str, kept: Credentials) -> None:
    before = contents(kept.ca.parent)
    shown = hedgerow("deploy", "keys", str(kept.ca.parent), *options.split())
    assert shown.exit_code == 2
    assert why in " ".join(shown.output.split())
    assert contents(kept.ca.parent) == before


def test_a_new_folder_needs_a_number_of_nodes(tmp_path: Path) -> None:
    shown = hedgerow("deploy", "keys", str(tmp_path / "keys"))
    assert shown.exit_code == 2
    assert "--nodes must be given" in shown.output
