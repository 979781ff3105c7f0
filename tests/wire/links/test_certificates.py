"""When certificates end is told in time."""

from datetime import timedelta
from pathlib import Path

import pytest

from hedgerow.sim import make_credentials
from hedgerow.wire.links.certificates import ending, ends


@pytest.mark.parametrize(("days_left", "told"), [(31, ""), (29, "ends on"), (-1, "ended on")])
def test_the_end_of_a_certificate_is_told_thirty_days_before(
    tmp_path: Path, days_left: int, told: str
) -> None:
    made, longer = (
        make_credentials(tmp_path / "a", 0, days=20),
        make_credentials(tmp_path / "b", 0, days=3650),
    )
    now = ends(made.server_certificate) - timedelta(days=days_left)
    warnings = list(ending([made.server_certificate, longer.ca], now))
    assert len(warnings) == bool(told)
    assert all(told in warning and "server.pem" in warning for warning in warnings)


def test_of_two_cas_the_later_end_counts_and_of_a_chain_the_earlier(tmp_path: Path) -> None:
    short, long = (
        make_credentials(tmp_path / "short", 0, days=1),
        make_credentials(tmp_path / "long", 0, days=50),
    )
    both = tmp_path / "both.crt"
    both.write_bytes(short.ca.read_bytes() + long.ca.read_bytes())
    assert ends(both) == ends(long.ca)
    both.write_bytes(short.server_certificate.read_bytes() + long.ca.read_bytes())
    assert ends(both) == ends(short.server_certificate)
