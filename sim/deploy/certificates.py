"""Keys and certificates of a deployment: a CA, the SuperLink's certificate, a key pair for each SuperNode.

Edge servers that are independent orchestrators each have all of these, from one CA, and a certificate for the
links between them.

They are meant for your own machines and one experiment: the CA's private key is not kept, so that nobody can
issue further certificates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hedgerow.wire.certified import certified_name

__all__ = [
    "Credentials",
    "EdgeCredentials",
    "NodeKey",
    "check_sizes",
    "make_credentials",
    "make_edge_credentials",
]

LOOPBACK = ("127.0.0.1", "localhost")
# Labels of letters, digits, hyphens and underscores; the last is no number, as those of an address are.
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?:\*\.)?(?:{_LABEL}\.)*(?![0-9]+$){_LABEL}")
# Ten thousand keys take some seconds to write; no certificate should be valid for more than ten years.
_MOST_NODES, _MOST_EDGES, _MOST_DAYS = 10_000, 1_000, 3_650


@dataclass(frozen=True)
class NodeKey:
    """A SuperNode's key pair: the private key stays on the device, the public key is registered."""

    private: Path
    public: Path


@dataclass(frozen=True)
class Credentials:
    """The files of a deployment with TLS and authentication.

    Parameters
    ----------
    ca : Path
        The CA's certificate, which SuperNodes and ``flwr`` trust.
    server_certificate, server_key : Path
        The SuperLink's.
    nodes : Sequence[NodeKey]
        One per SuperNode, in the order of partition ids.
    registry : Path
        The file that binds each public key to its partition (docs/nodes.md), for the server.
    """

    ca: Path
    server_certificate: Path
    server_key: Path
    nodes: Sequence[NodeKey]
    registry: Path


@dataclass(frozen=True)
class EdgeCredentials:
    """The files of one edge server with its own SuperLink.

    Parameters
    ----------
    superlink : Credentials
        Of its SuperLink and SuperNodes.
    peer_certificate, peer_key : Path
        Its identity towards other edge servers.
    """

    superlink: Credentials
    peer_certificate: Path
    peer_key: Path


def make_credentials(
    folder: Path, num_nodes: int, *, hosts: Sequence[str] = LOOPBACK, days: int = 30
) -> Credentials:
    """Write new keys and certificates: EC P-384, private keys readable only by their owner.

    Parameters
    ----------
    folder : Path
        Created with mode 0700 if missing.
    num_nodes : int
        SuperNodes, 0 to 10,000.
    hosts : Sequence[str] (default: 127.0.0.1 and localhost)
        Addresses and names of the SuperLink, at least one.
    days : int (default: 30)
        Validity of the certificates in days, 1 to 3,650.

    Raises
    ------
    ValueError
        If a number is out of range, or there is no host.
    FileExistsError
        If a key exists already, since a device may use it.
    """
    check_sizes(nodes=num_nodes, days=days)
    _check_hosts(hosts)
    ca_key = generate_private_key(SECP384R1())
    ca = _certificate_authority(ca_key, days)
    return _written(folder, range(num_nodes), ca, ca_key, hosts, days)


def make_edge_credentials(
    folder: Path,
    partitions: Sequence[Sequence[int]],
    *,
    hosts: Sequence[Sequence[str]] | None = None,
    days: int = 30,
) -> list[EdgeCredentials]:
    """Write the files of ``make_credentials`` for each edge server to ``edge<d>``, all from one CA.

    ``partitions`` are the partition ids of each server's SuperNodes, and ``hosts`` each SuperLink's addresses
    and names, None for loopback. Other parameters and errors as in ``make_credentials``.
    """
    called = hosts or [LOOPBACK] * len(partitions)
    check_sizes(nodes=sum(map(len, partitions)), edges=len(partitions), days=days)
    for one in called:
        _check_hosts(one)
    ca_key = generate_private_key(SECP384R1())
    ca = _certificate_authority(ca_key, days)
    made = []
    for d, (own, names) in enumerate(zip(partitions, called, strict=True)):
        home = folder / f"edge{d}"
        superlink = _written(home, own, ca, ca_key, names, days)
        made.append(EdgeCredentials(superlink, *_peer_files(home, d, ca, ca_key, days)))
    return made


