"""Who may take part, and as whom: a file of the federation's owner that binds keys to places.

::

    [[node]]
    key = "keys/node0.pub"        # a file beside this one, or the OpenSSH line itself
    partition = 0

    [[node]]
    name = "ward-3"               # the name that its key was registered with at the SuperLink
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

__all__ = ["REGISTRY_TEXTS", "Registered", "Registry", "RegistryError"]


class RegistryError(ValueError):
    """A registry's file that cannot be read, or does not say what it must."""


@dataclass(frozen=True, slots=True)
class Registered:
    """What the registry says of one node; None for what it leaves to the node."""

    # The name that its key was registered with at the SuperLink, which it goes by in the run; the key, DER.
    name: str | None = None
    key: bytes | None = None
    partition: int | None = None
    role: str | None = None
    group: str | None = None
    max_examples: int | None = None


class Registry:
    """The nodes of a federation by their keys, or by the names that their keys were registered with.

    A claim that does not match is refused, and the node left out. This holds where the SuperLink
    authenticates nodes (``--enable-supernode-auth``); elsewhere a node shows whatever key it likes.

    Parameters
    ----------
    nodes : Sequence[Registered]
        One a node, each with a key or a name; no key, name or partition twice.

    Raises
    ------
    RegistryError
        If two nodes are the same, or one has neither key nor name.
    """

    def __init__(self, nodes: Sequence[Registered]) -> None:
        self.nodes = tuple(nodes)
        for at, node in enumerate(self.nodes):
            if node.key is None and node.name is None:
                raise RegistryError(f"node {at} must have a key or a name")
        for what in ("key", "name", "partition"):
            told = [value for node in self.nodes if (value := getattr(node, what)) is not None]
            if len(told) != len(set(told)):
                twice = next(value for value in told if told.count(value) > 1)
                raise RegistryError(
                    f"{what} {'of two nodes' if what == 'key' else quoted(twice)} stands twice"
                )
        self.reserved = frozenset(node.partition for node in self.nodes if node.partition is not None)

    @classmethod
    def read(cls, path: str | Path) -> "Registry":
        """Return the registry of a TOML file; keys that are files are looked for beside it.

        A RegistryError names the file, the node and the key.
        """
        file = Path(path).expanduser()
        try:
            told = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise RegistryError(f"{file}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RegistryError(f"{file}: no TOML: {error}") from error
        tables = told.get("node")
        if set(told) != {"node"} or not isinstance(tables, list):
            raise RegistryError(f"{file} must hold tables [[node]] alone")
        try:
            return cls([_registered(at, table, file.parent) for at, table in enumerate(tables)])
        except RegistryError as error:
            raise RegistryError(f"{file}: {error}") from error

    @classmethod
    def named(cls, path: str) -> "Registry | None":
        """Return the registry of a file as ``read`` does; None where no file is named."""
        return cls.read(path) if path else None

    def find(self, public_key: bytes, name: str) -> Registered | None:
        """Return the node of a public key, PEM as the SuperLink has it, else of a registered name."""
        key = _der(public_key) if public_key else None
        for node in self.nodes:
            if key is not None and node.key == key:
                # A key that was registered under another's name is nobody's.
                return node if node.name in (None, name) else None
        return next((node for node in self.nodes if node.key is None and name and node.name == name), None)


def _registered(at: int, table: object, folder: Path) -> Registered:
    if not isinstance(table, dict):
        raise RegistryError(f"node {at} must be a table [[node]], got {quoted(table)}")
    if unknown := sorted(set(table) - set(_READERS)):
        raise RegistryError(
            f"node {at}: unknown key {quoted(unknown[0])}; known keys are {', '.join(_READERS)}"
        )
    read = {key: _READERS[key](table[key], folder) for key in table}
    for key, value in read.items():
        if value is None:
            raise RegistryError(f"node {at}: {key} must be {_VALID[key]}, got {quoted(table[key])}")
    return Registered(**{key.replace("-", "_"): value for key, value in read.items()})


def _word(value: object, folder: Path) -> str | None:
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
    """Return a public key of OpenSSH's or PEM's form as DER; None if it is none."""
    try:
        load: Any = load_pem_public_key if text.lstrip().startswith(b"-----BEGIN") else load_ssh_public_key
        der: bytes = load(text).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return der


_READERS: Mapping[str, Callable[[object, Path], Any]] = {
    "key": _key,
    "name": _word,
    "partition": _between(0, MAX_PLACES - 1),
    "role": _word,
    "group": _word,
    "max-examples": _between(1, MAX_EXAMPLES),
}
_VALID: Mapping[str, str] = {
    "key": "an OpenSSH public key, or a file that holds one",
    "name": f"a text of up to {MAX_WORD} printable characters",
    "partition": f"an integer from 0 to {MAX_PLACES - 1}",
    "role": f"a text of up to {MAX_WORD} printable characters",
    "group": f"a text of up to {MAX_WORD} printable characters",
    "max-examples": f"an integer from 1 to {MAX_EXAMPLES}",
}


# The text of a run config that says who may take part: what is valid, in words and as a check.
REGISTRY_TEXTS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "registry": ("a file like the nodes.toml of `hedgerow deploy keys`, or empty", Registry.named)
}
