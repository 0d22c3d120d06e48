"""A trainer that stays warm between the messages to a SuperNode.

Flower starts a fresh process for every message to a SuperNode. Before it can train, that process
imports PyTorch and the model's library, builds the model and loads the data: every window again.
Measured (``benchmarks/deployment_overhead.py``, figures in ``docs/warm.md``), that is more than all
else a window costs, and neither lazy imports nor a mapped state file would save it: the model is
needed in every window.

So the first message to a node starts a trainer, a process that keeps all this, and Flower's fresh
processes hand their messages on to it. They import neither PyTorch nor the app; this package must
not, either, but for ``trainer``. What a client keeps is in its
state file: a trainer that is killed costs nothing but its warmth.
"""

from flower_desloc.sites.warm.app import WarmClientApp

__all__ = ["WarmClientApp"]
