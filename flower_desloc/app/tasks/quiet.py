"""Suppress the progress bars and advice of ``datasets`` and ``transformers``.

``datasets`` also sends a request to a host of its makers for every local file that it opens, to
count uses. A site's data is nobody's business, and behind a firewall each request waits for 3 s.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import datasets
from transformers.utils import logging as transformers_logging

_lock = threading.Lock()
_inside = 0  # blocks that are being executed, in all threads
_restore = ExitStack()  # sets back what the first of them changed


@contextmanager
def quiet() -> Iterator[None]:
    """Silence both libraries, also on the network, and restore the user's settings afterwards.

    Their settings are those of the process: the last of several threads to leave restores them.
    """
    global _inside
    with _lock:
        if _inside == 0:
            _silence()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _restore.close()


def _silence() -> None:
    counted = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    _restore.callback(setattr, datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", counted)
    _restore.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
    if transformers_logging.is_progress_bar_enabled():
        _restore.callback(transformers_logging.enable_progress_bar)
    if not datasets.are_progress_bars_disabled():
        _restore.callback(datasets.enable_progress_bars)
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)
