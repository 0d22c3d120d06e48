"""The step size that Theorem 1 allows for DES-LOC-SGDM, and its psi, the cost of rare averages."""

import math


def psi(p_x: float, p_u: float, beta: float) -> float:
    """Return the paper's psi, for averages with probabilities ``p_x`` and ``p_u`` a step.

    psi = 4 (1 - p_x) / p_x^2  (1 - beta) (1 - p_u) / (1 - (1 - p_u) beta)

    It is infinite if parameters are never averaged, unless the momentum is averaged at every step:
    then all workers take the same steps.

    Raises ``ValueError`` unless the probabilities are in [0, 1] and 0 <= beta < 1.
    """
    for name, p in (("p_x", p_x), ("p_u", p_u)):
        if not 0 <= p <= 1:
            raise ValueError(f"{name} must be a probability, got {p}")
    if not 0 <= beta < 1:
        raise ValueError(f"beta must be at least 0 and below 1, got {beta}")
    if p_x == 1 or p_u == 1:
        return 0.0
    if p_x == 0:
        return math.inf
    momentum = (1 - beta) * (1 - p_u) / (1 - (1 - p_u) * beta)
    return 4 * (1 - p_x) / p_x**2 * momentum


def step_size_bound(
    psi: float, beta: float, *, smoothness: float = 1.0, dissimilarity: float = 1.0
) -> float:
    """Return eta_0, the largest step size for which Theorem 1 is proved.

    eta_0 = 1 / (4 L) min(1 - beta, 1 / (6 sqrt(psi max(1, B^2 - 1))))

    ``smoothness`` is L of every worker's loss. ``dissimilarity`` is B of the workers' gradients: 1
    if all have the same data.

    Raises ``ValueError`` unless L > 0 and B >= 1.
    """
    if not smoothness > 0:
        raise ValueError(f"smoothness must be above 0, got {smoothness}")
    if not dissimilarity >= 1:
        raise ValueError(f"dissimilarity must be at least 1, got {dissimilarity}")
    return min(1 - beta, averaging_limit(psi, dissimilarity)) / (4 * smoothness)


def averaging_limit(psi: float, dissimilarity: float = 1.0) -> float:
    """Return the second term of the minimum in eta_0, the limit set by rare averages."""
    spread = 6 * math.sqrt(psi * max(1.0, dissimilarity**2 - 1))
    return 1 / spread if spread else math.inf
