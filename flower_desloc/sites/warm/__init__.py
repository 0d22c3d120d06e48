"""A process that keeps a node's model and data between messages (Linux only).

Flower starts a fresh process for every message to a SuperNode. That process imports PyTorch and the
model's library, builds the model and loads the data before it can train: in every window, more time
than everything else a window costs (``benchmarks/deployment_overhead.py``, figures in
``docs/warm.md``). Lazy imports or a mapped state file would not help, because every window needs
the model.

So the first message starts a trainer, a process that keeps all this, and Flower's fresh processes
forward their messages to it. They import neither PyTorch nor the app; nor may anything in this
package except ``trainer``. The client's state is in its state file, so killing a trainer loses
nothing but the time to start another.
"""

from flower_desloc.sites.warm.app import WarmClientApp

__all__ = ["WarmClientApp"]
