"""Keys of a deployment that runs already: further nodes, renewed certificates, revoked nodes.

Node keys are no certificates: only a renewal needs the CA's private key. No private key but that of a revoked
node is ever changed or removed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from hedgerow.sim.deploy.certificates import (
    KEPT_CA_DAYS,
    KeptCA,
    NodeKey,
    certificate_authority,
    check_hosts,
    check_sizes,
    make_node_key,
    registered,
    signed_anew,
)
from hedgerow.sim.runs.durable import write_file
from hedgerow.wire.printable import quoted

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
