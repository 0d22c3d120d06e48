"""Retry what fails because of the network."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import aiohttp
import datasets
import httpx
import requests
from huggingface_hub.errors import HfHubHTTPError

from flower_desloc.app.config.errors import one_line
from flower_desloc.app.tasks.caches import causes

T = TypeVar("T")

WAITS = (5.0, 20.0, 60.0)
"""Seconds between attempts. The libraries make several attempts themselves before they fail."""

_NETWORK_ERRORS = (
    # Of the clients by which datasets and fsspec read; they retry on the same ones.
    aiohttp.ClientError,
    httpx.RequestError,
    requests.ConnectionError,
    requests.Timeout,
    HfHubHTTPError,
    ConnectionError,
    TimeoutError,
)
_TOO_MANY_REQUESTS = 429

_log = logging.getLogger(__name__)


def retry_network(what: object, act: Callable[[], T]) -> T:
    """Return ``act()``; when the network fails, wait and call it again.

    Raises ``ConnectionError`` if the last attempt failed too; the message says what to do.
    """
    for attempt, wait in enumerate((*WAITS, None), start=1):
        try:
            return act()
        except Exception as error:
            if not _is_network_error(error):
                raise
            reason = f"{what}: cannot be reached ({type(error).__name__}: {one_line(error)})"
            if wait is None:
                raise ConnectionError(
                    f"{reason}; gave up after {attempt} tries. Check the network; or set "
                    "HF_HUB_OFFLINE=1 if everything has been downloaded; or name a local folder"
                ) from error
            _log.warning("%s; try %d of %d in %g s", reason, attempt + 1, len(WAITS) + 1, wait)
            time.sleep(wait)
    raise AssertionError


def _is_network_error(error: BaseException) -> bool:
    if datasets.config.HF_HUB_OFFLINE:
        return False
    return any(
        isinstance(each, _NETWORK_ERRORS) and not _is_refusal(each) for each in causes(error)
    )


def _is_refusal(error: BaseException) -> bool:
    """Return whether a server answered and would give the same answer again."""
    status = getattr(error, "status", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and 400 <= status < 500 and status != _TOO_MANY_REQUESTS
