"""Keep the libraries' progress bars and advice off a run's output."""

from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence ``datasets`` and ``transformers``; afterwards all is as the user had it."""
    had_bars = not datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars[1]:
            logging.enable_progress_bar()
        if had_bars[0]:
            datasets.enable_progress_bars()
