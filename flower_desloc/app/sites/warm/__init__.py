"""A process that keeps a node's model and data between messages (Linux only).

Flower starts a fresh process for every message to a SuperNode. That process imports PyTorch and the
model's library, builds the model and loads the data before it can train: in every window, more time
than everything else a window costs (``benchmarks/deployment_overhead.py``). Lazy imports or a
mapped state file would not help, because every window needs the model.

So the first message starts a trainer, a process that keeps all this, and Flower's fresh processes
forward their messages to it. They import neither PyTorch nor the app; nor may anything in this
package except ``trainer``. The client's state is in its state file, so killing a trainer loses
nothing but the time to start another.
"""

import sys
from logging import WARNING
from pathlib import Path
from pkgutil import resolve_name

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_desloc.app.sites.warm.trainer_client import NoTrainerError, forward
from flower_desloc.flower.internals import log

__all__ = ["WarmClientApp"]

_OPTION = "warm"  # in the node config
_ONE_MESSAGE_PROGRAM = "flwr-clientapp"  # a SuperNode starts it for every message


class WarmClientApp(ClientApp):
    """Answers for the ClientApp that ``reference`` names, as ``module:attribute``.

    In a process that a SuperNode started for one message, the node's trainer answers. In a
    simulation, in one process with the server, with ``warm=false`` in the node config, or on a
    system other than Linux, the app is imported and answers in this process.
    """

    def __init__(self, reference: str) -> None:
        super().__init__()
        self.reference = reference

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the app's reply; raises what the app raises, with the same type name and text."""
        if _uses_trainer(context):
            try:
                return forward(self.reference, message, context)
            except NoTrainerError as error:
                log(WARNING, "%s; this message is answered without a warm trainer", error)
        reply: Message = resolve_name(self.reference)(message, context)
        return reply


def _uses_trainer(context: Context) -> bool:
    wanted = context.node_config.get(_OPTION, True)
    if not isinstance(wanted, bool):
        raise ValueError(f"{_OPTION}={wanted!r} in the node config: must be true or false")
    one_message = Path(sys.argv[0]).name == _ONE_MESSAGE_PROGRAM
    return wanted and one_message and sys.platform == "linux"
