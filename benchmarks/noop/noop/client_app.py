"""A plain Flower ClientApp that does nothing: no Hedgerow in it."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)
