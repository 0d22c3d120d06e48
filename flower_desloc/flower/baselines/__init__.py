"""Baselines over the same round loop: data parallelism, and Flower's own strategies."""
