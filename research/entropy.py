"""What an entropy coder would save of the bytes that lossy formats send; messages are unchanged.

    python research/entropy.py DIR [--work runs/entropy]

The language model of ``fair_methods_iid`` is trained by `lean` and by `leanest` on the text in DIR.
Of everything that one of its sites sends, two measures are taken, each stream of a window by
itself: the entropy of its bytes, below which no coder of single bytes gets, and the size after
zstd. A run that is in the results is not repeated.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from flwr.app import Message
from paired import RESEARCH, Table, about

from flower_desloc.app.config import load
from flower_desloc.app.engines import in_process
from flower_desloc.flower.arrays import streams_of
from flower_desloc.flower.inprocess import InProcessGrid

RESULTS = RESEARCH / "results" / "entropy.json"
PRESETS = ("lean", "leanest")
SEEDS = (0, 1)
LEVELS = (3, 19)
NODE = 2
"""The site whose replies are measured."""
SETTINGS = (
    "run.steps=768 run.eval_every=0 run.checkpoint_every=0 model.hidden_size=64 "
    "model.intermediate_size=256 model.num_hidden_layers=3 model.num_attention_heads=2 "
    "data.domains=[wiki,python,math,french] data.max_bytes=4000000 data.seq_len=32 "
    "data.batch_size=16 data.partition=iid evaluation.central=false evaluation.federated=false"
)


class Listening(InProcessGrid):
    """Measures every stream that a site sends, by name."""

    sent: ClassVar[dict[str, list[dict[str, float]]]]

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == NODE:
            for name, stream in streams_of(reply.content).items():
                type(self).sent[name].append(
                    sizes(b"".join(t.numpy().tobytes() for t in stream.values()))
                )
        return reply


def sizes(data: bytes) -> dict[str, float]:
    """Return bytes: as they are sent, by the entropy of single bytes, and after zstd."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    share = counts[counts > 0] / len(data)
    packed = {
        f"zstd {level}": len(pa.Codec("zstd", compression_level=level).compress(data, asbytes=True))
        for level in LEVELS
    }
    return {
        "sent": len(data),
        "entropy": float(-len(data) / 8 * (share @ np.log2(share))),
        **packed,
    }


def measured(preset: str, seed: int, text: Path, work: Path) -> dict[str, dict[str, float]]:
    """Return by stream how often it was sent, and the means of its sizes."""

    class Grid(Listening):
        sent: ClassVar[dict[str, list[dict[str, float]]]] = defaultdict(list)

    words = f"{SETTINGS} data.source={text} run.seed={seed} run.name={preset}"
    clients = load(preset, words.split()).simulation.num_clients
    run_config = {"config": preset, "overrides": words, "output-dir": str(work)}
    with patch.object(in_process, "InProcessGrid", Grid):
        in_process.run_in_process(run_config, clients)
    return {
        name: {"times": len(each)} | {key: fmean(one[key] for one in each) for key in each[0]}
        for name, each in Grid.sent.items()
    }


def main(text: Path, work: Path) -> None:
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    for seed in SEEDS:
        for preset in PRESETS:
            if (name := f"{preset}/{seed}") not in found["cells"]:
                found["cells"][name] = measured(preset, seed, text, work)
                RESULTS.write_text(json.dumps(found | about(), indent=1) + "\n")
                print(name, found["cells"][name], flush=True)


def table() -> Table:
    """Percent of the sent bytes that remain, by preset and stream, and of all: means over seeds."""
    cells = json.loads(RESULTS.read_text())["cells"]
    ways = ("entropy", *(f"zstd {level}" for level in LEVELS))
    rows = []
    for preset in PRESETS:
        runs = [cells[name] for seed in SEEDS if (name := f"{preset}/{seed}") in cells]
        for stream in (*runs[0], "all"):
            remains = []
            for way in ways:
                shares = []
                for run in runs:
                    parts = run.values() if stream == "all" else [run[stream]]
                    whole = sum(part["times"] * part["sent"] for part in parts)
                    shares.append(sum(part["times"] * part[way] for part in parts) / whole)
                remains.append(f"{100 * fmean(shares):.1f}")
            rows.append([preset, stream, len(runs), *remains])
    heads = ["preset", "stream", "seeds", "entropy of bytes, %", *(f"{way}, %" for way in ways[1:])]
    return Table(heads, rows)


if __name__ == "__main__":
    _text, *_more = sys.argv[1:]
    main(Path(_text).resolve(), Path(_more[1] if _more else "runs/entropy").resolve())
