"""Trains and evaluates a node's model: no Hedgerow in it."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from quickstart.task import Net, loader, test, train

app = ClientApp()


def _given(message: Message, context: Context) -> tuple[Net, DataLoader]:
    run, node = context.run_config, context.node_config
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batches = loader(
        str(run["data"]), int(node["partition-id"]), int(node["num-partitions"]), int(run["batch-size"])
    )
    return net, batches


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train one epoch."""
    net, batches = _given(message, context)
    loss = train(net, batches, float(message.content["config"]["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(batches.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model on the node's data."""
    net, batches = _given(message, context)
    loss, accuracy = test(net, batches)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(batches.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
