"""Your own gossip method on the router: nodes agree on the mean of their measurements.

Flower's nodes can only talk to the server. ``Router`` makes the server a relay: a node receives its
neighbours' payloads byte for byte, along the edges of a graph, and the server neither reads nor sums them.
Here each node has a number and moves towards its neighbours' (L. Xiao, S. Boyd, "Fast linear iterations for
distributed averaging"). With a model's vector in place of the number, and SGD steps before each publication,
this is decentralised SGD.
"""

import networkx as nx
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from hedgerow.clients import introduced
from hedgerow.sim import simulate
from hedgerow.strategies import PayloadSizes, Roster, Router

NODES, ROUNDS, BYTES = 8, 40, 8
GRAPH = nx.cycle_graph(NODES)
client_app = introduced(ClientApp())


def own(context: Context) -> torch.Tensor:
    """Return the node's number: the stored one, or at first its measurement."""
    if "x" in context.state:
        return context.state.array_records["x"].to_torch_state_dict()["x"]
    return torch.tensor(float(context.node_config["partition-id"]) ** 2, dtype=torch.float64)


@client_app.query("publish")  # called if another node wants this one's payload
def publish(message: Message, context: Context) -> Message:
    """Publish the number as bytes, which are opaque to the server."""
    payload = ConfigRecord({"bytes": own(context).numpy().tobytes()})
    return Message(RecordDict({"payload": payload}), reply_to=message)


@client_app.train()
def mix(message: Message, context: Context) -> Message:
    """Move a third of the way to each of the two neighbours."""
    x, before = own(context), own(context)
    for payload in message.content.config_records["bundle"].values():
        x = x + (torch.frombuffer(bytearray(payload), dtype=torch.float64)[0] - before) / 3
    context.state["x"] = ArrayRecord({"x": x})
    # Reported only for the output below.
    return Message(RecordDict({"metrics": MetricRecord({"x": float(x)})}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Relay payloads, let nodes mix, and print the spread of the numbers."""
    roster = Roster.gather(grid, NODES, timeout=60.0)
    router = Router(GRAPH, PayloadSizes(message_bits=8 * BYTES, max_bytes=BYTES))
    wants = {i: sorted(GRAPH.neighbors(i)) for i in GRAPH}
    spread = []
    for k in range(ROUNDS):
        # All nodes publish before any mixes, so that the order of messages does not matter.
        bundles = router.route(grid, roster, k + 1, k, wants, timeout=60.0)
        messages = []
        for node in roster.nodes:
            bundle = {str(j): payload for j, payload in bundles[node.partition_id].items()}
            content = RecordDict({"bundle": ConfigRecord(bundle)})
            messages.append(Message(content, node.node_id, "train", group_id=str(k)))
        replies = [reply for reply in grid.send_and_receive(messages, timeout=60.0) if reply.has_content()]
        numbers = [float(reply.content.metric_records["metrics"]["x"]) for reply in replies]
        spread.append(max(numbers) - min(numbers))
    print(f"spread {spread[0]:.3f} -> {spread[-1]:.3f} around {sum(numbers) / len(numbers):.3f}")
    sent = router.ledger.total("node->node")
    print(f"{sent.messages} messages of {sent.nominal_bits // sent.messages} bits between neighbours")


if __name__ == "__main__":
    simulate(server_app, client_app, NODES, quiet=True)
