"""Certificates of a deployment: the names of orchestrators in them, and when they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

# A certificate that ends within this many days is warned of at each start.
WARNED_DAYS = 30


def certified_name(peer: int) -> str:
    """Return the DNS name in the certificate of an orchestrator, by its number."""
    return f"edge-{peer}"


def ends(file: Path) -> datetime:
    """Return when a PEM file's certificates end: the last of several CAs, the first of a server's chain.

    OSError if the file cannot be read, ValueError if it has no certificate.
    """
    certificates = x509.load_pem_x509_certificates(file.read_bytes())
    authorities = all(one.subject == one.issuer for one in certificates)
    return (max if authorities else min)(one.not_valid_after_utc for one in certificates)


def ending(files: Iterable[Path], now: datetime | None = None) -> Iterator[str]:
    """Yield a warning for each PEM file whose certificates have ended or end within ``WARNED_DAYS`` days.

    OSError and ValueError as in ``ends``.
    """
    now = now or datetime.now(UTC)
    for file in files:
        end = ends(file)
        if end - now >= timedelta(days=WARNED_DAYS):
            continue
        when = f"ended on {end:%Y-%m-%d}" if end < now else f"ends on {end:%Y-%m-%d}"
        yield (
            f"the certificate {file} {when}, after which connections fail: renew it with "
            "hedgerow deploy keys FOLDER --renew"
        )
