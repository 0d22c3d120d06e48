"""Patience with a network: what fails for its sake is tried again."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import datasets
from datasets.utils.file_utils import CONNECTION_ERRORS_TO_RETRY
from huggingface_hub.errors import HfHubHTTPError

T = TypeVar("T")

WAITS = (5.0, 20.0, 60.0)
"""Seconds between tries. The libraries try several times themselves before they give up."""

_TROUBLE = (*CONNECTION_ERRORS_TO_RETRY, HfHubHTTPError, ConnectionError, TimeoutError)
_TOO_MANY_REQUESTS = 429

_log = logging.getLogger(__name__)


def patiently(what: object, act: Callable[[], T]) -> T:
    """Return what ``act`` does; where the network fails, wait and begin it anew.

    Raises ``ConnectionError``, saying what to do, when the last try fails too.
    """
    for tries, wait in enumerate((*WAITS, None), start=1):
        try:
            return act()
        except Exception as error:
            if not _is_of_the_network(error):
                raise
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            reason = f"{what}: cannot be reached ({said})"
            if wait is None:
                raise ConnectionError(
                    f"{reason}; gave up after {tries} tries. Check the network; or set "
                    "HF_HUB_OFFLINE=1 where all of it has been downloaded; or name a folder here"
                ) from error
            _log.warning("%s; try %d of %d in %g s", reason, tries + 1, len(WAITS) + 1, wait)
            time.sleep(wait)
    raise AssertionError


def _is_of_the_network(error: BaseException) -> bool:
    if datasets.config.HF_HUB_OFFLINE:  # There is none, by the user's word.
        return False
    return any(isinstance(each, _TROUBLE) and not _is_refusal(each) for each in _chain(error))


def _is_refusal(error: BaseException) -> bool:
    """Return whether a server answered, and would answer the same again."""
    status = getattr(error, "status", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and 400 <= status < 500 and status != _TOO_MANY_REQUESTS


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Return the error and what it came of: libraries wrap what happened."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
