"""What a message costs there and back: in this process, and with worker processes.

    python benchmarks/messages.py                  # four minutes on two busy cores
    python benchmarks/messages.py --short

Handlers add 1 to the array that they get.
"""

import time
from statistics import median
from typing import Annotated

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


def measured(nodes: int, parameters: int, workers: int) -> tuple[float, float]:
    """Seconds until the workers are there, and milliseconds a message: the median after two rounds."""
    record = ArrayRecord()
    record["w"] = lazy_array(np.zeros(parameters, np.float32))
    content = RecordDict({"arrays": record, "config": ConfigRecord({"lr": 0.1})})
    began = time.perf_counter()
    with InProcessGrid(adding(), nodes, workers=workers) as grid:
        start, rounds = time.perf_counter() - began, []
        for _ in range(ROUNDS):
            messages = [Message(content, node_id, "train") for node_id in grid.get_node_ids()]
            began = time.perf_counter()
            replies = grid.send_and_receive(messages)
            rounds.append(time.perf_counter() - began)
            if any(reply.has_error() for reply in replies):
                raise RuntimeError(next(reply.error.reason for reply in replies if reply.has_error()))
    return start, 1000 * median(rounds[2:]) / nodes


def main(
    workers: Annotated[int, typer.Option(min=2)] = 2,
    short: Annotated[bool, typer.Option("--short", help="the first size alone")] = False,
) -> None:
    print(f"{'nodes':>6} {'parameters':>11} {'':<18}{'start, s':>9}{'ms a message':>14}")
    for nodes, parameters in SIZES[: 1 if short else None]:
        for name, count in (("this process", 1), ("worker processes", workers)):
            start, each = measured(nodes, parameters, count)
            print(f"{nodes:>6} {parameters:>11} {name:<18}{start:>9.2f}{each:>14.3f}", flush=True)
            report(f"a message, {nodes} nodes of {parameters} parameters, {name}", each, "ms")


if __name__ == "__main__":
    typer.run(main)
