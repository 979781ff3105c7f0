"""``hedgerow deploy``: an app on SuperNodes of this machine, keys for your own machines, split data."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hedgerow.sim.cli.options import (
    AppPath,
    NodeConfig,
    OwnData,
    RunConfig,
    bad_options,
    for_own_nodes,
    interruptible,
    read_node_configs,
    read_own_data,
    with_holdout,
)

if TYPE_CHECKING:
    from hedgerow.sim.deploy.certificates import KeptCA


class Level(StrEnum):
    """Where edge servers are."""

    E1 = "E1"
    E2 = "E2"
    E3 = "E3"

    @property
    def edge_servers(self) -> str:
        """The app's value of ``edge-servers``."""
        return {"E1": "emulated", "E2": "nodes", "E3": "direct"}[self.value]


def deploy_local(
    app_path: AppPath,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of SuperNodes. Default: the app's own, else 2.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and admit only SuperNodes whose key is registered.")
    ] = False,
    level: Annotated[
        Level | None,
        typer.Option(
            help="Where the app's edge servers are. E1: emulated. E2: nodes. E3: each has a SuperLink, "
            "SuperNodes and a run of its own."
        ),
    ] = None,
    edges: Annotated[
        int | None, typer.Option(min=1, help="Number of edge servers: the app's key 'num-servers'.")
    ] = None,
    sites: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of sites whose nodes gossip: each has a SuperLink, SuperNodes and a run of its own.",
        ),
    ] = None,
    run_config: RunConfig = None,
    node_config: NodeConfig = None,
    own_data: OwnData = None,
    one_user: Annotated[
        bool,
        typer.Option(
            "--one-user", help="With --own-data, as root: run all SuperNodes as you, not as separate users."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run folder goes: the key 'output-dir'.")
    ] = None,
    keep_logs: Annotated[
        bool, typer.Option("--keep-logs", help="Keep the programs' logs next to the run folder.")
    ] = False,
) -> None:
    """Run an app on a new SuperLink and SuperNodes on this machine, then stop them.

    Exits with 0 if the run completed, 1 if it failed or a program did not start, 2 on bad options, 130 if
    interrupted, 143 if terminated.
    """
    from hedgerow.sim.deploy.local import deploy_local as start
    from hedgerow.sim.deploy.processes import StartError
    from hedgerow.sim.deploy.supernode import readable_by_others
    from hedgerow.sim.runs.app import find_app, own_settings
    from hedgerow.sim.runs.plan import plan_run

    if level is Level.E3 or sites:
        if sites and (level or edges):
            with bad_options():
                raise ValueError(
                    "--sites must not be used with --level or --edges: sites have no edge servers"
                )
        _deploy_edges(
            app_path, nodes, edges, sites, run_config or [], node_config, own_data, out, tls, keep_logs
        )
    with bad_options():
        spec = find_app(app_path)
        overrides = list(run_config or [])
        overrides += [f"edge-servers={level.edge_servers}"] if level else []
        overrides += [f"num-servers={edges}"] if edges else []
        said, own = read_own_data(spec, own_data, nodes)
        plan = plan_run(
            spec, [*said, *overrides], num_nodes=nodes, output_dir=None if out is None else str(out)
        )
        plan.check_no_faults()
        records = None if own_settings(spec) else _records(out)
        configs = read_node_configs(spec, node_config, plan.num_nodes, own)
        configs = with_holdout(configs, plan.run_config)
        if own_data is None:
            configs = for_own_nodes(configs, plan.run_config)
        if own and (open_ := readable_by_others(own)):
            typer.echo(f"Warning: other users may read {open_[0]}, of {len(open_)} such files", err=True)
    try:
        with interruptible(lambda: "Interrupted; all programs are stopped"):
            code = start(
                spec,
                plan,
                tls=tls,
                node_config=configs,
                own_data=own_data is not None,
                own_users=own_data is not None and not one_user,
                keep_logs=keep_logs,
                records=records,
            )
    except StartError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def _records(out: Path | None) -> Path:
    """Return where the run of another project's app is recorded; the suite's apps record themselves."""
    from hedgerow.sim.runs.kinds import folder

    try:
        folder("a folder", writable=True).check(str(out or "runs"))
    except ValueError as error:
        raise ValueError(f"--out must be a folder, got {str(out)!r} ({error})") from error
    return out or Path("runs")


