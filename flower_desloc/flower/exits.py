"""A ``sys.exit`` of the user's code is an error like any other.

Flower catches ``Exception``, which ``SystemExit`` is not: in a simulation the process of the client
ends, and a run whose ServerApp exits counts as completed.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = ("flwr", "ray", "flower_desloc")


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise ``RuntimeError`` where the user's code called ``sys.exit``.

    The ``SystemExit`` of a signal passes: the handlers of Flower, Ray and ``desloc`` raise it.
    """
    try:
        yield
    except SystemExit as error:
        raised_in = [frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if str(raised_in.get("__name__")).partition(".")[0] in _OWN:
            raise
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error
