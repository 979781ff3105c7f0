"""Keys and certificates of a deployment: a CA, the SuperLink's certificate, a key pair for each SuperNode.

Edge servers that are independent orchestrators each have all of these, from one CA, and a certificate for the
links between them.

By default the CA's private key is not kept, so that nobody can issue further certificates. A kept one is
encrypted, and renews them.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from errno import EEXIST
from hashlib import sha256
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
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hedgerow.sim.runs.durable import write_file
from hedgerow.wire.links.certificates import certified_name
from hedgerow.wire.links.proxies import host_of
from hedgerow.wire.printable import quoted

LOOPBACK = ("127.0.0.1", "localhost")
# Ten thousand keys take some seconds to write; no certificate should be valid for more than ten years.
_MOST_NODES, _MOST_EDGES, _MOST_DAYS = 10_000, 1_000, 3_650
# A CA that is kept outlives the certificates that it renews.
KEPT_CA_DAYS = 3_650
_SHORTEST_PASSPHRASE = 8


_LONGEST_HOST = 253
# Labels of letters, digits, "-" and "_", the first perhaps "*"; Docker's names have "_".
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(\*\.{_LABEL}\.)?{_LABEL}(\.{_LABEL})*")


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
class KeptCA:
    """Where the CA's private key is kept, encrypted.

    Parameters
    ----------
    key : Path
        The file, PEM.
    passphrase : str
        At least 8 characters; ValueError otherwise.
    """

    key: Path
    passphrase: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.passphrase) < _SHORTEST_PASSPHRASE:
            raise ValueError(f"the CA's passphrase must have at least {_SHORTEST_PASSPHRASE} characters")

    def write(self, key: EllipticCurvePrivateKey) -> None:
        """Write a new CA's key; FileExistsError if there is one."""
        encryption = BestAvailableEncryption(self.passphrase.encode())
        write(self.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption), 0o600)


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
    folder: Path,
    num_nodes: int,
    *,
    hosts: Sequence[str] = LOOPBACK,
    days: int = 90,
    keep_ca: KeptCA | None = None,
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
    days : int (default: 90)
        Validity of the certificates in days, 1 to 3,650; of a kept CA's own 3,650.
    keep_ca : KeptCA or None (default: None)
        Where to keep the CA's private key; None: nowhere.

    Raises
    ------
    ValueError
        If a number is out of range, there is no host, or one is neither a DNS name nor an IP address.
    FileExistsError
        If a key exists already, since a device may use it.
    """
    check_sizes(nodes=num_nodes, days=days)
    check_hosts(hosts)
    ca, ca_key = _new_ca(folder, days, keep_ca)
    return _written(folder, range(num_nodes), ca, ca_key, hosts, days)


def make_edge_credentials(
    folder: Path,
    partitions: Sequence[Sequence[int]],
    *,
    hosts: Sequence[Sequence[str]] | None = None,
    days: int = 90,
    keep_ca: KeptCA | None = None,
) -> list[EdgeCredentials]:
    """Write the files of ``make_credentials`` for each edge server to ``edge<d>``, all from one CA.

    ``partitions`` are the partition ids of each server's SuperNodes, and ``hosts`` each SuperLink's addresses
    and names, None for loopback. Other parameters and errors as in ``make_credentials``.
    """
    called = hosts or [LOOPBACK] * len(partitions)
    check_sizes(nodes=sum(map(len, partitions)), edges=len(partitions), days=days)
    for names in called:
        check_hosts(names)
    ca, ca_key = _new_ca(folder, days, keep_ca)
    made = []
    for d, (own, names) in enumerate(zip(partitions, called, strict=True)):
        home = folder / f"edge{d}"
        superlink = _written(home, own, ca, ca_key, names, days)
        made.append(EdgeCredentials(superlink, *_peer_files(home, d, ca, ca_key, days)))
    return made


def _new_ca(folder: Path, days: int, keep: KeptCA | None) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    """Make the folder and a CA, whose key is written only if it is to be kept."""
    if (folder / "ca.crt").exists() or (folder / "edge0").exists():
        raise FileExistsError(EEXIST, "File exists", str(folder))
    if keep is not None and keep.key.exists():
        raise FileExistsError(EEXIST, "File exists", str(keep.key))
    _make_folder(folder)
    key = generate_private_key(SECP384R1())
    if keep is not None:
        keep.write(key)
    return certificate_authority(key, days if keep is None else KEPT_CA_DAYS), key


def make_node_key(folder: Path, partition: int) -> NodeKey:
    """Write a new key pair of a SuperNode; FileExistsError if there is one."""
    node = NodeKey(folder / f"node{partition}", folder / f"node{partition}.pub")
    key = generate_private_key(SECP384R1())
    write(node.private, _pem(key, PrivateFormat.OpenSSH), 0o600)
    write(node.public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH), 0o644)
    return node


def registered(public: Path, partition: int) -> str:
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
    write(files[0], signed.public_bytes(Encoding.PEM), 0o644)
    write(files[1], _pem(key, PrivateFormat.PKCS8), 0o600)
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


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise ValueError unless these are names or addresses that a certificate check can match."""
    if not hosts:
        raise ValueError("hosts must be one or more addresses or names of the SuperLink, got none")
    for host in hosts:
        if not _is_host(host):
            raise ValueError(
                "hosts must be DNS names or IP addresses, without scheme, port, brackets or path, got "
                f"{quoted(host)}{_meant(host)}"
            )


