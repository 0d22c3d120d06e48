"""A ClientApp as in Flower's examples: it builds its model for every message."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from site_step import Site

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the steps of a window."""
    site = Site(f"site-{context.node_config['partition-id']}")
    site.load(message.content.array_records["arrays"].to_torch_state_dict())
    site.window()
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord(site.params()), "metrics": metrics})
    return Message(content, reply_to=message)
