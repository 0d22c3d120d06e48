"""Text about a panel's curves: a title above it, and labels beside it that do not overlap."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

_INK, _FAINT = "#222222", "#666666"
_TEXT = 9


@dataclass(frozen=True)
class Label:
    """Text beside a panel for what ends at ``end``, a point of its data."""

    end: tuple[float, float]
    text: str
    colour: str
    bold: bool = False


def named(panel: Axes, name: str, meaning: str) -> None:
    """Write a panel's name above it, and below that what it shows."""
    panel.set_title(name, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=22)
    panel.annotate(
        meaning,
        (0, 1),
        xytext=(0, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=_TEXT,
        color=_FAINT,
    ).set_in_layout(False)  # or it would take its width from the panels


def beside(panel: Axes, labels: Sequence[Label], gap: float) -> None:
    """Write the labels beside the panel, at least ``gap`` of its height apart."""
    if not labels:
        return
    panel.set_ylim(panel.get_ylim())  # or the scale would still move under the labels
    panel.set_xlim(panel.get_xlim())
    to_axes = panel.transData + panel.transAxes.inverted()
    labels = sorted(labels, key=lambda label: label.end[1])
    heights = apart([float(to_axes.transform(label.end)[1]) for label in labels], gap)
    for label, height in zip(labels, heights, strict=True):
        panel.annotate(
            label.text,
            label.end,
            xytext=(1.04, height),
            xycoords="data",
            textcoords="axes fraction",
            va="center",
            fontsize=_TEXT,
            fontweight="bold" if label.bold else "normal",
            color=label.colour,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "lw": 0.6,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return rising ``heights`` at least a gap apart: each crowd about its middle, above 0.

    >>> apart([0.5, 0.5, 0.9], 0.25)
    [0.375, 0.625, 0.9]
    """
    crowds: list[list[float]] = []

    def bottom(crowd: Sequence[float]) -> float:
        return max(0.02, sum(crowd) / len(crowd) - gap * (len(crowd) - 1) / 2)

    for height in heights:
        crowds.append([height])
        while len(crowds) > 1 and bottom(crowds[-2]) + gap * len(crowds[-2]) > bottom(crowds[-1]):
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    return [bottom(crowd) + gap * i for crowd in crowds for i in range(len(crowd))]
