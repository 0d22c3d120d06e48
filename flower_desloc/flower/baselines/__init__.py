"""Baselines over the same round engine: data parallelism, and Flower's own strategies."""
