"""How a client's failure leaves the client: with its type, and a ``sys.exit`` as an error.

Flower catches ``Exception``, which ``SystemExit`` is not: in a simulation the process of the client
ends, and a run whose ServerApp exits counts as completed. The panics of libraries in Rust, such as
tokenizers, and ``asyncio.CancelledError`` are none either. Of an exception Flower sends the text.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import ERROR

from flwr.app import Context, Error, Message

from flower_desloc.flower.failures import CODES
from flower_desloc.flower.internals import log

_OWN = ("flwr", "ray", "flower_desloc")


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise ``RuntimeError`` where the user's code called ``sys.exit``, or a library panicked.

    ``KeyboardInterrupt`` passes, and the ``SystemExit`` of a signal: the handlers of Flower, Ray
    and ``desloc`` raise it.
    """
    try:
        yield
    except SystemExit as error:
        raised_in = [frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if str(raised_in.get("__name__")).partition(".")[0] in _OWN:
            raise
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def errors_by_type(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    """Flower mod: answer an error of ``CODES`` with its code."""
    try:
        return call(message, context)
    except tuple(CODES) as error:
        log(ERROR, "this client cannot go on", exc_info=True)
        code = next(code for kind, code in CODES.items() if isinstance(error, kind))
        return Message(Error(code, f"{type(error).__name__}: {error}"), reply_to=message)
