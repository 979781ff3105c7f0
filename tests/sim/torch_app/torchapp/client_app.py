"""Nodes that train and evaluate the network on their own half-circles."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from torchapp import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    net = task.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = task.moons(int(context.node_config["partition-id"]))
    loss = task.train(net, data, float(context.run_config["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[1])})
    return Message(
        RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net = task.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = task.moons(1000 + int(context.node_config["partition-id"]))
    loss, accuracy = task.test(net, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
