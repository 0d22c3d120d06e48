"""The client of Flower's own strategies: take the parameters, train, send them back, keep nothing.

It is that of Flower's quickstarts, over the same :class:`Worker` that DES-LOC drives: the optimizer
is new in every round; data and learning rate follow the global step.
"""

import time
from collections.abc import Callable

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import put, take
from flower_desloc.flower.content import records_of
from flower_desloc.flower.records import CONFIG, WindowReply, from_record
from flower_desloc.flower.worker import Config, Worker, evaluated, require_finite, trained

ACTION = "stock"
"""Of the messages, whose types are ``train.stock`` and ``evaluate.stock``."""
START, STOP = "start-step", "stop-step"
WEIGHTED_BY = {"examples": "num-examples", "uniform": "one"}
"""Weighting -> the metric that a strategy weights by; every client replies with both."""


def answer_stock(app: ClientApp, build: Callable[[Config, Context], Worker]) -> None:
    """Let ``app`` answer Flower's own strategies too, with the workers that ``build`` makes."""

    @app.train(ACTION)
    def train(message: Message, context: Context) -> Message:
        config, params, start, stop = _read(message.content)
        reply = train_round(build(config, context), params, start=start, stop=stop)
        return Message(reply.to_content(), reply_to=message)

    @app.evaluate(ACTION)
    def evaluate(message: Message, context: Context) -> Message:
        config, params, _, _ = _read(message.content)
        reply = evaluate_params(build(config, context), params)
        return Message(reply.to_content(), reply_to=message)


def train_round(worker: Worker, params: Stream, *, start: int, stop: int) -> WindowReply:
    """Return the parameters after the local steps ``start + 1 .. stop`` of a new optimizer.

    Raises ``FloatingPointError`` when they are not finite.
    """
    began = time.perf_counter()
    module, optimizer = worker.module, worker.optimizer
    put(module, optimizer, {PARAMS: params})
    # As good as a new one: a worker may be kept, and this is all that its optimizer remembers.
    optimizer.state.clear()
    after = take(module, optimizer, [PARAMS])[PARAMS]
    before = {key: tensor.clone() for key, tensor in after.items()}
    steps = worker.steps(start, stop, origin=start)
    require_finite({PARAMS: after})
    return WindowReply(
        metrics={
            **trained(worker, steps, before, after),
            WEIGHTED_BY["uniform"]: 1,
            START: start,
            STOP: stop,
            "seconds": time.perf_counter() - began,
        },
        streams={PARAMS: after},
    )


def evaluate_params(worker: Worker, params: Stream) -> WindowReply:
    """Evaluate ``params`` on the client's held-out data."""
    put(worker.module, worker.optimizer, {PARAMS: params})
    return evaluated(worker)


def _read(content: RecordDict) -> tuple[Config, Stream, int, int]:
    config = {
        key: value
        for key, value in records_of(ConfigRecord, content)[CONFIG].items()
        if isinstance(value, (str, int, float, bool))
    }
    params = from_record(records_of(ArrayRecord, content)[PARAMS])
    return config, params, int(config.pop(START)), int(config.pop(STOP))
