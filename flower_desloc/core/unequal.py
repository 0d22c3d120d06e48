"""Workers of unequal speed: a slow one takes fewer steps of a window, and weighs less in averages.

A worker that takes k of a window's n local steps takes the federation's first k: with their step
numbers, bias corrections and learning rates. Parameters are averaged with weights k, moments
with weights 1 - beta^k. After k steps

    u = beta^k (last mean of u) + (1 - beta^k) (a weighted mean of the worker's k gradients)

so a weight is the share of a worker's own gradients in its moment. It favours workers that have
moved further: the distance from the last average counts about as k^2.
"""

import math


def steps_in_time(steps: int, pace: float, fastest: float, least: float) -> int:
    """Return how many of ``steps`` a worker takes while the fastest one takes all of them.

    >>> steps_in_time(16, pace=0.4, fastest=0.1, least=0.1)
    4

    Args:
        steps: Local steps of the window.
        pace: The worker's seconds per step.
        fastest: Those of the fastest worker.
        least: Share of the steps that every worker takes.

    """
    return min(steps, max(fewest(steps, least), round(steps * fastest / pace)))


def fewest(steps: int, least: float) -> int:
    """Return how many of a window's ``steps`` every worker takes: the share ``least``, rounded up.

    >>> fewest(10, 0.1)
    1
    """
    return min(steps, math.ceil(steps * least - 1e-9))


def weight(decay: float, taken: int, steps: int) -> float:
    """Return a worker's weight in the mean of a stream: 1 if it took all steps, else less.

    Args:
        decay: What a step multiplies the stream by; 1 for parameters.
        taken: The worker's local steps since the stream's last average, at least 1.
        steps: The federation's.

    """
    if decay == 1:
        return taken / steps
    return (1 - decay**taken) / (1 - decay**steps)
