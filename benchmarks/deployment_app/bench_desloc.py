"""Our client, with timestamps of its phases in every reply."""

import time

BEGAN = time.time()

from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from client_app.client import build_worker
from flower_desloc.flower.client import client_app
from flower_desloc.flower.worker import Worker

IMPORTED = time.time()


class Timed(ClientApp):
    """Our ClientApp, with the record ``times`` added to a window's reply."""

    def __init__(self) -> None:
        super().__init__()
        self._built = 0.0
        self._ours = client_app(self._build)

    def _build(self, config: dict[str, str | int | float | bool], context: Context) -> Worker:
        worker = build_worker(config, context)
        self._built = time.time()
        return worker

    def __call__(self, message: Message, context: Context) -> Message:
        asked = time.time()
        reply = self._ours(message, context)
        if message.metadata.message_type == "train":
            reply.content["times"] = MetricRecord(
                {
                    "import-began": BEGAN,
                    "imported": IMPORTED,
                    "asked": asked,
                    "built": self._built,
                    "done": time.time(),
                }
            )
        return reply


app = Timed()
