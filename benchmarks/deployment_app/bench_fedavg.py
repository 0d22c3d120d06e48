"""The same model, data and steps, written as in Flower's examples."""

import time

BEGAN = time.time()

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app.client import build_worker
from flower_desloc.core.local_steps import local_steps

IMPORTED = time.time()

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Build the worker, load the parameters, train, return them."""
    asked = time.time()
    config = message.content.config_records["config"]
    worker = build_worker({"settings": config["settings"]}, context)
    built = time.time()
    params = message.content.array_records["arrays"].to_torch_state_dict()
    worker.module.load_state_dict(params, strict=False)  # tied weights are sent once
    step = config["server-round"]
    local_steps(
        worker.module,
        worker.optimizer,
        worker.loss_at,
        start=step - 1,
        stop=step,
        lr_schedule=worker.lr_schedule,
        clipping=worker.clipping,
    )
    arrays = ArrayRecord(dict(worker.module.named_parameters()))
    done = time.time()
    metrics = MetricRecord({"num-examples": 1, "seconds": done - built})
    times = MetricRecord(
        {
            "import-began": BEGAN,
            "imported": IMPORTED,
            "asked": asked,
            "built": built,
            "done": done,
        }
    )
    content = RecordDict({"arrays": arrays, "metrics": metrics, "times": times})
    return Message(content, reply_to=message)
