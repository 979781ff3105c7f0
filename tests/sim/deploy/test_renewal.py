"""Keys of a deployment that runs: nodes added and revoked, certificates renewed, and their end told."""

import ssl
import stat
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from tests.sim.cli.command_line import hedgerow
from tests.sim.deploy.test_certificates import handshake

from hedgerow.sim import make_credentials
from hedgerow.sim.deploy.certificates import Credentials, KeptCA
from hedgerow.sim.deploy.renewal import add_nodes, renew_certificates, revoke_node
from hedgerow.strategies import Registry

PASSPHRASE = "correct horse"


@pytest.fixture
def ca(tmp_path: Path) -> KeptCA:
    return KeptCA(tmp_path / "ca.key", PASSPHRASE)


@pytest.fixture
def made(tmp_path: Path, ca: KeptCA) -> Credentials:
    return make_credentials(tmp_path / "keys", 2, hosts=["localhost", "10.0.0.1"], days=20, keep_ca=ca)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def bound(made: Credentials) -> dict[str, int]:
    return {node["key"]: node["partition"] for node in tomllib.loads(made.registry.read_text())["node"]}


# The CA


def test_a_kept_ca_is_encrypted_for_its_owner_and_never_overwritten(made: Credentials, ca: KeptCA) -> None:
    assert stat.S_IMODE(ca.key.stat().st_mode) == 0o600
    with pytest.raises(TypeError):
        load_pem_private_key(ca.key.read_bytes(), None)
    before = ca.key.read_bytes()
    with pytest.raises(FileExistsError):
        make_credentials(made.ca.parent.with_name("others"), 1, keep_ca=ca)
    assert ca.key.read_bytes() == before
    assert not made.ca.parent.with_name("others").exists()
    assert PASSPHRASE not in repr(ca)


def test_a_short_passphrase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 8 characters"):
        KeptCA(tmp_path / "ca.key", "1234567")


# Certificates


def test_a_renewed_certificate_is_taken_by_nodes_that_have_the_old_ca(
    made: Credentials, ca: KeptCA, tmp_path: Path
) -> None:
    before = contents(made.ca.parent)
    assert renew_certificates(made.ca.parent, ca, days=100) == [made.server_certificate]
    after = contents(made.ca.parent)
    assert {name for name in after if after[name] != before.get(name)} == {"server.pem"}
    renewed = x509.load_pem_x509_certificate(made.server_certificate.read_bytes())
    assert renewed.not_valid_after_utc - datetime.now(UTC) > timedelta(days=99)
    handshake(made, "localhost", made.ca)
    handshake(made, "10.0.0.1", made.ca)


def test_a_ca_that_would_end_first_is_renewed_too_and_both_its_copies_are_good(
    made: Credentials, ca: KeptCA, tmp_path: Path
) -> None:
    old = tmp_path / "old.crt"
    old.write_bytes(made.ca.read_bytes())
    assert renew_certificates(made.ca.parent, ca, days=3650) == [made.ca, made.server_certificate]
    handshake(made, "localhost", made.ca)
    handshake(made, "localhost", old)


def test_a_renewal_may_give_other_hosts(made: Credentials, ca: KeptCA) -> None:
    renew_certificates(made.ca.parent, ca, days=30, hosts=["hub.local"])
    handshake(made, "hub.local", made.ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, "localhost", made.ca)


def test_a_renewal_that_is_refused_changes_nothing(made: Credentials, ca: KeptCA, tmp_path: Path) -> None:
    before = contents(made.ca.parent)
    other = KeptCA(tmp_path / "other.key", PASSPHRASE)
    make_credentials(tmp_path / "others", 0, keep_ca=other)
    for key, days, hosts, why in (
        (KeptCA(ca.key, "another phrase"), 30, None, "passphrase"),
        (other, 30, None, "another CA"),
        (ca, 0, None, "days must be"),
        (ca, 30, ["a b"], "hosts must be"),
    ):
        with pytest.raises(ValueError, match=why):
            renew_certificates(made.ca.parent, key, days=days, hosts=hosts)
    assert contents(made.ca.parent) == before
    with pytest.raises(ValueError, match="one that hedgerow deploy keys made"):
        renew_certificates(tmp_path, ca, days=30)


# Nodes


def test_added_nodes_change_no_key_that_is_there(made: Credentials) -> None:
    made.registry.write_text("# ours\n" + made.registry.read_text() + 'role = "hospital"\n')
    before = contents(made.ca.parent)
    added = add_nodes(made.ca.parent, 2)
    after = contents(made.ca.parent)
    assert {name for name in after if after[name] != before.get(name)} == {
        "nodes.toml", "node2", "node2.pub", "node3", "node3.pub",
    }  # fmt: skip
    assert [stat.S_IMODE(node.private.stat().st_mode) for node in added] == [0o600] * 2
    assert bound(made) == {f"node{i}.pub": i for i in range(4)}
    assert made.registry.read_text().startswith("# ours\n")
    assert tomllib.loads(made.registry.read_text())["node"][1]["role"] == "hospital"
    Registry.read(made.registry)


def test_a_revoked_node_is_out_of_the_registry_and_its_place_can_be_given_anew(made: Credentials) -> None:
    old = made.nodes[0].public.read_bytes()
    kept = revoke_node(made.ca.parent, 0)
    assert kept.read_bytes() == old
    assert bound(made) == {"node1.pub": 1}
    assert not made.nodes[0].private.exists()
    assert [node.private.name for node in add_nodes(made.ca.parent, 1)] == ["node0"]
    assert made.nodes[0].public.read_bytes() != old
    assert bound(made) == {"node1.pub": 1, "node0.pub": 0}
    Registry.read(made.registry)
    with pytest.raises(ValueError, match=r"one of \[0, 1\], got 2"):
        revoke_node(made.ca.parent, 2)


# When certificates end


def test_a_node_warns_at_its_start(
    made: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.execve", lambda *_: None)
    short = make_credentials(tmp_path / "short", 0, days=20)
    start = ["node", "--superlink", "127.0.0.1:1", "--root-certificates"]
    assert "Warning: the certificate" in hedgerow(*start, str(short.ca)).output
    assert "certificate" not in hedgerow(*start, str(made.ca)).output


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
def test_options_that_do_not_fit_are_refused(options: str, why: str, made: Credentials) -> None:
    before = contents(made.ca.parent)
    shown = hedgerow("deploy", "keys", str(made.ca.parent), *options.split())
    assert shown.exit_code == 2
    assert why in " ".join(shown.output.split())
    assert contents(made.ca.parent) == before


def test_a_new_folder_needs_a_number_of_nodes(tmp_path: Path) -> None:
    shown = hedgerow("deploy", "keys", str(tmp_path / "keys"))
    assert shown.exit_code == 2
    assert "--nodes must be given" in shown.output
