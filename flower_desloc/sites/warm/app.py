"""The ClientApp that Flower calls: it hands on, or answers here where a process lives on anyway."""

import importlib
import os
import sys
from logging import WARNING
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from flower_desloc.sites.warm.door import Door, NoTrainerError

_SWITCH = "warm"  # in the node config
_OF_ONE_MESSAGE = "flwr-clientapp"  # the program that a SuperNode starts for every message


class WarmClientApp(ClientApp):
    """Answers for the ClientApp that ``reference`` names, as ``module:attribute``.

    In a process that a SuperNode started for one message, the node's trainer answers. In a
    simulation, in one process with the server, or with ``warm=false`` in the node config, the app
    is imported and answers here.
    """

    def __init__(self, reference: str) -> None:
        super().__init__()
        self.reference = reference

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the app's reply; raises what the app raises, under the same name and text."""
        if _is_wanted(context) and Path(sys.argv[0]).name == _OF_ONE_MESSAGE:
            try:
                return Door(self.reference, context).answer(message, context)
            except NoTrainerError as error:
                log(WARNING, "%s; this message is answered without a warm trainer", error)
        return load(self.reference)(message, context)


def load(reference: str) -> ClientApp:
    """Return the ClientApp that ``module:attribute`` names."""
    module, _, attribute = reference.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    assert isinstance(app, ClientApp), f"{reference} is a {type(app).__name__}"
    return app


def _is_wanted(context: Context) -> bool:
    wanted = context.node_config.get(_SWITCH, True)
    if not isinstance(wanted, bool):
        raise ValueError(f"{_SWITCH}={wanted!r} in the node config: must be true or false")
    return wanted and hasattr(os, "pidfd_open")  # Linux alone has it
