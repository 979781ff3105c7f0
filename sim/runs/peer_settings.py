"""The settings of a run whose server tells others of its kind something over links of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hedgerow.sim.runs.kinds import above, text
from hedgerow.sim.runs.settings import Role, Setting

__all__ = [
    "PEERS",
    "credential_files",
    "credential_problems",
    "peer_addresses",
    "peer_settings",
    "peers_setting",
]

PEERS = "peers"
_FILES = ("peer-ca", "peer-certificate", "peer-key")


def peers_setting(help: str) -> Setting:
    """Return ``peers`` itself."""
    return Setting("", text("host:port,host:port,…, or empty"), help, Role.IRRELEVANT)


def peer_settings(who: str) -> dict[str, Setting]:
    """Return all of them but ``peers``; ``who`` is what such a server is called, ``edge server`` say."""
    return {
        "peer-listen": Setting(
            "",
            text("host:port, or empty"),
            "where this one listens, if not at its own address in `peers`",
            Role.IRRELEVANT,
        ),
        "peer-timeout": Setting(
            600.0,
            above(0.0),
            f"seconds that another {who} which is late is waited for; half of that at the start",
            Role.IRRELEVANT,
        ),
        "peer-ca": Setting(
            "",
            text("a file like the ca.crt of `hedgerow deploy keys --edges`, or empty"),
            f"the certificate that {who}s' are signed with; empty: no TLS, on one machine alone",
            Role.IRRELEVANT,
        ),
        "peer-certificate": Setting(
            "",
            text("a file like its peer.pem, or empty"),
            f"with which this {who} proves who it is",
            Role.IRRELEVANT,
        ),
        "peer-key": Setting(
            "", text("a file like its peer.key, or empty"), "the private key of that", Role.IRRELEVANT
        ),
    }


def peer_addresses(values: Mapping[str, Any]) -> list[str]:
    """Return the addresses in ``peers``."""
    return [address for part in values[PEERS].split(",") if (address := part.strip())]


def credential_files(values: Mapping[str, Any]) -> tuple[Path, Path, Path] | None:
    """Return the files of the CA, the certificate and its key; None for a run without TLS."""
    if not values["peer-ca"]:
        return None
    ca, certificate, key = (Path(values[name]).expanduser() for name in _FILES)
    return ca, certificate, key


def credential_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong where some of the files are named and others are not."""
    named = [key for key in _FILES if values[key]]
    if len(named) in (1, 2):
        return [f"{named[0]} is set; valid is all of {', '.join(_FILES[:2])} and {_FILES[2]}, or none"]
    return []
