"""The secret key of a group's hospital and devices, unknown to the server.

With it they match people by keyed hashes (HMAC-SHA256), seal labels for devices (AES-256-GCM), and sum
devices' features under masks. The key undoes all three for ids that can be guessed, so only the parties of
the group may have it.
"""

import hmac
import json
import os
import struct
import unicodedata
from collections.abc import Sequence
from hashlib import shake_256
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hedgerow.wire.fixed_point import joined, split

LEAST_BYTES, MOST_BYTES = 16, 4096
_NONCE = 12
_SEED = 32


class MatchKey:
    """The secret of one group.

    - ``secret``: 16 to 4096 random bytes, for example from ``openssl rand -out match.key 32``.
    - ``group``: m; a person has different hashes in different groups.
    """

    def __init__(self, secret: bytes, group: int) -> None:
        if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
            raise ValueError(
                f"match-key-file must hold {LEAST_BYTES} to {MOST_BYTES} bytes, got {len(secret)}"
            )
        self._group = group
        self._ids = self._derived(secret, "ids")
        self._labels = AESGCM(self._derived(secret, "labels"))
        self._masks = AESGCM(self._derived(secret, "masks"))

    @classmethod
    def read(cls, path: str, group: int) -> "MatchKey":
        """Read the key from a file; ValueError if it cannot be read."""
        file = Path(path).expanduser()
        try:
            secret = file.read_bytes()
        except OSError as error:
            raise ValueError(
                f"match-key-file must be a readable file, got {file.name!r} ({error.strerror})"
            ) from error
        return cls(secret, group)

    def _derived(self, secret: bytes, use: str) -> bytes:
        return hmac.digest(secret, f"hedgerow/hsgd/{use}/{self._group}".encode(), "sha256")

    def person(self, name: str) -> str:
        """Return the hash of an id: 128 bits of HMAC-SHA256, in hexadecimal. Unicode is normalised (NFC)."""
        plain = unicodedata.normalize("NFC", name).encode()
        return hmac.digest(self._ids, plain, "sha256")[:16].hex()

    # Labels for devices that have none.

    def seal(self, label: int, person: str, classes: Sequence[str]) -> bytes:
        """Seal a class, as its index, for this person's device; all sealed classes have the same length."""
        nonce = os.urandom(_NONCE)
        about = _label_of(person, classes)
        return nonce + self._labels.encrypt(nonce, struct.pack("<I", label), about.encode())

    def unseal(self, sealed: bytes, person: str, classes: Sequence[str]) -> int:
        """Return the class; ValueError if it was not sealed for this person and list with this key.

        It is bound to the list: otherwise the server could send the device a shorter list, and learn from a
        refusal whether the label is on it.
        """
        plain = _opened(self._labels, sealed, _label_of(person, classes), "label")
        return int(struct.unpack("<I", plain)[0])

    # Sums of devices with one person each.

    def mask(self, numbers: Sequence[int], person: str) -> tuple[bytes, bytes]:
        """Return fixed-point numbers under new masks, and the sealed seed of the masks."""
        seed, nonce = os.urandom(_SEED), os.urandom(_NONCE)
        masked = [n + m for n, m in zip(numbers, _expanded(seed, len(numbers)), strict=True)]
        return joined(masked), nonce + self._masks.encrypt(nonce, seed, person.encode())

    def masks(self, sealed: Sequence[bytes], people: Sequence[str], count: int) -> bytes:
        """Return the sum of these people's masks, of ``count`` numbers each."""
        total = [0] * count
        for seed, person in zip(sealed, people, strict=True):
            own = _expanded(_opened(self._masks, seed, person, "mask"), count)
            total = [a + b for a, b in zip(total, own, strict=True)]
        return joined(total)


def _label_of(person: str, classes: Sequence[str]) -> str:
    return json.dumps([person, *classes])


def _opened(cipher: AESGCM, sealed: bytes, person: str, what: str) -> bytes:
    try:
        return cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], person.encode())
    except (InvalidTag, ValueError) as error:
        raise ValueError(
            f"a {what} was not sealed with this party's key for this person: hospital and devices must "
            "share one key (match-key-file)"
        ) from error


def _expanded(seed: bytes, count: int) -> list[int]:
    return split(shake_256(seed).digest(len(joined([0])) * count), count)
