"""Time and memory to average a window's replies, compared with Flower's own aggregation.

    python benchmarks/aggregation.py [--replies 8] [--repeats 15] [--json FILE]

Both start from the received records and end with the averaged ArrayRecord. Ours does all that the
strategy does with a reply: read it, check names, shapes, types, finiteness and range, add it to the
running mean, measure the drift between clients, and write the average. Flower's is
`aggregate_arrayrecords`, which checks nothing. The model has 30 million parameters in 142 tensors,
fp32, 120 MB per reply. The two alternate, and so does which one is first. On a busy machine, CPU
time is more reliable than wall-clock time.

Memory is the peak of a process that receives 8 replies, and of one that receives 64, one at a time.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from flower_desloc import Mean
from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import PARAMS, Window
from flower_desloc.flower.arrays import to_array
from flower_desloc.flower.records import WindowReply, from_record, to_record

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
    metrics = {"num-examples": 1, "train-loss": 1.0, "start-step": 0, "stop-step": 16}
    return RecordDict({PARAMS: record, "metrics": MetricRecord(metrics)})


def ours(replies: Iterable[RecordDict], last: ArrayRecord, like: Stream) -> ArrayRecord:
    """Average the replies as the strategy does."""
    mean = Mean({PARAMS: from_record(last)})
    for content in replies:
        reply = WindowReply.from_content(content)
        reply.check(WINDOW, WINDOW.due, {PARAMS: like})
        reply.check_values()
        mean.add(reply.streams)
        del content, reply
    averages = mean.result()
    mean.drift(averages)
    return to_record(averages[PARAMS])


def flowers(replies: list[RecordDict]) -> ArrayRecord:
    return aggregate_arrayrecords(replies, "num-examples")


def meta(record: ArrayRecord) -> Stream:
    return {key: tensor.to("meta") for key, tensor in from_record(record).items()}


Seconds = dict[str, list[float]]


def take_turns(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Seconds]:
    """Return wall-clock and CPU seconds of each arm, ``repeats`` times after one warm-up turn."""
    wall: Seconds = {name: [] for name in arms}
    cpu: Seconds = {name: [] for name in arms}
    order = list(arms)
    for turn in range(1 + repeats):
        for name in order:
            began, busy = time.perf_counter(), time.process_time()
            result = arms[name]()
            took, worked = time.perf_counter() - began, time.process_time() - busy
            del result
            if turn > 0:
                wall[name].append(took)
                cpu[name].append(worked)
        order.append(order.pop(0))
    return {"wall": wall, "cpu": cpu}


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": cuts[0], "p90": cuts[-1]}


def spreads(seconds: Seconds) -> dict[str, dict[str, float]]:
    return {name: spread(times) for name, times in seconds.items()}


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Return the median and spread of how many times faster ``fast`` is, turn by turn."""
    return spread([a / b for a, b in zip(slow, fast, strict=True)])


def about() -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"flwr": flwr.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }


def one_by_one(number: int) -> Iterator[RecordDict]:
    for m in range(number):
        yield reply(m)


def peak(number: int) -> float:
    """Return the peak memory, in MB, of a process that averages ``number`` replies."""
    command = [sys.executable, __file__, "--peak-of", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replies", type=int, default=FEW)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    last = reply(-1).array_records[PARAMS]
    like = meta(last)
    if args.peak_of is not None:
        ours(one_by_one(args.peak_of), last, like)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)
        return
    memory = {number: peak(number) for number in (FEW, MANY)}
    replies = [reply(m) for m in range(args.replies)]
    arms = {"desloc": lambda: ours(replies, last, like), "flower": lambda: flowers(replies)}
    seconds = take_turns(arms, args.repeats)
    size = sum(len(array.data) for array in last.values()) * args.replies
    result = {
        **about(),
        "replies": args.replies,
        "megabytes": size / 1e6,
        "repeats": args.repeats,
        "seconds": {clock: spreads(times) for clock, times in seconds.items()},
        "times_as_fast": {
            clock: ratio(times["flower"], times["desloc"]) for clock, times in seconds.items()
        },
        "peak_memory_megabytes": memory,
        "peak_of_64_to_8": memory[MANY] / memory[FEW],
    }
    for clock, both in result["seconds"].items():
        for name, times in both.items():
            rate = f"{size / 1e9 / times['median']:.2f} GB/s"
            print(f"{clock:5}{name:14}", *(f"{q} {s:.3f} s  " for q, s in times.items()), rate)
        times = result["times_as_fast"][clock]
        print(f"{clock:5}times faster  ", *(f"{q} {x:.2f}     " for q, x in times.items()))
    print("peak memory", *(f"{number} replies {mb:.0f} MB  " for number, mb in memory.items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
