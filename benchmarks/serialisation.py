"""Speed of the conversion between tensors and ArrayRecords, compared with Flower's conversion.

    python benchmarks/serialisation.py [--repeats 21] [--json FILE]

The stream of `aggregation.py`: 142 fp32 tensors, 120 MB. Write: tensors to a record. Read: a record
to tensors; ours are views of its bytes. Install: read, and copy into a model's tensors, as a client
does. Plain copies of the same tensors are measured for comparison: `tensor.clone()` into new
memory, `copy_` into existing memory. All variants take turns.
"""

from pathlib import Path
from typing import Any

import torch
import typer
from aggregation import shapes
from common import ratios, report, spread, spreads, take_turns
from flwr.app import ArrayRecord

from flower_desloc.flower.arrays import from_record, to_record

PAIRS = {
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


def main(repeats: int = 21, threads: int = 1, json: Path | None = None) -> None:
    """Speed of the conversion between tensors and ArrayRecords, compared with Flower's."""
    torch.set_num_threads(threads)
    noise = torch.Generator().manual_seed(0)
    stream = {name: torch.randn(shape, generator=noise) for name, shape in shapes().items()}
    model = {name: torch.zeros(shape) for name, shape in shapes().items()}
    record = to_record(stream)
    assert record == ArrayRecord(stream)

    def install(given: Any) -> None:
        for key, tensor in given.items():
            model[key].copy_(tensor)

    seconds = take_turns(
        {
            "clone": lambda: {key: tensor.clone() for key, tensor in stream.items()},
            "write desloc": lambda: to_record(stream),
            "write flower": lambda: ArrayRecord(stream),
            "read desloc": lambda: from_record(record),
            "read flower": record.to_torch_state_dict,
            "copy": lambda: install(stream),
            "install desloc": lambda: install(from_record(record)),
            "install flower": lambda: install(record.to_torch_state_dict()),
        },
        repeats,
    )
    for times in seconds.values():  # both directions
        for who in ("flower", "desloc"):
            for way, back in {"both": "read", "both, installed,": "install"}.items():
                ways = zip(times[f"write {who}"], times[f"{back} {who}"], strict=True)
                times[f"{way} {who}"] = [sum(way) for way in ways]
    megabytes = sum(tensor.nbytes for tensor in stream.values()) / 1e6
    speeds = {
        clock: {what: spread(ratios(times[a], to=times[b])) for what, (a, b) in PAIRS.items()}
        for clock, times in seconds.items()
    }
    result = {"megabytes": megabytes, "repeats": repeats, "seconds": spreads(seconds)}
    report(result | {"speeds": speeds}, json)


if __name__ == "__main__":
    typer.run(main)
