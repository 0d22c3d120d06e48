"""Data parallelism: the gradient of every step is averaged, and the server takes the step."""

from typing import Any

from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, SyncSchedule
from flower_desloc.flower.options import BY_GRADIENTS
from flower_desloc.flower.strategy import DesLoc


class DataParallel(DesLoc):
    """Average the gradients of every step.

    A window is one step. Clients receive the parameters, send the gradient of their next batch and
    keep nothing; the only optimizer state is the server's.

    Parameters
    ----------
    num_steps : int
        Steps to train.
    optimizer : OuterOptimizer
        The one optimizer.
    **options
        As in ``DesLoc``.

    """

    title = "data parallelism"
    excludes = (BY_GRADIENTS,)
    must_average = GRADIENTS
    has_bound = False  # the gradient of a single batch may be long; the server clips

    def __init__(self, num_steps: int, optimizer: OuterOptimizer, **options: Any) -> None:
        super().__init__(SyncSchedule({GRADIENTS: 1}), num_steps, outer=optimizer, **options)
