"""SparseLoCo compared with Local AdamW: the largest differences of parameters, in two bits.

    python research/sparse_loco.py --data FOLDER --work runs/sparse

As in Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025): after K local
steps of AdamW, whose moments stay local, a worker adds its difference to 0.95 times what it did not
send before, and sends of each 4096 values the largest, in two bits; the mean is applied as it is.
The model, data, steps and seeds are those of the study fair_methods_iid, whose Local AdamW is the
baseline; rates are searched on a spare seed. The project has no such format, so this program
replaces the functions that encode and decode a stream.
"""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from paired import PARTITIONS, SPARE, Estimate, Table
from paper import FAIR, study_cells
from small_runs import Cells, Study, periods
from torch import Tensor

from flower_desloc.core.compression import EncodedStream, encode_stream
from flower_desloc.core.kinds import Kind
from flower_desloc.core.types import Stream
from flower_desloc.flower import compression, server_state

K_X, DECAY, CHUNK = 16, 0.95, 4096
RATES = (0.0042, 0.00594, 0.0084, 0.0119)
SEEDS = range(5)
DENSITIES = {"1/32": 1 / 32, "1/8": 1 / 8}
MODEL = (
    "run.steps=768 data.batch_size=16 model.hidden_size=64 model.intermediate_size=256 "
    "model.num_hidden_layers=3 optimizer.name=adamw optimizer.betas=[0.9,0.95] "
    "optimizer.weight_decay=0.1"
)
Arm = namedtuple("Arm", "density partition lr")


def settings(arm: Arm) -> str:
    never = periods(K_X, "never", "never")
    return f"{MODEL} {never} optimizer.lr={arm.lr} compression.params=int2"


def largest(value: Tensor, density: float) -> Tensor:
    """Return a tensor with the largest values of each chunk in two bits, and zeros elsewhere."""
    flat = value.reshape(-1)
    size = min(CHUNK, len(flat))
    chunks = torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)
    index = chunks.abs().topk(max(1, round(density * size))).indices
    kept = {"x": chunks.gather(1, index)}
    in_two_bits = encode_stream(Kind.FIRST_MOMENT, kept, "int2").received["x"]
    sparse = torch.zeros_like(chunks).scatter_(1, index, in_two_bits)
    return sparse.view(-1)[: len(flat)].view(value.shape)


@contextmanager
def sparse_loco(arm: Arm) -> Iterator[None]:
    """Encode parameters of clients as in SparseLoCo; their mean travels as it is."""

    def at_client(
        _kind: Kind, stream: Stream, _format: str, *, reference: Stream, residual: Stream | None
    ) -> EncodedStream:
        coded, received, rest = {}, {}, {}
        for key, tensor in stream.items():
            value = tensor - reference[key]
            if residual:
                value = value + DECAY * residual[key]
            coded[key] = largest(value, DENSITIES[arm.density])
            received[key] = reference[key] + coded[key]
            rest[key] = value - coded[key]
        return EncodedStream(coded, received, rest)

    def at_server(_kind: Kind, stream: Stream, *_args: Any, reference: Stream, **_: Any) -> Any:
        coded = {key: tensor - reference[key] for key, tensor in stream.items()}
        return EncodedStream(coded, {k: reference[k] + t for k, t in coded.items()}, {})

    def decoded(_name: str, coded: Stream, *_args: Any, reference: Stream, **_: Any) -> Stream:
        return {key: reference[key] + tensor for key, tensor in coded.items()}

    with (
        patch.object(compression, "encode_stream", at_client),
        patch.object(compression, "decode_stream", decoded),
        patch.object(server_state, "encode_stream", at_server),
        patch.object(server_state, "decode_stream", decoded),
    ):
        yield


study = Study("sparse_loco", Arm, settings, around=sparse_loco)


def cells() -> Cells:
    for partition, density in product(PARTITIONS, DENSITIES):
        rates = [Arm(density, partition, lr) for lr in RATES]
        yield from ((arm, SPARE) for arm in rates)
        best = study.best(rates)
        yield from ((best, seed) for seed in SEEDS)


def table() -> Table:
    rows = []
    for (partition, data), density in product(PARTITIONS.items(), DENSITIES):
        arm = study.best(Arm(density, partition, lr) for lr in RATES)
        if arm is None or not study.done(arm):
            continue
        local = study_cells(FAIR[data])[0]
        gap = Estimate.above(study.values(arm), dict(enumerate(local["scores"])))
        bits = DENSITIES[density] * (12 + 2.5)
        row = [data, density, f"{arm.lr:g}", gap.seeds, f"{study.mean(arm):.4f}", gap.interval]
        rows.append([*row, f"{bits / (3 * 32):.2g}"])
    heads = ["data", "share of values sent", "rate", "seeds", "loss", "above Local AdamW, %"]
    return Table([*heads, "bytes to the server, Local's being 1"], rows)


if __name__ == "__main__":
    study.main(__doc__, cells)