def _is_host(host: object) -> bool:
    if not isinstance(host, str) or len(host) > _LONGEST_HOST:
        return False
    try:
        address = ip_address(host)
        # A scope names an interface of one machine; no client connects to the other two.
        return "%" not in host and not address.is_unspecified and not address.is_multicast
    except ValueError:
        # A name that ends in a number would be read as an address.
        return _DNS_NAME.fullmatch(host) is not None and not host.rpartition(".")[2].isdigit()


def _meant(host: object) -> str:
    """Return a remedy: the host within a URL or a host with a port, or the A-label of a name."""
    if not isinstance(host, str) or "%" in host:
        return ""
    if host.count(":") > 1 and not {"/", "["} & set(host):  # an IPv6 address has no port without brackets
        return ""
    try:
        inner = host_of(host.strip()).removesuffix(".")
        found = inner if inner.isascii() else inner.encode("idna").decode("ascii")
    except ValueError:
        return ""
    if not _is_host(found):
        return ""
    return f": write {found}" + ("" if inner.isascii() else ", its A-label")


def _written(
    folder: Path,
    partitions: Sequence[int],
    ca: x509.Certificate,
    ca_key: EllipticCurvePrivateKey,
    hosts: Sequence[str],
    days: int,
) -> Credentials:
    """Write the files of one SuperLink and its nodes."""
    folder.mkdir(mode=0o700, exist_ok=True)
    server_key = generate_private_key(SECP384R1())
    ways = [ExtendedKeyUsageOID.SERVER_AUTH]
    server = _signed("Hedgerow SuperLink", server_key.public_key(), ca, ca_key, hosts, days, ways)
    files = folder / "ca.crt", folder / "server.pem", folder / "server.key"
    write(files[0], ca.public_bytes(Encoding.PEM), 0o644)
    write(files[1], server.public_bytes(Encoding.PEM), 0o644)
    write(files[2], _pem(server_key, PrivateFormat.PKCS8), 0o600)
    nodes = [make_node_key(folder, i) for i in partitions]
    made = Credentials(*files, nodes, folder / "nodes.toml")
    bound = (registered(node.public, i) for i, node in zip(partitions, nodes, strict=True))
    write(made.registry, "\n".join(bound).encode(), 0o644)
    return made


def _make_folder(folder: Path) -> None:
    """Create a folder for keys, of which git takes nothing."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"the folder of the keys must be new or empty, got {quoted(str(folder))} with files")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(folder / ".gitignore", b"*\n", 0o644)


def certificate_authority(key: EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    """Return a CA's certificate, signed by itself."""
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


def signed_anew(
    old: x509.Certificate,
    ca: x509.Certificate,
    ca_key: EllipticCurvePrivateKey,
    days: int,
    hosts: Sequence[str] | None = None,
) -> x509.Certificate:
    """Return a certificate for the key, subject and uses of another, with a new validity.

    ``hosts`` replace its names and addresses; None keeps them.
    """
    key = old.public_key()
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    ways = old.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    (common,) = old.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not isinstance(key, EllipticCurvePublicKey):
        raise ValueError(f"a certificate to renew must have an EC key, got {type(key).__name__}")
    called = [str(name.value) for name in names] if hosts is None else hosts
    return _signed(str(common.value), key, ca, ca_key, called, days, list(ways))


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


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: EllipticCurvePrivateKey, layout: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, layout, NoEncryption())


