"""The paper's formulas for a moment between two averages: half-life and drift bound."""

import math


def half_life(beta: float, psi: float = 0.5) -> float:
    """Return the steps after which a moment keeps the share ``psi`` of what it held.

    tau_psi(beta) = ln psi / ln beta

    >>> round(half_life(0.95), 1), round(half_life(0.9999))
    (13.5, 6931)
    """
    return math.log(psi) / math.log(beta) if beta else 0.0


def kept(beta: float, steps: float) -> float:
    """Return the share of a moment that is left after ``steps`` steps, beta^K."""
    return float(beta**steps)


def drift_bound(beta: float, steps: float, ceiling: float) -> float:
    """Return the largest change of a coordinate of a moment in ``steps`` steps.

    2 c (1 - beta^K), where no coordinate of the moment or of its inputs exceeds c: c = rho for the
    first moment of clipped gradients, rho^2 for the second.
    """
    # 1 - beta^K loses its digits where beta^K is near 1.
    change = -math.expm1(steps * math.log(beta)) if beta else float(steps > 0)
    return 2 * ceiling * change
