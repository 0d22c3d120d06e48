"""Suppress the progress bars and advice of ``datasets`` and ``transformers``.

``datasets`` also sends a request to a host of its makers for every local file that it opens, to
count uses. A site's data is nobody's business, and behind a firewall each request waits for 3 s.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence both libraries, also on the network, and restore the user's settings afterwards."""
    verbosity = transformers_logging.get_verbosity()
    counted = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets_bars = datasets.are_progress_bars_disabled()
    transformers_bars = transformers_logging.is_progress_bar_enabled()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counted
        transformers_logging.set_verbosity(verbosity)
        if transformers_bars:
            transformers_logging.enable_progress_bar()
        if not datasets_bars:
            datasets.enable_progress_bars()
