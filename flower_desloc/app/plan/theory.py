"""The paper's formulas: half-life and drift bound of a moment, and Theorem 1's step size."""

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


def psi(p_x: float, p_u: float, beta: float) -> float:
    """Return Theorem 1's psi, for averages with probabilities ``p_x`` and ``p_u`` after a step.

    psi = 4 (1 - p_x) / p_x^2  (1 - beta) / (1 - (1 - p_u) beta)

    The paper's psi has one more factor, 1 - p_u, because its Algorithm 5 averages u before x takes
    its step. Here u is averaged after the step, so x takes the step along the worker's own u
    (research/paper.md, "Theorem 1").

    It is infinite if parameters are never averaged.
    """
    if p_x == 0:
        return math.inf
    return 4 * (1 - p_x) / p_x**2 * (1 - beta) / (1 - (1 - p_u) * beta)


def step_size_bound(
    psi: float, beta: float, *, smoothness: float = 1.0, dissimilarity: float = 1.0
) -> float:
    """Return eta_0, the largest step size for which Theorem 1 is proved.

    eta_0 = 1 / (4 L) min(1 - beta, 1 / (6 sqrt(psi max(1, B^2 - 1))))

    ``smoothness`` is L of every worker's loss. ``dissimilarity`` is B of the workers' gradients: 1
    if all have the same data.
    """
    return min(1 - beta, averaging_limit(psi, dissimilarity)) / (4 * smoothness)


def averaging_limit(psi: float, dissimilarity: float = 1.0) -> float:
    """Return the second term of the minimum in eta_0, the limit set by rare averages."""
    spread = 6 * math.sqrt(psi * max(1.0, dissimilarity**2 - 1))
    return 1 / spread if spread else math.inf