def _deploy_edges(
    app_path: str,
    nodes: int | None,
    edges: int | None,
    sites: int | None,
    run_config: list[str],
    node_config: list[str] | None,
    own_data: Path | None,
    out: Path | None,
    tls: bool,
    keep_logs: bool,
) -> NoReturn:
    from hedgerow.sim.deploy.edges import deploy_edges, edge_overrides, site_overrides
    from hedgerow.sim.deploy.processes import StartError
    from hedgerow.sim.runs.app import find_app
    from hedgerow.sim.runs.plan import parse_overrides, plan_run
    from hedgerow.strategies.edges import contiguous_clusters

    with bad_options():
        spec = find_app(app_path)
        if own_data is not None and sites:
            raise ValueError(
                "--own-data must not be used with --sites: sites would standardize data differently"
            )
        if own_data is not None:
            raise ValueError(
                "--own-data must not be used with --level E3: servers would standardize data differently"
            )
        said = {**spec.config, **parse_overrides(run_config, spec.config)}
        if sites and "site" not in said:
            raise ValueError("--sites must be used with an app that has the key 'site'")
        if sites is None and edges is None and not isinstance(said.get("num-servers"), int):
            raise ValueError("--edges must be given: the number of edge servers")
        number = sites or edges or int(said["num-servers"])
        # Check the settings before anything starts.
        placeholders = [f"127.0.0.1:{d + 1}" for d in range(number)]
        overrides = site_overrides if sites else edge_overrides
        for d in range(number):
            plan = plan_run(spec, [*run_config, *overrides(d, placeholders)], num_nodes=nodes)
        plan.check_no_faults()
        configs = for_own_nodes(read_node_configs(spec, node_config, plan.num_nodes), plan.run_config)
        # Nodes are assigned to sites like clients to edge servers.
        servers = contiguous_clusters(plan.num_nodes, number)
        partitions = [[i for i, server in enumerate(servers) if server == d] for d in range(number)]
    try:
        with interruptible(lambda: "Interrupted; all programs are stopped"):
            code = deploy_edges(
                spec,
                run_config,
                partitions,
                output_dir=str(out or said.get("output-dir", "")),
                tls=tls,
                node_config=configs,
                keep_logs=keep_logs,
                sites=bool(sites),
            )
    except StartError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def deploy_keys(
    folder: Annotated[Path, typer.Argument(help="Folder of the keys.")],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Make a new folder, for this many SuperNodes, up to 10000.")
    ] = None,
    add: Annotated[int | None, typer.Option(min=1, help="Add keys for this many SuperNodes.")] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Renew the folder's certificates, with --ca; keys stay.")
    ] = False,
    revoke: Annotated[
        int | None, typer.Option(min=0, help="Revoke the key of the SuperNode of this partition.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="IP address or DNS name of the SuperLink. Repeatable. Default: loopback only; with --renew, "
            "as before."
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid, up to 3650.")] = 365,
    edges: Annotated[
        int | None,
        typer.Option(
            help="Edge servers with a SuperLink each, a folder for each; SuperNodes are assigned to them in "
            "order. --host must then be given once for each, in order.",
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The CA's private key, encrypted: kept there with --nodes, used with --renew. Its "
            "passphrase is the variable HEDGEROW_CA_PASSPHRASE, or asked for. Default: not kept.",
        ),
    ] = None,
) -> None:
    """Make a CA, the SuperLink's certificate and a key pair for each SuperNode, for your own machines.

    With --add, --renew or --revoke: change a folder of keys. With none of them: show when its certificates
    end, and exit with 1 if one does within 30 days.
    """
    asked = {"--nodes": nodes, "--add": add, "--renew": renew or None, "--revoke": revoke}
    given = [option for option, value in asked.items() if value is not None]
    with bad_options():
        if len(given) > 1:
            raise ValueError(f"at most one of {', '.join(asked)} must be given, got {' and '.join(given)}")
        if edges is not None and nodes is None:
            raise ValueError("--edges must be used with --nodes")
        for option, value in {"--ca": ca, "--host": host}.items():
            if value and nodes is None and not renew:
                raise ValueError(f"{option} must be used with --nodes or --renew")
    if nodes is not None:
        _new_keys(folder, nodes, edges, host or [], days, ca)
    elif renew:
        _renewed_keys(folder, host, days, ca)
    elif add is not None or revoke is not None:
        _changed_nodes(folder, add, revoke)
    else:
        _shown_keys(folder)


def _kept_ca(file: Path | None, *, new: bool) -> KeptCA | None:
    """Return where the CA's key is, with its passphrase; None if it is not kept."""
    import os

    from hedgerow.sim.deploy.certificates import KeptCA

    if file is None:
        return None
    said = os.environ.get("HEDGEROW_CA_PASSPHRASE")
    if said is None:
        said = typer.prompt("The CA's passphrase", hide_input=True, confirmation_prompt=new)
    return KeptCA(file.expanduser(), said)


def _new_keys(
    folder: Path, nodes: int, edges: int | None, hosts: list[str], days: int, ca: Path | None
) -> None:
    from hedgerow.sim.deploy.certificates import LOOPBACK, make_credentials

    with bad_options():
        if (folder / "ca.crt").exists() or (folder / "edge0").exists():
            raise ValueError(
                f"the folder of --nodes must be new or empty, got {folder}, which has keys: change them with "
                "--add N, --renew or --revoke I"
            )
        keep = _kept_ca(ca, new=True)
        if edges is not None:
            return _edge_keys(folder, nodes, edges, hosts, days, keep)
        made = make_credentials(folder, nodes, hosts=[*LOOPBACK, *hosts], days=days, keep_ca=keep)
    typer.echo(f"SuperLink: {made.ca} {made.server_certificate} {made.server_key}")
    for key in made.nodes:
        typer.echo(f"SuperNode: {made.ca} {key.private}; register {key.public}")
    typer.echo(f"Keys and partitions, for the run's setting 'registry': {made.registry}")


def _renewed_keys(folder: Path, hosts: list[str] | None, days: int, ca: Path | None) -> None:
    from hedgerow.sim.deploy.certificates import LOOPBACK, certificates_of, renew_certificates
    from hedgerow.wire.links.certificates import ends

    with bad_options():
        certificates_of(folder)
        keep = _kept_ca(ca, new=False)
        if keep is None:
            raise ValueError(
                "--renew must be used with --ca FILE, the CA's key; if it was not kept, make a new folder "
                "with --nodes and --ca"
            )
        named = [*LOOPBACK, *hosts] if hosts else None
        changed = renew_certificates(folder, keep, days=days, hosts=named)
        for file in changed:
            typer.echo(f"{file}: valid until {ends(file):%Y-%m-%d}")
    if any(file.name == "ca.crt" for file in changed):
        typer.echo("Copy ca.crt to every node and to flwr's configuration before the old one ends")
    typer.echo("Restart the program that uses them")


def _changed_nodes(folder: Path, add: int | None, revoke: int | None) -> None:
    from hedgerow.sim.deploy.certificates import add_nodes, revoke_node

    with bad_options():
        for key in add_nodes(folder, add) if add is not None else ():
            typer.echo(f"SuperNode: {folder / 'ca.crt'} {key.private}; register {key.public}")
        if revoke is not None:
            kept = revoke_node(folder, revoke)
            typer.echo(f"Revoked in {folder / 'nodes.toml'}; its public key: {kept}")
            typer.echo("Now unregister it: flwr supernode list, then flwr supernode unregister NODE-ID")


def _shown_keys(folder: Path) -> None:
    from hedgerow.sim.deploy.certificates import certificates_of
    from hedgerow.wire.links.certificates import ending, ends

    with bad_options():
        if not folder.is_dir():
            raise ValueError(f"--nodes must be given for a new folder, got none for {folder}")
        files = certificates_of(folder)
        for file in files:
            typer.echo(f"{file}: valid until {ends(file):%Y-%m-%d}")
        warnings = list(ending(files))
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)
    raise typer.Exit(1 if warnings else 0)


