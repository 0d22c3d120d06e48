"""What error feedback does: held-out loss of lossy formats with it and without, above fp32's.

    python research/error_feedback.py --data FOLDER --work runs/feedback

Adam at the periods and with the bound of the preset lean, and Local Adam as a control, at one
rate: the one that ladder_tuned found for both. The project feeds back the quantisation error of x
and u and has no setting for it, so this program replaces the function that encodes a stream.
"""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

from paired import Table
from small_runs import SEEDS, Cells, Study, periods

from flower_desloc.core.compression import EncodedStream, encode_stream
from flower_desloc.core.kinds import Kind
from flower_desloc.core.types import Stream
from flower_desloc.flower import compression, server_state

RATE = 0.0119
MORE = range(3, 10)
"""Further seeds of the preset lean."""
FP32, LEAN, FOUR = "fp32/fp32/fp32", "int8/int4/int8", "int4/int4/int8"
LETTERS = {Kind.PARAMS: "x", Kind.FIRST_MOMENT: "u"}
BOTH, NONE = "x, u", "none"
"""Streams with feedback."""
KINDS = {
    ("lean", 16): [
        (FP32, BOTH),
        *((LEAN, which) for which in (BOTH, "x", "u", NONE)),
        *((FOUR, which) for which in (BOTH, NONE)),
    ],
    ("lean", 64): [(FP32, BOTH), (LEAN, BOTH), (LEAN, NONE)],
    ("Local", 16): [(FP32, BOTH), (LEAN, BOTH), (LEAN, NONE)],
    ("Local", 64): [(FP32, BOTH), (LEAN, BOTH), (LEAN, NONE)],
}
"""Formats and feedback by method and K_x."""
Arm = namedtuple("Arm", "method formats feedback k_x partition")


def settings(arm: Arm) -> str:
    streams = ("params", "exp_avg", "exp_avg_sq")
    formats = zip(streams, arm.formats.split("/"), strict=True)
    k_v, bound = (6 * arm.k_x, "true") if arm.method == "lean" else (arm.k_x, "false")
    return (
        f"data.batch_size=8 optimizer.lr={RATE} {periods(arm.k_x, arm.k_x, k_v)} "
        f"sync_bound={bound} "
        f"{' '.join(f'compression.{name}={format_}' for name, format_ in formats)}"
    )


@contextmanager
def feedback_of(arm: Arm) -> Iterator[None]:
    """Run an arm with error feedback for its streams only."""

    def encode(
        kind: Kind, stream: Stream, *args: Any, residual: Any = None, **kwargs: Any
    ) -> EncodedStream:
        if LETTERS.get(kind) not in arm.feedback.split(", "):
            return replace(encode_stream(kind, stream, *args, **kwargs), residual={})
        if kind is Kind.PARAMS:
            return encode_stream(kind, stream, *args, residual=residual, **kwargs)
        stream = {k: t + residual[k] if residual else t for k, t in stream.items()}
        sent = encode_stream(kind, stream, *args, **kwargs)
        return replace(sent, residual={k: t - sent.received[k] for k, t in stream.items()})

    with (
        patch.object(compression, "encode_stream", encode),
        patch.object(server_state, "encode_stream", encode),
    ):
        yield


study = Study("error_feedback", Arm, settings, around=feedback_of)


def arms() -> Iterator[Arm]:
    for (method, k_x), kinds in KINDS.items():
        yield from (Arm(method, *kind, k_x, "iid") for kind in kinds)


def cells() -> Cells:
    yield from ((arm, seed) for seed, arm in product(SEEDS, arms()))
    usual = [Arm("lean", *kind, 16, "iid") for kind in KINDS["lean", 16] if kind[0] != FOUR]
    yield from ((arm, seed) for seed, arm in product(MORE, usual))


def table() -> Table:
    rows = []
    for arm in filter(study.done, arms()):
        exact, with_it = arm._replace(formats=FP32, feedback=BOTH), arm._replace(feedback=BOTH)
        name = "Local" if arm.method == "Local" else f"{arm.k_x}/{arm.k_x}/{6 * arm.k_x}, bounded"
        row = [name, arm.k_x, arm.formats.replace("/", ", ")]
        row += ["" if arm == exact else arm.feedback]
        row += [len(study.values(arm)), f"{study.mean(arm):.3f}"]
        row += ["" if arm == other else study.above(arm, other) for other in (exact, with_it)]
        rows.append(row)
    heads = ["method", "K_x", "formats of x, u, v", "feedback", "seeds", "loss"]
    return Table([*heads, "above fp32, %", "above feedback of both, %"], rows)


if __name__ == "__main__":
    study.main(__doc__, cells)
