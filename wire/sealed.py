"""Sealed links: end-to-end encryption between two nodes, through a server that relays their messages.

Building blocks, all from ``cryptography``: X25519 (RFC 7748), HKDF-SHA256 (RFC 5869), ChaCha20-Poly1305
(RFC 8439). The key agreement is the triple Diffie-Hellman of M. Marlinspike and T. Perrin, "The X3DH Key
Agreement Protocol", without its signed prekeys: each node has a long-lived key, which neighbours may pin, and
a session key of the run. Someone who later obtains a long-lived key cannot read earlier runs, and cannot
impersonate other nodes to its owner.

Every message has its own key, derived from the link's secret and the message's context: run, sender,
receiver, iteration and purpose. A message that is replayed at another iteration or in another run, redirected
or sent back therefore does not open. Nonces are random: a node that was reset and seals other contents for
the same iteration repeats a nonce with probability 2^-96, where a counter would certainly repeat it.
"""

import base64
import binascii
import json
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from hedgerow.wire.printable import reason
from hedgerow.wire.records import PayloadError

KEY_BYTES = 32
INTRODUCTION_BYTES = 2 * KEY_BYTES
_NONCE_BYTES, _TAG_BYTES = 12, 16
# Overhead of a sealed message.
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
# For contents that are sealed once for all receivers, each link carries their key and the SHA-256 of the
# ciphertext.
HEAD_KEY_BYTES = KEY_BYTES + 32

# Reasons to refuse a message or an introduction. Altered, replayed and reordered messages, and those of
# another link, cannot be distinguished.
ALTERED = "altered or replayed"
UNKNOWN = "not introduced"
MALFORMED = "malformed introduction"
CHANGED = "another key"
UNPINNED = "not pinned"
STRANGER = "not a neighbour"
REASONS = (ALTERED, UNKNOWN, MALFORMED, CHANGED, UNPINNED, STRANGER)

_PROTOCOL = "hedgerow sealed link 1"


