"""A ``sys.exit`` in the user's code is an error; a signal's passes.

Flower catches ``Exception``, which ``SystemExit`` is not: in a simulation the process of the client
ends, and a run whose ServerApp exits counts as completed. The panics of libraries in Rust, such as
tokenizers, and ``asyncio.CancelledError`` are none either.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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
        raised_in = error.__traceback__
        while raised_in is not None and raised_in.tb_next is not None:
            raised_in = raised_in.tb_next
        assert raised_in is not None, "it has this frame at least"
        if str(raised_in.tb_frame.f_globals.get("__name__")).partition(".")[0] in _OWN:
            raise
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
