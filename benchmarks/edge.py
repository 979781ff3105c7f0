"""SD-FEEL's edge servers as entries of a state (E1), as nodes (E2), as orchestrators of their own (E3).

    python benchmarks/edge.py [--sizes 21840 11000000] [--steps 4] [--skip-traffic] [--skip-deployed]

First the bytes through the busiest host of each level: a run of 8 clients and 4 servers on a ring with
``alpha = 2``, real processes at E3 (``hedgerow run``, one a server). At E1 and E2 that host is the hub, which
every byte passes; at E3 it is a server with its clients and links. ``needed`` is what a server must send and
get there: a model to and from each of its clients, and to and from each neighbour in each gossip step. Then
the seconds of a gossip step between two processes over loopback with mutual TLS, until both ends know that
both have the model. Last the seconds of a round where every client is a SuperNode: of 4 edge servers with a
SuperLink each, against one SuperLink that has all clients. One machine has as many processes to run in both;
what machines of their own would save is not measured.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import networkx as nx
import numpy as np
from processes import free_addresses, links_of, run_together
from reports import report

from hedgerow.sim.deploy.certificates import make_edge_credentials
from hedgerow.sim.deploy.edges import EdgeDeployment
from hedgerow.sim.deploy.launcher import Deployment
from hedgerow.sim.runs.app import find_app
from hedgerow.sim.runs.folder import read_rounds
from hedgerow.sim.runs.plan import plan_run
from hedgerow.strategies.edges.direct import DirectGossip
from hedgerow.wire.links.peers import PeerChannel, PeerCredentials
from hedgerow.wire.robust_means import parse_aggregation

APP = Path(__file__).parents[1] / "flower_apps" / "sd-feel"
CLIENTS, SERVERS, DEGREE, ALPHA, ROUNDS = 8, 4, 2, 2, 4
CONFIG = (
    f"num-clients={CLIENTS} num-servers={SERVERS} topology=ring tau1=2 tau2=1 alpha={ALPHA} model=lenet "
    f"iterations={2 * ROUNDS} batch-size=5 train-loss-samples=100 quiet=true"
)


def traffic() -> dict[str, float]:
    """Return the bytes a round through the busiest host, by level, and what E3 needs at least."""
    # Their tables are not what is asked for.
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(APP), "--quiet", "-c", CONFIG]
    busiest = {}
    with tempfile.TemporaryDirectory() as place:
        for level, servers in (("E1", "emulated"), ("E2", "nodes")):
            out = Path(place) / level
            run_together([[*command, "-c", f"edge-servers={servers} output-dir={out}"]])
            links = links_of(out)
            busiest[level] = (links["hub->node"] + links["node->hub"]) / ROUNDS
        peers = ",".join(free_addresses(SERVERS))
        outs = [Path(place) / f"E3-{d}" for d in range(SERVERS)]
        run_together(
            [
                [*command, "-c", f"edge-servers=direct edge={d} peers={peers} output-dir={out}"]
                for d, out in enumerate(outs)
            ]
        )
        hosts = [links_of(out) for out in outs]
    # Each sends its two neighbours the same: what it gets is half of what each of them sends.
    total = [
        one["hub->node"]
        + one["node->hub"]
        + one["peer->peer"]
        + sum(hosts[(d + side) % SERVERS]["peer->peer"] / DEGREE for side in (-1, 1))
        for d, one in enumerate(hosts)
    ]
    busiest["E3"] = max(total) / ROUNDS
    # To and from a neighbour a model of float32 in the first step, and of float64 in the others.
    model = hosts[0]["client->edge"] / ROUNDS / (CLIENTS // SERVERS)
    busiest["E3 needed"] = 2 * model * (CLIENTS // SERVERS) + 2 * DEGREE * model * (1 + 2 * (ALPHA - 1))
    return busiest


def _serve(d: int, where: list[str], keys: PeerCredentials, size: int, steps: int) -> dict[int, float]:
    """Be one of two servers; return the median seconds of an exchange with no step, and with some."""
    found = {}
    graph = nx.path_graph(2)
    model = np.random.default_rng(d).normal(size=size).astype(np.float32)
    for alpha in (0, steps):
        answers: list[DirectGossip] = []
        channel = PeerChannel(
            d,
            where,
            [1 - d],
            run=f"{alpha}",
            layout="l",
            largest=64 + 8 * max(size, 1 << 13),
            credentials=keys,
            answer=lambda peer, request, one=answers: one[0].answer(peer, request) if one else {},
            comes=lambda peer, topic, one=answers: bool(one) and one[0].comes(peer, topic),
        )
        gossip = DirectGossip(graph, channel, period=1, steps=alpha, rule=parse_aggregation("mean"))
        answers.append(gossip)
        with channel:
            gossip.join(0, 60.0, 10)
            seconds = []
            for number in range(1, 6):
                gossip.exchanged(number, model, 10.0 + d)
                if gossip.report.members != [0, 1] or gossip.report.lost:
                    raise RuntimeError(f"the link was lost: {gossip.report}")
                seconds.append(gossip.report.seconds)
            # The first has the connection to make.
            found[alpha] = float(np.median(seconds[1:]))
        time.sleep(1.0)
    return found


def step_seconds(size: int, steps: int) -> float:
    """Return the median seconds of a gossip step of a model with so many entries."""
    where = free_addresses(2)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place, ProcessPoolExecutor(2, mp_context=spawn) as pool:
        made = make_edge_credentials(Path(place), [[], []])
        keys = [PeerCredentials(one.superlink.ca, one.peer_certificate, one.peer_key) for one in made]
        ends = [pool.submit(_serve, d, where, keys[d], size, steps) for d in range(2)]
        return max(found[steps] - found[0] for found in (end.result() for end in ends)) / steps


def deployed_seconds() -> tuple[float, float]:
    """Return the median seconds of a round with a SuperLink a server, and with one for all clients."""
    spec = find_app(APP)
    with tempfile.TemporaryDirectory() as place:
        own = CLIENTS // SERVERS
        partitions = [list(range(d * own, (d + 1) * own)) for d in range(SERVERS)]
        with EdgeDeployment(spec, partitions, tls=True) as edges:
            runs = [
                edges.submit(d, edges.plan(d, CONFIG, output_dir=f"{place}/E3"), echo=False)
                for d in range(SERVERS)
            ]
            if any(run.wait().exit_code for run in runs):
                raise RuntimeError("the run of an edge server failed")
            direct = [_round_seconds(Path(place) / "E3" / f"edge{d}") for d in range(SERVERS)]
        with Deployment(spec, CLIENTS, tls=True) as one:
            plan = plan_run(spec, [CONFIG, f"output-dir={place}/E1"], num_nodes=CLIENTS)
            if one.run(plan, echo=False).exit_code:
                raise RuntimeError("the run with one hub failed")
            return max(direct), _round_seconds(Path(place) / "E1")


def _round_seconds(folder: Path) -> float:
    (run,) = folder.iterdir()
    # The first round waits for the nodes, and for the other servers.
    return median(one["wall_seconds"] for one in read_rounds(run) if one["round"] > 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[21_840, 11_000_000])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--skip-traffic", action="store_true")
    parser.add_argument("--skip-deployed", action="store_true")
    options = parser.parse_args()
    if not options.skip_traffic:
        busiest = traffic()
        for level in ("E1", "E2", "E3", "E3 needed"):
            ratio = busiest[level] / busiest["E3"]
            print(f"{level:>9}: {busiest[level] / 1e6:.3f} MB a round at the busiest host, {ratio:.2f} x E3")
        what = "busiest host of 4 edge servers"
        report(
            what, busiest["E3"] / 1e6, "MB a round", busiest["E2"] / busiest["E3"], "edge servers as nodes"
        )
    for size in options.sizes:
        seconds = step_seconds(size, options.steps)
        print(f"a gossip step of {size:,} parameters: {1e3 * seconds:.1f} ms")
        report(f"gossip step of {size:,} parameters", 1e3 * seconds, "ms")
    if not options.skip_deployed:
        direct, hub = deployed_seconds()
        print(f"a round of {SERVERS} SuperLinks: {direct:.2f} s, of one: {hub:.2f} s, {direct / hub:.2f} x")
        report(f"round of {SERVERS} edge servers with SuperLinks", direct, "s", hub / direct, "one SuperLink")


if __name__ == "__main__":
    main()