def _registered(public: Path, partition: int) -> str:
    """Return the registry entry that binds a key to its partition."""
    return f'[[node]]\nkey = "{public.name}"\npartition = {partition}\n'


def _peer_files(
    home: Path, peer: int, ca: x509.Certificate, ca_key: EllipticCurvePrivateKey, days: int
) -> tuple[Path, Path]:
    """Write the peer certificate and key of an orchestrator."""
    key = generate_private_key(SECP384R1())
    ways = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signed = _signed("Hedgerow edge server", key.public_key(), ca, ca_key, [certified_name(peer)], days, ways)
    files = home / "peer.pem", home / "peer.key"
    _write(files[0], signed.public_bytes(Encoding.PEM), 0o644)
    _write(files[1], _pem(key, PrivateFormat.PKCS8), 0o600)
    return files


def check_sizes(*, nodes: int, days: int, edges: int = 1) -> None:
    """Raise ValueError if the number of SuperNodes, edge servers or days is out of range."""
    bounds = {
        "nodes": (nodes, 0, _MOST_NODES),
        "edges": (edges, 1, _MOST_EDGES),
        "days": (days, 1, _MOST_DAYS),
    }
    for key, (value, least, most) in bounds.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            raise ValueError(f"{key} must be an integer from {least} to {most}, got {value!r}")


def _check_hosts(hosts: Sequence[str]) -> None:
    if not hosts:
        raise ValueError("hosts must be one or more addresses or names of the SuperLink, got none")
    for host in hosts:
        if not (_is_address(host) or (len(host) <= 253 and _NAME.fullmatch(host))):
            raise ValueError(
                "a host must be an IP address or a DNS name, without scheme, port or brackets, as 10.0.0.5 "
                f"or fed.example.org, got {host!r}"
            )


def _written(
    folder: Path,
    partitions: Sequence[int],
    ca: x509.Certificate,
    ca_key: EllipticCurvePrivateKey,
    hosts: Sequence[str],
    days: int,
) -> Credentials:
    """Write the files of one SuperLink and its nodes."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    server_key = generate_private_key(SECP384R1())
    ways = [ExtendedKeyUsageOID.SERVER_AUTH]
    server = _signed("Hedgerow SuperLink", server_key.public_key(), ca, ca_key, hosts, days, ways)
    made = Credentials(
        folder / "ca.crt",
        folder / "server.pem",
        folder / "server.key",
        [NodeKey(folder / f"node{i}", folder / f"node{i}.pub") for i in partitions],
        folder / "nodes.toml",
    )
    _write(made.ca, ca.public_bytes(Encoding.PEM), 0o644)
    _write(made.server_certificate, server.public_bytes(Encoding.PEM), 0o644)
    _write(made.server_key, _pem(server_key, PrivateFormat.PKCS8), 0o600)
    for node in made.nodes:
        node_key = generate_private_key(SECP384R1())
        public = node_key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        _write(node.private, _pem(node_key, PrivateFormat.OpenSSH), 0o600)
        _write(node.public, public, 0o644)
    bound = (_registered(node.public, i) for i, node in zip(partitions, made.nodes, strict=True))
    _write(made.registry, "\n".join(bound).encode(), 0o644)
    return made


def _certificate_authority(key: EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    name = _name("Hedgerow deployment CA")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _signed(
    subject: str,
    key: EllipticCurvePublicKey,
    ca: x509.Certificate,
    ca_key: EllipticCurvePrivateKey,
    hosts: Sequence[str],
    days: int,
    ways: Sequence[x509.ObjectIdentifier],
) -> x509.Certificate:
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _builder(_name(subject), ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage(ways), critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Tolerates devices' clock differences.
        .not_valid_before(now - timedelta(minutes=10))
        .not_valid_after(now + timedelta(days=days))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: EllipticCurvePrivateKey, layout: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, layout, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    # Created with its mode, so that a key is never readable by others.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