def _edge_keys(
    folder: Path, nodes: int, edges: int, hosts: list[str], days: int, keep: KeptCA | None
) -> None:
    from hedgerow.sim.deploy.certificates import LOOPBACK, check_sizes, make_edge_credentials
    from hedgerow.strategies.edges import contiguous_clusters

    with bad_options():
        # Before a list of nodes is made.
        check_sizes(nodes=nodes, edges=edges, days=days)
        if len(hosts) not in (0, edges):
            raise ValueError(
                f"--host must be given once for each of the {edges} edge servers, got {len(hosts)}"
            )
        servers = contiguous_clusters(nodes, edges) if nodes else ()
        own = [[i for i, server in enumerate(servers) if server == d] for d in range(edges)]
        called = [[*LOOPBACK, host] for host in hosts] or None
        made = make_edge_credentials(folder, own, hosts=called, days=days, keep_ca=keep)
    for d, one in enumerate(made):
        superlink = one.superlink
        typer.echo(f"Edge server {d}: {superlink.ca} {one.peer_certificate} {one.peer_key}")
        typer.echo(f"  SuperLink: {superlink.ca} {superlink.server_certificate} {superlink.server_key}")
        for key in superlink.nodes:
            typer.echo(f"  SuperNode: {superlink.ca} {key.private}; register {key.public}")
        typer.echo(f"  Keys and partitions, for the run's setting 'registry': {superlink.registry}")


