"""Keep the libraries' progress bars and advice off a run's output."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from transformers.utils import logging as advice


@contextmanager
def quiet() -> Iterator[None]:
    """Silence ``datasets`` and ``transformers``; afterwards all is as the user had it."""
    had_bars = not datasets.are_progress_bars_disabled(), advice.is_progress_bar_enabled()
    verbosity = advice.get_verbosity()
    datasets.disable_progress_bars()
    advice.disable_progress_bar()
    advice.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        advice.set_verbosity(verbosity)
        if had_bars[1]:
            advice.enable_progress_bar()
        if had_bars[0]:
            datasets.enable_progress_bars()
