"""``hedgerow node``: Flower's SuperNode, whose ClientApps start warm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import click
import typer


def node(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of flower-supernode: --superlink, --node-config, …", metavar="..."),
    ] = None,
    preload: Annotated[
        list[str] | None,
        typer.Option(help="A module to import in advance, like Flower, torch and the suite. Repeatable."),
    ] = None,
    poll: Annotated[
        str | None,
        typer.Option(
            help="Shortest and longest seconds between two requests for messages; HEDGEROW_POLL, or 0.1-3."
        ),
    ] = None,
) -> None:
    """Run flower-supernode; it asks for messages often while a run goes on, and seldom while none comes.

    Each message is handled by a fork of a process that has imported what it needs.

    Takes flower-supernode's own arguments, and becomes it: signals and exit codes are Flower's.
    """
    import os

    from hedgerow.sim.cli.options import bad_options, known_node_keys
    from hedgerow.sim.deploy.pace import POLL, PollPace, paced
    from hedgerow.sim.deploy.processes import program
    from hedgerow.sim.deploy.warm import PRELOAD, warm_path
    from hedgerow.wire.links.certificates import ending
    from hedgerow.wire.links.proxies import host_of, proxy_of, without_proxy_here

    if not arguments:
        with bad_options():
            raise ValueError(
                "a node needs the address of its SuperLink: hedgerow node --superlink HOST:PORT "
                "--root-certificates ca.crt"
            )
    with bad_options():
        _check_arguments(arguments)
        if poll is None:
            poll = os.environ.get(POLL)
        if poll is not None:
            PollPace.of(poll)
        trusted = [Path(name).expanduser() for name in _option_values(arguments, "--root-certificates")]
        warnings = [*ending(trusted), *misspelt_keys(arguments, known_node_keys())]
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)
    home = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser().absolute()
    supernode = program("flower-supernode")
    # Flower's programs start one another by name.
    path = os.pathsep.join([str(Path(supernode).parent), os.environ.get("PATH", "")])
    for address in _option_values(arguments, "--superlink"):
        if proxy := proxy_of(address):
            typer.echo(
                f"The SuperLink {address} is reached through the proxy {proxy}; directly if the environment "
                f"has no_proxy={host_of(address)}",
                err=True,
            )
    env = {**without_proxy_here(os.environ), **warm_path(home, path)}
    if preload:
        env[PRELOAD] = ",".join(preload)
    if poll is not None:
        env[POLL] = poll
    command = paced(supernode, arguments)
    os.execve(command[0], command, env)


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError if a node's file is missing or not a certificate, or its config is invalid.

    Flower's program answers these with a traceback, and retries for ever with invalid certificates.
    """
    from cryptography import x509

    from hedgerow.sim.engine._compat import parse_config_args

    for option in ("--root-certificates", "--auth-supernode-private-key"):
        for name in _option_values(arguments, option):
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
    for text in _option_values(arguments, "--node-config"):
        try:
            parse_config_args([text])
        except click.ClickException as error:
            raise ValueError(
                f"--node-config {text}: must be KEY=VALUE pairs in TOML, separated by spaces, with texts in "
                'double quotes: \'data="/srv/ward.csv" label="outcome"\''
            ) from error


def misspelt_keys(arguments: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each node config key that resembles a known one; others may be the app's own."""
    from hedgerow.sim.engine._compat import parse_config_args
    from hedgerow.wire.checks import did_you_mean
    from hedgerow.wire.printable import shown

    for text in _option_values(arguments, "--node-config"):
        for key in parse_config_args([text]):
            if key not in known and (meant := did_you_mean(key, known)):
                yield f"--node-config has {shown(key)}, which nothing here reads ({meant})"


def _option_values(arguments: Sequence[str], option: str) -> Iterator[str]:
    """Yield an option's values among a program's arguments."""
    for at, one in enumerate(arguments):
        name, given, value = one.partition("=")
        if name == option and given:
            yield value
        elif one == option and at + 1 < len(arguments):
            yield arguments[at + 1]
