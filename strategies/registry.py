"""The registry of a federation: a file of its owner that binds keys to names, places, roles and groups.

::

    [[node]]
    key = "keys/node0.pub"        # a file beside this one, or the OpenSSH line itself
    partition = 0

    [[node]]
    name = "ward-3"               # the name registered with its key at the SuperLink
    role = "hospital"
    group = "west"
    max-examples = 5000
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from hedgerow.wire.limits import MAX_EXAMPLES, MAX_PLACES, MAX_WORD
from hedgerow.wire.printable import quoted, shown


class RegistryError(ValueError):
    """A registry file that cannot be read, or has invalid contents."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A node's entry; None for a value that the node may choose."""

    # The name registered with its key at the SuperLink, which is its name in the run.
    name: str | None = None
    # DER.
    key: bytes | None = None
    partition: int | None = None
    role: str | None = None
    group: str | None = None
    max_examples: int | None = None


class Registry:
    """The nodes of a federation by their keys, or by the names registered with their keys.

    A node with a claim that does not match is excluded. This requires a SuperLink that authenticates nodes
    (``--enable-supernode-auth``); otherwise a node can present any key.

    Parameters
    ----------
    nodes : Sequence[Registered]
        Each with a key or a name; keys, names and partitions must be unique.
    """

    def __init__(self, nodes: Sequence[Registered]) -> None:
        self.nodes = tuple(nodes)
        for at, node in enumerate(self.nodes):
            if node.key is None and node.name is None:
                raise RegistryError(f"node {at} must have a key or a name")
        for what in ("key", "name", "partition"):
            values = [value for node in self.nodes if (value := getattr(node, what)) is not None]
            if len(values) != len(set(values)):
                twice = next(value for value in values if values.count(value) > 1)
                raise RegistryError(
                    f"{what} {'of two nodes' if what == 'key' else quoted(twice)} stands twice"
                )
        self.reserved = frozenset(node.partition for node in self.nodes if node.partition is not None)

    @classmethod
    def read(cls, path: str | Path) -> "Registry":
        """Return the registry of a TOML file; paths of key files are relative to it."""
        file = Path(path).expanduser()
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise RegistryError(f"{file}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RegistryError(f"{file}: no TOML: {error}") from error
        tables = document.get("node")
        if set(document) != {"node"} or not isinstance(tables, list):
            raise RegistryError(f"{file} must hold tables [[node]] alone")
        try:
            return cls([_registered(at, table, file.parent) for at, table in enumerate(tables)])
        except RegistryError as error:
            raise RegistryError(f"{file}: {error}") from error

    @classmethod
    def named(cls, path: str) -> "Registry | None":
        """Return the registry of a file as ``read`` does; None if ``path`` is empty."""
        return cls.read(path) if path else None

    def find(self, public_key: bytes, name: str) -> Registered | None:
        """Return the entry of a public key (PEM, as the SuperLink has it), else of a registered name."""
        key = _der(public_key) if public_key else None
        for node in self.nodes:
            if key is not None and node.key == key:
                # A key that is registered with another name matches no entry.
                return node if node.name in (None, name) else None
        return next((node for node in self.nodes if node.key is None and name and node.name == name), None)


def _registered(at: int, table: object, folder: Path) -> Registered:
    if not isinstance(table, dict):
        raise RegistryError(f"node {at} must be a table [[node]], got {quoted(table)}")
    if unknown := sorted(set(table) - set(_KEYS)):
        raise RegistryError(f"node {at}: unknown key {quoted(unknown[0])}; known keys are {', '.join(_KEYS)}")
    read = {key: _KEYS[key][0](table[key], folder) for key in table}
    for key, value in read.items():
        if value is None:
            raise RegistryError(f"node {at}: {key} must be {_KEYS[key][1]}, got {quoted(table[key])}")
    return Registered(**{key.replace("-", "_"): value for key, value in read.items()})


def _text(value: object, folder: Path) -> str | None:
    return value if isinstance(value, str) and value and value == shown(value, MAX_WORD) else None


def _between(least: int, most: int) -> Callable[[object, Path], int | None]:
    def read(value: object, folder: Path) -> int | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and least <= value <= most else None  # type: ignore[operator,return-value]

    return read


def _key(value: object, folder: Path) -> bytes | None:
    if not isinstance(value, str):
        return None
    try:
        return _der(value.encode() if " " in value.strip() else (folder / value).read_bytes())
    except OSError:
        return None


def _der(text: bytes) -> bytes | None:
    """Return an OpenSSH or PEM public key as DER; None if it is not valid."""
    try:
        load: Any = load_pem_public_key if text.lstrip().startswith(b"-----BEGIN") else load_ssh_public_key
        der: bytes = load(text).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return der


_TEXT = _text, f"a text of up to {MAX_WORD} printable characters"
# How each key is read (None if its value is not valid), and the valid values in words.
_KEYS: Mapping[str, tuple[Callable[[object, Path], Any], str]] = {
    "key": (_key, "an OpenSSH public key, or a file that holds one"),
    "name": _TEXT,
    "partition": (_between(0, MAX_PLACES - 1), f"an integer from 0 to {MAX_PLACES - 1}"),
    "role": _TEXT,
    "group": _TEXT,
    "max-examples": (_between(1, MAX_EXAMPLES), f"an integer from 1 to {MAX_EXAMPLES}"),
}


# The run config's setting of the registry: its valid values in words, and its check.
REGISTRY_TEXTS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "registry": ("a file like the nodes.toml of `hedgerow deploy keys`, or empty", Registry.named)
}