class SealingKey:
    """An X25519 key pair, from 32 private bytes."""

    def __init__(self, private: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(private)
        self.private = private

    @classmethod
    def drawn(cls) -> "SealingKey":
        """Return a new key from the operating system's generator."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def simulated(cls, *of: str | int) -> "SealingKey":
        """Return a simulated node's key, derived from the arguments and therefore public."""
        return _simulated(*of)

    @classmethod
    def at(cls, path: Path) -> "SealingKey":
        """Return the key in a PEM file, as ``openssl genpkey -algorithm X25519`` writes it.

        A missing file is created, with its folder, readable only by its owner. ValueError if the file cannot
        be read or written, is readable by others, or holds no such key.
        """
        try:
            return cls._read(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ValueError(f"sealing key {path} cannot be read: {error.strerror}") from error
        made = cls.drawn()
        pem = made._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Created atomically and never overwritten, because two processes may start at the same time.
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, path)
            except FileExistsError:
                return cls._read(path)
            finally:
                draft.unlink()
        except OSError as error:
            raise ValueError(f"sealing key {path} cannot be written: {error.strerror}") from error
        return made

    @classmethod
    def _read(cls, path: Path) -> "SealingKey":
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            pem = file.read(4096)
        if os.name == "posix" and mode & 0o077:
            raise ValueError(f"sealing key {path} must have the mode 0600, its owner's alone, got {mode:04o}")
        try:
            key = load_pem_private_key(pem, None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"sealing key {path} is no key in PEM without a password") from error
        if not isinstance(key, X25519PrivateKey):
            raise ValueError(f"sealing key {path} must be an X25519 key, got another kind")
        return cls(key.private_bytes_raw())

    @cached_property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def agreed(self, public: bytes) -> bytes:
        """Return the shared secret with a public key; ValueError for a key of low order."""
        return self._key.exchange(X25519PublicKey.from_public_bytes(public))

    def lock(self, contents: bytes, about: str) -> bytes:
        """Encrypt contents that only this key's owner can decrypt, with the same ``about``."""
        return _sealed(self._own_secret, _about("own", about), contents)

    def unlock(self, locked: bytes, about: str) -> bytes:
        """Decrypt the result of ``lock``; PayloadError for anything else."""
        return _opened(self._own_secret, _about("own", about), locked)

    @cached_property
    def _own_secret(self) -> bytes:
        return HKDF(SHA256(), KEY_BYTES, None, b"hedgerow own contents").derive(self.private)


# The caches are for engines that simulate all nodes; a device's process handles one message.
@lru_cache(maxsize=2**15, typed=True)
def _simulated(*of: str | int) -> SealingKey:
    material = json.dumps(of).encode()
    return SealingKey(HKDF(SHA256(), KEY_BYTES, None, b"hedgerow simulated key").derive(material))


@dataclass(frozen=True)
class NodeIdentity:
    """A node's identity in a run: its long-lived key and its session key."""

    key: SealingKey
    session: SealingKey

    @cached_property
    def introduction(self) -> bytes:
        """The introduction to other nodes: both public keys, 64 bytes."""
        return self.key.public + self.session.public

    def secret_with(self, introduction: bytes) -> bytes:
        """Return the 32-byte secret that this node shares with another one.

        PayloadError with reason ``malformed introduction`` for one of another length, this node's own, or one
        with keys of low order.
        """
        if len(introduction) != INTRODUCTION_BYTES:
            raise PayloadError(MALFORMED, f"{len(introduction)} bytes, expected {INTRODUCTION_BYTES}")
        first, second = sorted((self.introduction, introduction))
        try:
            return _agreed(_Pair(first, second, self))
        except ValueError as error:
            raise PayloadError(MALFORMED, "keys that no node has") from error


@dataclass(frozen=True)
class _Pair:
    """Two introductions, ascending, and the asking node; a cache key that both ends share."""

    first: bytes
    second: bytes
    own: NodeIdentity = field(compare=False)


# All pairs of the largest sum, 255 members: 32,385.
@lru_cache(maxsize=2**16)
def _agreed(pair: _Pair) -> bytes:
    own, first, second = pair.own, pair.first, pair.second
    if first == second:
        raise ValueError("a node has no link with itself")
    introduction = second if own.introduction == first else first
    theirs, of_run = introduction[:KEY_BYTES], introduction[KEY_BYTES:]
    crossed = own.key.agreed(of_run), own.session.agreed(theirs)
    # Both ends concatenate the parts in the same order.
    one, other = crossed if own.introduction == first else crossed[::-1]
    parts = one + other + own.session.agreed(of_run)
    return HKDF(SHA256(), KEY_BYTES, None, _PROTOCOL.encode() + first + second).derive(parts)


@dataclass(frozen=True)
class Link:
    """One node's end of a link."""

    secret: bytes  # ``NodeIdentity.secret_with``
    run: str  # messages of another run do not open
    own: str  # this node's name, as the peer uses it
    peer: str

    def seal(self, contents: bytes, iteration: int, purpose: str) -> bytes:
        """Encrypt contents for the peer; the result is ``SEAL_BYTES`` longer."""
        return _sealed(self.secret, _message(self.run, self.own, self.peer, iteration, purpose), contents)

    def open(self, sealed: bytes, iteration: int, purpose: str) -> bytes:
        """Decrypt what the peer sealed for this node, iteration and purpose.

        PayloadError with reason ``altered or replayed`` for anything else.
        """
        return _opened(self.secret, _message(self.run, self.peer, self.own, iteration, purpose), sealed)


def _about(*what: str | int) -> bytes:
    # JSON is injective: different lists have different encodings.
    return json.dumps([_PROTOCOL, *what]).encode()


def _message(run: str, sender: str, receiver: str, iteration: int, purpose: str) -> bytes:
    """Return ``_about`` of the arguments, with its first part cached."""
    return b"%b, %d, %b]" % (_direction(run, sender, receiver), iteration, _quoted(purpose))


@lru_cache(maxsize=2**10)
def _quoted(purpose: str) -> bytes:
    return json.dumps(purpose).encode()


# Both directions between all members of the largest sum: 64,770.
@lru_cache(maxsize=2**16)
def _direction(run: str, sender: str, receiver: str) -> bytes:
    return _about(run, sender, receiver)[:-1]


def _sealed(secret: bytes, about: bytes, contents: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(_message_key(secret, about)).encrypt(nonce, contents, about)


def _opened(secret: bytes, about: bytes, sealed: bytes) -> bytes:
    if len(sealed) < SEAL_BYTES:
        raise PayloadError(ALTERED, f"{len(sealed)} bytes, expected at least {SEAL_BYTES}")
    nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(_message_key(secret, about)).decrypt(nonce, rest, about)
    except InvalidTag as error:
        raise PayloadError(ALTERED, "the seal does not hold") from error


def _message_key(secret: bytes, about: bytes) -> bytes:
    return HKDFExpand(SHA256(), KEY_BYTES, about).derive(secret)


class Links:
    """A node's links in a run: the peers that it knows and trusts.

    - ``own``: The node's name, as others use it.
    - ``pins``: The long-lived public keys of all trusted peers, by name. None: trust the first key of each
      name, and no other later.
    - ``known``: Introductions accepted earlier, by name.
    - ``neighbours``: The peers whose first key is trusted, those of the run's initial graph; None for all.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        run: str,
        own: str,
        pins: Mapping[str, bytes] | None = None,
        known: Mapping[str, bytes] | None = None,
        neighbours: frozenset[str] | None = None,
    ) -> None:
        self.identity, self.run, self.own, self.pins = identity, run, own, pins
        self.neighbours = neighbours
        self.known: dict[str, bytes] = dict(known or {})

    @property
    def pinned(self) -> bool:
        """Whether the owner pinned the peers' keys; otherwise the first key is trusted."""
        return self.pins is not None

    def meet(self, peer: str, introduction: bytes, *, in_sum: bool = False) -> None:
        """Accept an introduction; a new session key alone means that the peer has restarted.

        With ``in_sum`` the peer is a member of a secure sum and need not be a neighbour. PayloadError with
        reason ``malformed introduction``, ``not pinned``, ``not a neighbour``, or ``another key`` than the
        pinned or first one; the known introduction is then kept.
        """
        self._check(peer, introduction, in_sum)
        self.identity.secret_with(introduction)
        self.known[peer] = introduction

    def link(self, peer: str, *, in_sum: bool = False) -> Link:
        """Return the link to a peer; PayloadError with reason ``not introduced``, or as in ``meet``."""
        if peer not in self.known:
            raise PayloadError(UNKNOWN, f"no introduction of {peer}")
        self._check(peer, self.known[peer], in_sum)
        return Link(self.identity.secret_with(self.known[peer]), self.run, self.own, peer)

    def _check(self, peer: str, introduction: bytes, in_sum: bool) -> None:
        key = introduction[:KEY_BYTES]
        if self.pins is not None and peer not in self.pins:
            raise PayloadError(UNPINNED, f"no key of {peer} is pinned")
        named = in_sum or self.pins is not None or self.neighbours is None or peer in self.neighbours
        if not named:
            raise PayloadError(STRANGER, f"{peer} was no neighbour when the run began")
        trusted = self.known.get(peer, key)[:KEY_BYTES] if self.pins is None else self.pins[peer]
        if key != trusted:
            raise PayloadError(CHANGED, f"{peer} has another key than before, or than is pinned")


def read_pins(path: Path) -> dict[str, bytes]:
    """Return the public keys in a TOML file, each in base64 under its node's name.

    ValueError if the file cannot be read, or for the first invalid key.
    """
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, ValueError) as error:
        because = reason(error, file=False)
        raise ValueError(
            f"neighbour keys must be a TOML file that can be read, got {path}: {because}"
        ) from error
    pins = {}
    for name, text in found.items():
        try:
            pins[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError):
            pins[name] = b""
        if len(pins[name]) != KEY_BYTES:
            raise ValueError(f"neighbour keys {path}: {name} must be 32 bytes in base64, got {text!r}")
    return pins
