"""Checks of a SuperNode's arguments before it starts.

Flower's program answers a missing key or an invalid node config with a traceback, and retries for ever with
invalid certificates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from cryptography import x509

from hedgerow.sim.engine._compat import parse_config_args
from hedgerow.wire.checks import did_you_mean
from hedgerow.wire.printable import shown

__all__ = ["check_node_arguments", "misspelt_keys", "option_values"]


def check_node_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError if a node's file is missing or not a certificate, or its config is invalid."""
    for option in ("--root-certificates", "--auth-supernode-private-key"):
        for name in option_values(arguments, option):
            file = Path(name).expanduser()
            if not file.is_file():
                raise ValueError(f"{option} must be an existing file, got {name}")
            if option == "--root-certificates":
                try:
                    x509.load_pem_x509_certificates(file.read_bytes())
                except ValueError as error:
                    raise ValueError(
                        f"{option} must be the ca.crt of hedgerow deploy keys, a PEM certificate, got {name}"
                    ) from error
    for text in option_values(arguments, "--node-config"):
        try:
            parse_config_args([text])
        except click.ClickException as error:
            raise ValueError(
                f"--node-config {text}: must be KEY=VALUE pairs in TOML, separated by spaces, with texts in "
                'double quotes: \'data="/srv/ward.csv" label="outcome"\''
            ) from error


def misspelt_keys(arguments: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each node config key that resembles a known one; others may be the app's own."""
    for text in option_values(arguments, "--node-config"):
        for key in parse_config_args([text]):
            if key not in known and (meant := did_you_mean(key, known)):
                yield f"--node-config has {shown(key)}, which nothing here reads ({meant})"


def option_values(arguments: Sequence[str], option: str) -> Iterator[str]:
    """Yield an option's values among a program's arguments."""
    for at, one in enumerate(arguments):
        name, given, value = one.partition("=")
        if name == option and given:
            yield value
        elif one == option and at + 1 < len(arguments):
            yield arguments[at + 1]
