"""The paper's toy problem: 256 workers descend Rosenbrock's function on noisy gradients.

It shows what happens if optimizer states are averaged, kept or reset while parameters are averaged
(the paper's figures "toy example", IID and non-IID). Run it with ``python -m examples.toy``.
"""
