"""The paper's toy problem: Rosenbrock's valley, 256 workers and gradients full of noise.

What becomes of optimizer states that are averaged, kept or reset while parameters are averaged
(the figures "toy example", IID and non-IID). The strategy and the clients are the real ones.
"""
