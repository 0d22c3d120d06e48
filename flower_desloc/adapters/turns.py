"""A function in a thread of its own that runs only while the caller waits for it.

So a loop that belongs to another library can be stopped between two of its steps, by a callback
that calls ``pause``, and go on later with everything that it has in its variables.
"""

import threading
from collections.abc import Callable


class Ended(BaseException):
    """Raised by ``pause`` in the function that is not to go on."""


class Turns:
    """Of two threads, the caller's and that of a function, exactly one runs."""

    is_over = False
    """Whether the function has returned or raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._here, self._there = threading.Semaphore(0), threading.Semaphore(0)
        self._is_ending = False
        self._error: BaseException | None = None
        # A daemon: while it waits it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def next(self) -> None:
        """Let the function run to its next pause or to its end; raise what it raises."""
        assert not self.is_over
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._there.release()
        self._here.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Wait, in the function, for the caller's ``next``; raise ``Ended`` after its ``end``."""
        self._here.release()
        self._there.acquire()
        if self._is_ending:
            raise Ended

    def end(self) -> None:
        """End a function that has not returned yet; raise what it then raises."""
        self._is_ending = True
        if self._thread.is_alive():
            self.next()

    def _run(self) -> None:
        try:
            self._function()
        except Ended:
            pass
        except BaseException as error:  # the caller's, like SystemExit
            self._error = error
        finally:
            self.is_over = True
            self._here.release()