def deploy_split(
    dataset: Annotated[
        str, typer.Argument(help="A data set that `hedgerow data` lists, or 'module:function'.")
    ],
    folder: Annotated[Path, typer.Argument(help="Output folder; created if missing.")],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Write a file of samples for each of this many nodes.")
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(min=1, help="Write a file for each of this many hospitals and for their devices."),
    ] = None,
    partition: Annotated[
        str, typer.Option(help="How to partition samples or people: the app's key.")
    ] = "iid",
    layout: Annotated[
        str | None,
        typer.Option(help="With --groups: edges (default), a gateway per group, or devices."),
    ] = None,
    people: Annotated[
        int | None, typer.Option(min=1, help="With --groups: most people per group. Default: all.")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help="With --nodes: scaling of pixels, standard (default) or unit.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the partition, as in a run.")] = 0,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of the data set. Default: the variable HEDGEROW_DATA_DIR.")
    ] = None,
) -> None:
    """Write a data set as one file per node, readable only by its owner, for --own-data."""
    from hedgerow.sim.runs.hooks import data_sets
    from hedgerow.tasks import write_group_split, write_split

    with bad_options():
        if (nodes is None) == (groups is None):
            raise ValueError("exactly one of --nodes and --groups must be given")
        others = {"--scaling": scaling} if groups else {"--layout": layout, "--people": people}
        for option, value in others.items():
            if value is not None:
                raise ValueError(f"{option} must not be used with --{'groups' if groups else 'nodes'}")
        if nodes:
            manifest = write_split(dataset, folder, nodes, partition, seed, data_dir, scaling or "standard")
        else:
            manifest = write_group_split(
                dataset,
                folder,
                groups or 1,
                partition,
                seed,
                data_dir,
                layout or "edges",
                people,
                data_sets(),
            )
    typer.echo(str(manifest))
