"""What a message costs there and back: in this process, with worker processes, with actors of a Ray cluster.

    python benchmarks/messages.py                  # four minutes on two busy cores
    python benchmarks/messages.py --short
    python benchmarks/messages.py --ray HOST:PORT

Handlers add 1 to the array that they get. Without an address two Ray nodes are started on this machine, with
a CPU each, and ended.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from reports import report

from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.wire.records import lazy_array, view

SIZES = ((50, 44_426), (1_000, 44_426), (10, 10**6), (10, 10**7))
ROUNDS = 12


def adding() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        record = ArrayRecord()
        record["w"] = lazy_array(view(message.content.array_records["arrays"]["w"]) + 1)
        return Message(RecordDict({"arrays": record}), reply_to=message)

    return app


def measured(nodes: int, parameters: int, **where: Any) -> tuple[float, float]:
    """Seconds until the workers are there, and milliseconds a message: the median after two rounds."""
    record = ArrayRecord()
    record["w"] = lazy_array(np.zeros(parameters, np.float32))
    content = RecordDict({"arrays": record, "config": ConfigRecord({"lr": 0.1})})
    began = time.perf_counter()
    with InProcessGrid(adding(), nodes, **where) as grid:
        start, rounds = time.perf_counter() - began, []
        for _ in range(ROUNDS):
            messages = [Message(content, node_id, "train") for node_id in grid.get_node_ids()]
            began = time.perf_counter()
            replies = grid.send_and_receive(messages)
            rounds.append(time.perf_counter() - began)
            if any(reply.has_error() for reply in replies):
                raise RuntimeError(next(reply.error.reason for reply in replies if reply.has_error()))
    return start, 1000 * median(rounds[2:]) / nodes


@contextmanager
def cluster(address: str) -> Iterator[str]:
    if address:
        yield address
        return
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 400 << 20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        made.add_node(**node)
        yield made.address
    finally:
        made.shutdown()


def main(
    ray: Annotated[str, typer.Option(help="a Ray cluster; two nodes are started without")] = "",
    workers: Annotated[int, typer.Option(min=2)] = 2,
    short: Annotated[bool, typer.Option("--short", help="the first size alone")] = False,
) -> None:
    print(f"{'nodes':>6} {'parameters':>11} {'':<18}{'start, s':>9}{'ms a message':>14}")
    with cluster(ray) as address:
        places = {"this process": {}, "worker processes": {"workers": workers}}
        places["Ray actors"] = {"workers": workers, "ray": address}
        for nodes, parameters in SIZES[: 1 if short else None]:
            for name, where in places.items():
                start, each = measured(nodes, parameters, **where)
                print(f"{nodes:>6} {parameters:>11} {name:<18}{start:>9.2f}{each:>14.3f}", flush=True)
                report(f"a message, {nodes} nodes of {parameters} parameters, {name}", each, "ms")


if __name__ == "__main__":
    typer.run(main)
