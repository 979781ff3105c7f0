"""Compressed uplinks for any ClientApp and strategy, here Flower's FedAvg.

Six nodes learn a linear classifier and send a tenth of each update; each node adds the rest to its next
update. With FedMedian, FedTrimmedAvg, Krum or Bulyan, use the compressor ``sign``, or ``randk(0.1)`` with
smaller local steps.
"""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from hedgerow.clients import compress_reply
from hedgerow.sim import simulate
from hedgerow.strategies import Compressed

NODES, FEATURES = 6, 20


def samples(partition_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one node's data: 100 points, labelled by their side of a hyperplane."""
    x = torch.randn(100, FEATURES, generator=torch.Generator().manual_seed(partition_id))
    return x, (x @ torch.linspace(-1, 1, FEATURES) > 0).long()


client_app = ClientApp(mods=[compress_reply])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take ten steps of gradient descent, like any ClientApp; the mod compresses the reply."""
    model = nn.Linear(FEATURES, 2)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = samples(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(message.content["config"]["learning-rate"]))
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x)})
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)


server_app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the global model's accuracy on data that no node has."""
    model = nn.Linear(FEATURES, 2)
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = samples(NODES)
    return MetricRecord({"accuracy": float((model(x).argmax(1) == y).float().mean())})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run 30 rounds, and print the accuracy and the uplink traffic."""
    strategy = Compressed(FedAvg(min_available_nodes=NODES, fraction_evaluate=0.0), "topk(0.1)")
    result = strategy.start(
        grid,
        ArrayRecord(nn.Linear(FEATURES, 2).state_dict()),
        num_rounds=30,
        train_config=ConfigRecord({"learning-rate": 0.3}),
        evaluate_fn=evaluate,
    )
    print(f"accuracy {result.evaluate_metrics_serverapp[30]['accuracy']:.3f}")
    print(f"uplinks: {strategy.uplink_bits} of {strategy.dense_uplink_bits} bits")


if __name__ == "__main__":
    simulate(server_app, client_app, NODES, quiet=True)
