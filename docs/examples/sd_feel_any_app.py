"""SD-FEEL with your own ClientApp: plain PyTorch, Flower's messages, and the mod ``introduce``.

Eight nodes in four clusters learn a linear classifier; the four edge servers gossip on a ring. In your own
project the two apps are in ``server_app.py`` and ``client_app.py``, as in the layout of ``flwr new``.
"""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from hedgerow.clients import introduce
from hedgerow.sim import simulate
from hedgerow.strategies import SDFeel

NODES, SERVERS = 8, 4


def samples(partition_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one node's data: 60 points of a plane, labelled by their side of a line."""
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(partition_id))
    return x, (x @ torch.tensor([1.0, -2.0]) > 0).long()


client_app = ClientApp(mods=[introduce])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take ``local-steps`` mini-batch steps, and report their number."""
    model, config = nn.Linear(2, 2), message.content["config"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = samples(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(config["learning-rate"]))
    first, steps = int(config["first-step"]), int(config["local-steps"])
    for step in range(first, first + steps):
        batch = torch.arange(10 * step, 10 * step + 10) % len(x)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x), "num-steps": steps})
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)


server_app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the accuracy of the servers' mean model on data that no node has."""
    model = nn.Linear(2, 2)
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = samples(NODES)
    return MetricRecord({"accuracy": float((model(x).argmax(1) == y).float().mean())})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run 20 rounds of two local iterations, with gossip after every second."""
    clusters = [i * SERVERS // NODES for i in range(NODES)]
    strategy = SDFeel(
        num_servers=SERVERS, clusters=clusters, topology="ring", tau1=2, tau2=2, fraction_evaluate=0.0
    )
    result = strategy.start(
        grid,
        ArrayRecord(nn.Linear(2, 2).state_dict()),
        num_rounds=20,
        train_config=ConfigRecord({"learning-rate": 0.5}),
        evaluate_fn=evaluate,
    )
    print(f"accuracy {result.evaluate_metrics_serverapp[20]['accuracy']:.3f}")
    print(f"{strategy.iterations} iterations, {strategy.clock.seconds:.4f} simulated seconds")


if __name__ == "__main__":
    simulate(server_app, client_app, NODES, quiet=True)
