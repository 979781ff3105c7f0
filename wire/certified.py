"""The names that certificates of orchestrators are for: for those who make them and those who check them."""

__all__ = ["certified_name"]


def certified_name(peer: int) -> str:
    """Return the DNS name in the certificate of an orchestrator, by its number."""
    return f"edge-{peer}"
