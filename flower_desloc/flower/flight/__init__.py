"""Tensors beside Flower's messages, by Arrow Flight between the ServerApp's process and the sites.

A message then has a ticket, the tensors' names, shapes, types and sizes, and a digest in place of
its arrays. Strategy and client do not know: ``at_server`` takes the arrays out of requests and puts
those of replies back, ``at_site`` does the reverse before and after the client's own code.
``transfer`` alone imports pyarrow; without it, or without an address, arrays stay in the messages.
"""

from typing import Final

FLIGHT: Final = "flight"
"""Name of the ConfigRecord that stands for the arrays of a message."""