def write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file; FileExistsError if there is one."""
    # Created with its mode, so that a key is never readable by others.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


# Keys of a deployment that runs already: further nodes, renewed certificates, revoked nodes. Node keys are no
# certificates: only a renewal needs the CA's private key. No private key but that of a revoked node is ever
# changed or removed.


_CA, _REGISTRY = "ca.crt", "nodes.toml"
# Those that a renewal signs anew: the SuperLink's, and an edge server's towards others.
_LEAVES = ("server.pem", "peer.pem")
_ENTRY = "[[node]]"


def certificates_of(folder: Path) -> list[Path]:
    """Return a folder's certificates, the CA's first; ValueError if ``deploy keys`` did not make it."""
    if not (folder / _CA).is_file():
        raise ValueError(f"the folder must be one that hedgerow deploy keys made, got {quoted(str(folder))}")
    return [file for name in (_CA, *_LEAVES) if (file := folder / name).is_file()]


def add_nodes(folder: Path, number: int) -> list[NodeKey]:
    """Write key pairs of ``number`` further nodes, with the lowest free partitions, and register them there.

    ValueError if ``number`` < 1 or there would be too many nodes.
    """
    certificates_of(folder)
    check_sizes(nodes=number, days=1)
    if number < 1:
        raise ValueError(f"the number of nodes to add must be an integer >= 1, got {number}")
    entries = _entries(folder)
    said = (_parsed(text).get("partition") for text in entries)
    taken = {partition for partition in said if isinstance(partition, int)}
    taken |= {
        int(found[1]) for file in folder.iterdir() if (found := re.fullmatch(r"node(\d+)(\.pub)?", file.name))
    }
    check_sizes(nodes=len(taken) + number, days=1)
    free = [i for i in range(len(taken) + number) if i not in taken][:number]
    made = [make_node_key(folder, i) for i in free]
    entries += [registered(node.public, i) for i, node in zip(free, made, strict=True)]
    _put(folder / _REGISTRY, "\n".join(entries).encode())
    return made


def revoke_node(folder: Path, partition: int) -> Path:
    """Take a node's key out of the registry, remove its private key here, and return where its public key is.

    The public key is kept as ``node<i>.revoked-<digest>.pub``, so that an operator can find the node. The
    SuperLink has to be told too: ``flwr supernode unregister``. ValueError if the node is not there.
    """
    certificates_of(folder)
    public = folder / f"node{partition}.pub"
    if not public.is_file():
        there = sorted(int(file.name[4:-4]) for file in folder.glob("node*.pub") if file.name[4:-4].isdigit())
        raise ValueError(f"the node to revoke must be one of {there}, got {partition}")
    # Refused by runs first, so that a crash here leaves no key that is registered and lost.
    kept = [text for text in _entries(folder) if _parsed(text).get("key") != public.name]
    _put(folder / _REGISTRY, "\n".join(kept).encode())
    (folder / f"node{partition}").unlink(missing_ok=True)
    revoked = folder / f"node{partition}.revoked-{sha256(public.read_bytes()).hexdigest()[:8]}.pub"
    return public.rename(revoked)


def renew_certificates(
    folder: Path, ca: KeptCA, *, days: int, hosts: Sequence[str] | None = None
) -> list[Path]:
    """Sign a folder's certificates anew, for the same keys, and return the files that changed.

    The CA's own certificate changes only if it would not outlive the others; nodes need its copy before the
    old one ends.

    Parameters
    ----------
    folder : Path
        The folder of a SuperLink's keys.
    ca : KeptCA
        The CA's key.
    days : int
        Validity of the new certificates in days, 1 to 3,650.
    hosts : Sequence[str] or None (default: None)
        New names and addresses of the SuperLink; None keeps them.

    Raises
    ------
    ValueError
        If a number or host is invalid, the passphrase is wrong or the key is that of another CA.
    """
    check_sizes(nodes=0, days=days)
    if hosts is not None:
        check_hosts(hosts)
    authority, *leaves = certificates_of(folder)
    issuer, key = x509.load_pem_x509_certificate(authority.read_bytes()), _ca_key(ca)
    if key.public_key() != issuer.public_key():
        raise ValueError(f"the CA's key must be that of {authority}, got {ca.key} of another CA")
    old = {file: x509.load_pem_x509_certificate(file.read_bytes()) for file in leaves}
    own = {file: hosts if file.name == _LEAVES[0] else None for file in leaves}
    made = {file: signed_anew(one, issuer, key, days, own[file]) for file, one in old.items()}
    changed = {}
    if any(one.not_valid_after_utc >= issuer.not_valid_after_utc for one in made.values()):
        changed[authority] = certificate_authority(key, max(days, KEPT_CA_DAYS))
    changed |= made
    for file, certificate in changed.items():
        _put(file, certificate.public_bytes(Encoding.PEM))
    return list(changed)


def _ca_key(ca: KeptCA) -> EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(ca.key.read_bytes(), ca.passphrase.encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{ca.key} is not a CA's key that this passphrase opens") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError(f"{ca.key} must be the EC key of hedgerow deploy keys --ca")
    return key


def _entries(folder: Path) -> list[str]:
    """Return the registry's text, cut before each entry; the text before the first is a part of its own."""
    try:
        text = (folder / _REGISTRY).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    parts = re.split(rf"(?m)^(?={re.escape(_ENTRY)})", text)
    return [part.rstrip("\n") + "\n" for part in parts if part.strip()]


def _parsed(text: str) -> dict[str, object]:
    """Return what a part of the registry says of a node."""
    try:
        (entry,) = tomllib.loads(text).get("node", [{}])
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{_REGISTRY} is not valid: {error}") from error
    return dict(entry)


def _put(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by others."""
    write_file(path, lambda file: file.write(content), 0o644)
