"""What can be known before a run: half-lives, drift, step sizes, bytes and time, by the paper.

Plain arithmetic in modules to import one by one; ``desloc plan`` puts it together.
"""
