"""Predictions before a run: half-lives, drift bounds, step sizes, bytes, time.

``desloc plan`` prints it. The formulas are the paper's; docs/how-to/plan.md lists them.
"""
