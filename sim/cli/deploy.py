"""``hedgerow deploy``: an app on SuperNodes started here, and keys for machines of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import (
    AppPath,
    NodeConfig,
    OwnData,
    RunConfig,
    bad_options,
    interruptible,
    read_node_configs,
    read_own_data,
)

__all__ = ["deploy_keys", "deploy_local", "deploy_split"]


def deploy_local(
    app_path: AppPath,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of SuperNodes. Default: what the app says, else 2.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and let in only SuperNodes whose key is registered.")
    ] = False,
    run_config: RunConfig = None,
    node_config: NodeConfig = None,
    own_data: OwnData = None,
    one_user: Annotated[
        bool,
        typer.Option(
            "--one-user", help="With --own-data, as root: SuperNodes run as you, not as users of their own."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run folder goes: the key 'output-dir'.")
    ] = None,
    keep_logs: Annotated[
        bool, typer.Option("--keep-logs", help="Leave the programs' logs beside the run folder.")
    ] = False,
) -> None:
    """Run an app on a SuperLink and SuperNodes started here for it, and stop them.

    Exits with 0 if the run completed, 1 if it failed or a program did not start, 2 on bad options, 130 if
    interrupted, 143 if terminated.
    """
    from hedgerow.sim.deploy.local import deploy_local as start
    from hedgerow.sim.deploy.processes import StartError
    from hedgerow.sim.runs.app import find_app
    from hedgerow.sim.runs.plan import plan_run, toml_value
    from hedgerow.sim.runs.split import readable_by_others

    with bad_options():
        spec = find_app(app_path)
        overrides = [*(run_config or []), *([f"output-dir={toml_value(str(out))}"] if out else [])]
        said, own = read_own_data(spec, own_data, nodes)
        plan = plan_run(spec, [*said, *overrides], num_nodes=nodes)
        if plan.faults is not None:
            raise ValueError("fault-*: a deployment plays no faults; use 'run' with --engine inprocess")
        if own_data and plan.run_config.get("data-dir"):
            raise ValueError(
                "data-dir: no node of --own-data reads it, and the server has no data; leave it out"
            )
        configs = read_node_configs(spec, node_config, plan.num_nodes, own)
        if own and (open_ := readable_by_others(own)):
            typer.echo(f"Warning: other users may read {open_[0]}, of {len(open_)} such files", err=True)
    try:
        with interruptible(lambda: "Interrupted; all that was started is stopped"):
            code = start(
                spec,
                plan,
                tls=tls,
                node_config=configs,
                own_data=own_data is not None,
                own_users=own_data is not None and not one_user,
                keep_logs=keep_logs,
            )
    except StartError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def deploy_keys(
    folder: Annotated[Path, typer.Argument(help="Where they are written.")],
    nodes: Annotated[int, typer.Option(min=0, help="Number of SuperNodes.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Address or name of the SuperLink. Repeatable. Default: loopback only."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid.")] = 365,
) -> None:
    """Make a CA, the SuperLink's certificate and a key pair for each SuperNode, for machines you own."""
    from hedgerow.sim.deploy.certificates import LOOPBACK, make_credentials

    with bad_options():
        made = make_credentials(folder, nodes, hosts=[*LOOPBACK, *(host or [])], days=days)
    typer.echo(f"SuperLink: {made.ca} {made.server_certificate} {made.server_key}")
    for key in made.nodes:
        typer.echo(f"SuperNode: {made.ca} {key.private}; register {key.public}")
    typer.echo(f"Who is whom, for the run's key 'registry': {made.registry}")


def deploy_split(
    dataset: Annotated[
        str, typer.Argument(help="A data set that `hedgerow data` lists, or 'module:function'.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where the files go; made if it is not there.")],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="One file of samples a node, of so many nodes.")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="One file a party, of so many hospitals and their devices.")
    ] = None,
    partition: Annotated[str, typer.Option(help="How samples or people are dealt: the app's key.")] = "iid",
    layout: Annotated[
        str | None,
        typer.Option(help="With --groups: edges, a gateway a group (default), or devices, one each."),
    ] = None,
    people: Annotated[
        int | None, typer.Option(min=1, help="With --groups: people of a group at most. Default: all.")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help="With --nodes: how pixels are scaled, standard (default) or unit.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Keys the partition, as a run's seed does.")] = 0,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of the data set. Default: the variable HEDGEROW_DATA_DIR.")
    ] = None,
) -> None:
    """Write a data set as one file a node, readable by its owner alone, for --own-data."""
    from hedgerow.tasks import write_split
    from hedgerow.tasks.vertical_own import write_group_split

    with bad_options():
        if (nodes is None) == (groups is None):
            raise ValueError("--nodes or --groups, one of them, must say how many there are")
        others = {"--scaling": scaling} if groups else {"--layout": layout, "--people": people}
        for option, value in others.items():
            if value is not None:
                raise ValueError(f"{option} does not go with --{'groups' if groups else 'nodes'}")
        if nodes:
            manifest = write_split(dataset, folder, nodes, partition, seed, data_dir, scaling or "standard")
        else:
            manifest = write_group_split(
                dataset, folder, groups or 1, partition, seed, data_dir, layout or "edges", people
            )
    typer.echo(str(manifest))
