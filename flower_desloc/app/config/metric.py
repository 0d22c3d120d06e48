"""Held-out metrics: their order, their text, and which of two values is better."""

import re
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple, Self, cast

from flower_desloc.app.config import units

Direction = Literal["min", "max"]
_FORM: Final = re.compile(r"(?:(min|max):)?(?:(central|federated)/)?(.+)", re.DOTALL)

DIRECTIONS: Final[dict[str, Direction]] = {
    "loss": "min",
    "accuracy": "max",
    "perplexity": "min",
    "bits_per_byte": "min",
    "nats_per_byte": "min",
}
"""The metrics of the project's tasks. Of a task's own metrics the direction is not known."""
OF_LOSS: Final = ("perplexity", "bits_per_byte", "nats_per_byte")
"""Metrics that rank runs as the loss does."""
_DIAGNOSTICS: Final = ("activation_norm",)


class Named(NamedTuple):
    """A metric as users name it: ``loss``, ``federated/accuracy``, ``max:central/NAME``."""

    direction: Direction | None
    """Which value is better; None if it is not known."""
    where: str | None
    metric: str

    @classmethod
    def of(cls, text: str) -> Self:
        """Read a name, which is not empty."""
        form = _FORM.fullmatch(text)
        assert form, "any text that is not empty has this form"
        direction, where, metric = form.groups()
        return cls(cast(Direction | None, direction) or DIRECTIONS.get(metric), where, metric)

    def place(self, *, central: bool) -> str:
        """Return where it is measured, by default on the server if that evaluates."""
        return self.where or ("central" if central else "federated")


def ordered(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, each once: the project's first, then a task's own.

    Measurements that are reported on their own, such as the activation norm, are left out.
    """
    given = dict.fromkeys(names)
    own = [name for name in given if name not in DIRECTIONS and name not in _DIAGNOSTICS]
    return [*(name for name in DIRECTIONS if name in given), *own]


def chooser(direction: Direction | None) -> Callable[[float, float], float] | None:
    """Return the function that returns the better of two values; None without a direction."""
    return None if direction is None else min if direction == "min" else max


def metric_text(value: float | None, metric: str) -> str:
    """Return a metric's value as text."""
    texts = {"accuracy": units.percent_text, "perplexity": units.figures}
    return texts.get(metric, units.loss_text if metric in DIRECTIONS else _own_text)(value)


def _own_text(value: float | None) -> str:
    """Return the value of a task's own metric with four significant digits; ``-`` without one."""
    return "-" if value is None else f"{value:.4g}"
