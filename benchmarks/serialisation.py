"""Speed of the conversion between tensors and ArrayRecords, compared with Flower's conversion.

    python benchmarks/serialisation.py [--repeats 21] [--json FILE]

The stream of `aggregation.py`: 142 fp32 tensors, 120 MB. Write: tensors to a record. Read: a record
to tensors; ours are views of its bytes. Install: read, and copy into a model's tensors, as a client
does. Plain copies of the same tensors are measured for comparison: `tensor.clone()` into new
memory, `copy_` into existing memory. All variants take turns.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from aggregation import about, ratio, shapes, spreads, take_turns
from flwr.app import ArrayRecord

from flower_desloc.flower.records import from_record, to_record

Stream = dict[str, torch.Tensor]


def install(model: Stream, given: Any) -> None:
    for key, tensor in given.items():
        model[key].copy_(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    noise = torch.Generator().manual_seed(0)
    stream = {name: torch.randn(shape, generator=noise) for name, shape in shapes().items()}
    model = {name: torch.zeros(shape) for name, shape in shapes().items()}
    record = to_record(stream)
    assert record == ArrayRecord(stream)
    seconds = take_turns(
        {
            "clone": lambda: {key: tensor.clone() for key, tensor in stream.items()},
            "write desloc": lambda: to_record(stream),
            "write flower": lambda: ArrayRecord(stream),
            "read desloc": lambda: from_record(record),
            "read flower": record.to_torch_state_dict,
            "copy": lambda: install(model, stream),
            "install desloc": lambda: install(model, from_record(record)),
            "install flower": lambda: install(model, record.to_torch_state_dict()),
        },
        args.repeats,
    )
    pairs = {
        "write, to flower's": ("write flower", "write desloc"),
        "read, to flower's": ("read flower", "read desloc"),
        "install, to flower's": ("install flower", "install desloc"),
        "both, to flower's": ("both flower", "both desloc"),
        "both, installed, to flower's": ("both, installed, flower", "both, installed, desloc"),
        "write, to clone": ("clone", "write desloc"),
        "write, to copy": ("copy", "write desloc"),
        "read, to clone": ("clone", "read desloc"),
        "install, to copy": ("copy", "install desloc"),
    }
    for times in seconds.values():  # both directions
        for who in ("flower", "desloc"):
            for way, back in {"both": "read", "both, installed,": "install"}.items():
                ways = zip(times[f"write {who}"], times[f"{back} {who}"], strict=True)
                times[f"{way} {who}"] = [sum(way) for way in ways]
    speeds = {
        clock: {what: ratio(times[a], times[b]) for what, (a, b) in pairs.items()}
        for clock, times in seconds.items()
    }
    result = {
        **about(),
        "megabytes": sum(tensor.nbytes for tensor in stream.values()) / 1e6,
        "repeats": args.repeats,
        "seconds": {clock: spreads(times) for clock, times in seconds.items()},
        "speeds": speeds,
    }
    for clock, arms in result["seconds"].items():
        for name, times in arms.items():
            shown = (f"{what} {1e3 * s:7.1f} ms  " for what, s in times.items())
            print(f"{clock:5}{name:29}", *shown)
        for name, times in speeds[clock].items():
            print(f"{clock:5}{name:29}", *(f"{what} {x:7.2f}     " for what, x in times.items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
