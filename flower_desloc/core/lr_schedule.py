"""Learning rates as functions of the global step.

Each returns the factor of the peak learning rate for the step taken after ``step`` completed
steps, so ``step`` runs from 0 to ``num_steps - 1``: after an average at step t the next step has
``schedule(t)``. The factor may be 0 at ``num_steps``. They hold no state: a client that joins or
returns continues where the federation is.
"""

import math
from collections.abc import Callable

LRSchedule = Callable[[int], float]


def constant(warmup_steps: int = 0) -> LRSchedule:
    """Linear warm-up over ``warmup_steps``, then 1."""
    return lambda step: _warmup(step, warmup_steps)


def wsd(num_steps: int, warmup_steps: int, decay_steps: int) -> LRSchedule:
    """Warmup-stable-decay with the paper's 1 - sqrt decay over the last ``decay_steps``.

    Appendix A.1: eta_t = eta * (1 - sqrt((t - (T - D)) / D)) for t >= T - D.

    Raises ``ValueError`` when warm-up and decay do not fit into ``num_steps``.
    """
    if warmup_steps + decay_steps > num_steps:
        raise ValueError(
            f"a warm-up of {warmup_steps} and a decay of {decay_steps} steps "
            f"do not fit into {num_steps} steps"
        )
    decay_start = num_steps - decay_steps

    def factor(step: int) -> float:
        if step < decay_start:
            return _warmup(step, warmup_steps)
        return 1 - math.sqrt(min(step - decay_start, decay_steps) / max(1, decay_steps))

    return factor


def cosine(num_steps: int, warmup_steps: int, final: float = 0.0) -> LRSchedule:
    """Linear warm-up, then half a cosine from 1 down to ``final`` at ``num_steps``.

    Raises ``ValueError`` when the warm-up is longer than ``num_steps``.
    """
    if warmup_steps > num_steps:
        raise ValueError(f"a warm-up of {warmup_steps} does not fit into {num_steps} steps")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return _warmup(step, warmup_steps)
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def _warmup(step: int, warmup_steps: int) -> float:
    # The first step moves: a learning rate of 0 would waste it.
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0
