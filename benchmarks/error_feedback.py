"""What error feedback does: held-out loss of lossy formats with it and without, above fp32's.

    python benchmarks/error_feedback.py measure --data FOLDER --work runs/feedback
    python benchmarks/error_feedback.py draw     # the table as text

Adam at the periods and with the bound of the preset lean, and Local Adam as a control, at one
rate: the one that ladder_tuned found for both. There is no setting for it: without feedback, the
two functions that encode streams drop their residual.
"""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

from paired import table
from small_runs import SEEDS, Cells, Study, periods

from flower_desloc.core.compression import EncodedStream, encode_stream
from flower_desloc.flower import coding, server_state

RATE = 0.0119
FP32, LEAN, FOUR = "fp32/fp32/fp32", "int8/int4/int8", "int4/int4/int8"
KINDS = ((FP32, True), (LEAN, True), (LEAN, False), (FOUR, True), (FOUR, False))
Arm = namedtuple("Arm", "method formats feedback k_x partition")


def settings(arm: Arm) -> str:
    streams = ("params", "exp_avg", "exp_avg_sq")
    formats = zip(streams, arm.formats.split("/"), strict=True)
    k_v, bound = (6 * arm.k_x, "true") if arm.method == "lean" else (arm.k_x, "false")
    return (
        f"data.batch_size=8 optimizer.lr={RATE} {periods(arm.k_x, arm.k_x, k_v)} "
        f"sync_bound={bound} {' '.join(f'wire.{name}={format_}' for name, format_ in formats)}"
    )


@contextmanager
def feedback_of(arm: Arm) -> Iterator[None]:
    """Run an arm without error feedback if it says so."""
    if arm.feedback:
        yield
        return

    def encode(*args: Any, residual: Any = None, **kwargs: Any) -> EncodedStream:
        del residual
        return replace(encode_stream(*args, **kwargs), residual={})

    with (
        patch.object(coding, "encode_stream", encode),
        patch.object(server_state, "encode_stream", encode),
    ):
        yield


study = Study("error_feedback", Arm, settings, around=feedback_of)


def arms() -> Iterator[Arm]:
    for k_x, kind in product((16, 64), KINDS):
        yield Arm("lean", *kind, k_x, "iid")
    for k_x, kind in product((16, 64), KINDS[:3]):
        yield Arm("Local", *kind, k_x, "iid")


def cells() -> Cells:
    return ((arm, seed) for seed, arm in product(SEEDS, arms()))


def draw() -> None:
    rows = []
    for arm in filter(study.done, arms()):
        exact = arm._replace(formats=FP32, feedback=True)
        with_it = arm._replace(feedback=True)
        rows.append(
            [
                "Local" if arm.method == "Local" else f"{arm.k_x}/{arm.k_x}/{6 * arm.k_x}, bounded",
                arm.k_x,
                arm.formats.replace("/", ", "),
                "" if arm == exact else "yes" if arm.feedback else "no",
                f"{study.mean(arm):.3f}",
                "" if arm == exact else study.above(arm, exact),
                "" if arm.feedback else study.above(arm, with_it),
            ]
        )
    heads = ["method", "K_x", "formats of x, u, v", "feedback", "loss"]
    print(table([*heads, "above fp32, %", "above the same with feedback, %"], rows))


if __name__ == "__main__":
    study.main(__doc__, cells, draw)
