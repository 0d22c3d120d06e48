"""Time and memory to average a window's replies, compared with Flower's own aggregation.

    python benchmarks/aggregation.py [--replies 8] [--repeats 15] [--threads 2] [--json FILE]

Both start from the received records and end with the averaged ArrayRecord. Ours does all that the
strategy does with a reply: read it, check names, shapes, types, finiteness and range, add it to the
running mean, measure the drift between clients, and write the average. Flower's is
`aggregate_arrayrecords`, which checks nothing. The model has 30 million parameters in 142 tensors,
fp32, 120 MB per reply. The two alternate, and so does which one is first. On a busy machine, CPU
time is more reliable than wall-clock time.

Memory is the peak of a process that receives 8 replies, and of one that receives 64, one at a time.
"""

import resource
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import typer
from common import ratios, report, spread, spreads, take_turns
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from flower_desloc import Mean
from flower_desloc.core.schedule import PARAMS, Window
from flower_desloc.core.types import Stream
from flower_desloc.flower.arrays import from_record, to_array, to_record
from flower_desloc.flower.internals import set_task
from flower_desloc.flower.replies import Contribution, WindowReply

WIDTH, HIDDEN, VOCABULARY, LAYERS = 384, 1024, 32_000, 10
WINDOW = Window(0, 16, frozenset({PARAMS}))
FEW, MANY = 8, 64


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a small Llama's tensors, with biases in its norms."""
    found: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for layer in range(LAYERS):
        found |= {f"{layer}.{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
        found |= {f"{layer}.{name}": (HIDDEN, WIDTH) for name in ("gate", "up")}
        found |= {f"{layer}.down": (WIDTH, HIDDEN)}
        found |= {f"{layer}.{name}": (WIDTH,) for name in ("a", "b", "c", "d", "e", "f", "g")}
    return found


def reply(m: int) -> RecordDict:
    """Return the reply of client m, made one tensor at a time."""
    noise = torch.Generator().manual_seed(m)
    record = ArrayRecord()
    for name, shape in shapes().items():
        record[name] = to_array(torch.randn(shape, generator=noise))
    metrics: dict[str, Any] = {"num-examples": 1, "train-loss": 1.0}
    metrics |= {"start-step": 0, "stop-step": 16}
    return RecordDict({PARAMS: record, "metrics": MetricRecord(metrics)})


def ours(replies: Iterable[RecordDict], last: ArrayRecord, like: Stream) -> ArrayRecord:
    """Average the replies as the strategy does."""
    set_task(run_id=1, node_id=0, task_id=1)  # without which Flower makes no message
    mean = Mean({PARAMS: from_record(last)})
    for content in replies:
        reply = WindowReply.of(Message(content, 0, "train"))
        mean.add(Contribution.of(reply, WINDOW, {PARAMS: like}).streams)
        del content, reply
    averages = mean.result()
    mean.drift(averages)
    return to_record(averages[PARAMS])


def last_average() -> tuple[ArrayRecord, Stream]:
    """Return the average before the window, and its names, shapes and types."""
    last = reply(-1).array_records[PARAMS]
    return last, {key: tensor.to("meta") for key, tensor in from_record(last).items()}


def peak(number: int, threads: int) -> float:
    """Return the peak memory, in MB, of this process after it has averaged ``number`` replies."""
    torch.set_num_threads(threads)
    ours((reply(m) for m in range(number)), *last_average())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main(replies: int = FEW, repeats: int = 15, threads: int = 2, json: Path | None = None) -> None:
    """Time and memory to average a window's replies, compared with Flower's aggregation."""
    torch.set_num_threads(threads)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        memory = {number: pool.submit(peak, number, threads).result() for number in (FEW, MANY)}
    last, like = last_average()
    given = [reply(m) for m in range(replies)]
    arms = {
        "desloc": lambda: ours(given, last, like),
        "flower": lambda: aggregate_arrayrecords(given, "num-examples"),
    }
    seconds = take_turns(arms, repeats)
    result = {
        "replies": replies,
        "megabytes": sum(len(array.data) for array in last.values()) * replies / 1e6,
        "repeats": repeats,
        "seconds": spreads(seconds),
        "times_as_fast": {
            clock: spread(ratios(times["flower"], to=times["desloc"]))
            for clock, times in seconds.items()
        },
        "peak_memory_megabytes": memory,
        "peak_of_64_to_8": memory[MANY] / memory[FEW],
    }
    report(result, json)


if __name__ == "__main__":
    typer.run(main)
