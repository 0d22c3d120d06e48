"""Averages that arrive late: a worker sends its streams and keeps training until they are back.

An optimizer state forgets what it was, ``s <- beta s + (what does not depend on s)``. So whatever
an average would have changed after step t has decayed to beta^d of itself d steps later. A worker
that sent its streams as they were after step t merges their averages after step t + d by

    x <- x + (mean x_t - x_t)
    u <- u + beta1^d (mean u_t - u_t)
    v <- v + beta2^d (mean v_t - v_t)

For the gradients that were seen, this gives the moments that averages in time would have given. Not
so for the parameters: those gradients were taken where the worker was. The merge of x is that of
LOSCAR-SGD and DaSGD; that of the moments is this project's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flower_desloc.core.kinds import Kind
from flower_desloc.core.types import Stream


@torch.no_grad()
def merged(
    kind: Kind,
    now: Stream,
    sent: Stream,
    average: Stream,
    *,
    decays: Mapping[str, float],
    steps: int,
) -> dict[str, Tensor]:
    """Return a stream after its average has arrived ``steps`` local steps late.

    Args:
        kind: What the stream holds. Means of squares stay at least zero, which rounding could
            change. Buffers are replaced by their average: the layers that write them state no
            decay.
        now: The stream after those steps.
        sent: The stream before them, as this worker had it.
        average: The mean of what the workers sent.
        decays: What a step multiplies each tensor by; 1 for parameters.
        steps: The local steps taken since.

    """
    if kind is Kind.BUFFERS:
        return dict(average)
    result = {}
    for key, tensor in now.items():
        change = (average[key] - sent[key]).to(tensor.device)
        result[key] = torch.add(tensor, change, alpha=decays[key] ** steps)
        if not kind.is_signed:
            result[key].clamp_min_(0)
    return result
