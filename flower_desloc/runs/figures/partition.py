"""``partition.png``: who holds what."""

import math
import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flower_desloc.config import Config
from flower_desloc.config.imports import is_path
from flower_desloc.runs.units import TEXT, percent_text, size_text

Holdings = Mapping[str, Mapping[str, int]]
"""Client -> domain or label -> size."""

_INK: Final = "#222222"
_GREY: Final = "#8A8A8A"
_FAINT: Final = "#D9D9D9"
_BAR: Final = "#9DB7CC"
_BLUES: Final = LinearSegmentedColormap.from_list(
    "white to blue", ["#FFFFFF", "#8DBBD9", "#0B4A7D"]
)
_TEXT: Final = 9.5
_NUMBERED: Final = 16
"""So many clients have their numbers written into the cells."""
_NAMED: Final = 34
"""So many names stand at an axis at most."""


def draw_partition(data: Holdings, path: Path, *, task: str, title: str) -> None:
    """Draw the sizes that clients hold, a column a client and a row a label, into ``path``.

    Above the columns stand the clients' totals, beside the rows the labels'.
    """
    clients, names = list(data), labels(data)
    sizes = table(data)
    column = 0.95 if task == TEXT else 0.62
    width = min(13.5, max(8.0, 2.4 + column * len(clients)))
    height = min(12.0, max(4.2, 2.6 + 0.34 * len(names)))
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 1 - 0.72 / height))  # type: ignore[union-attr, call-arg]
    totals, cells = figure.subplots(
        2, 1, sharex=True, height_ratios=[1.0, max(1.6, 0.34 * len(names))]
    )
    _totals(totals, sizes.sum(axis=1), task)
    _cells(cells, sizes, names, task)
    _name_clients(cells, clients)
    left = 0.15 / width
    figure.text(
        left, 1 - 0.12 / height, title, fontsize=14, fontweight="bold", color=_INK, va="top"
    )
    figure.text(
        left, 1 - 0.43 / height, unlikeness_text(data, task), fontsize=_TEXT, color=_INK, va="top"
    )
    figure.savefig(path)


def title(config: Config) -> str:
    """Return what stands above the picture: the run's name and how its data were dealt."""
    data = config.data
    if is_path(config.task):  # it may deal its data as it likes
        return config.run.name
    how = {
        "dirichlet": f"dirichlet, alpha {data.alpha:g}",
        "quantity": f"quantity, alpha {data.alpha:g}",
        "pathological": f"pathological, {data.classes_per_client} labels a client",
    }
    return f"{config.run.name}: {how.get(data.partition, data.partition.replace('_', ' '))}"


def labels(data: Holdings) -> list[str]:
    """Return all labels, 2 before 10."""
    return sorted({name for held in data.values() for name in held}, key=_natural)


def table(data: Holdings) -> NDArray[np.int64]:
    """Return the sizes as an array of (client, label)."""
    names = labels(data)
    rows = [[held.get(name, 0) for name in names] for held in data.values()]
    return np.array(rows, dtype=np.int64).reshape(len(data), len(names))


def unlikeness(data: Holdings) -> float:
    """Return how unlike the clients' mixtures are: 0 where all are like the whole.

    The total variation distance between a client's shares of the labels and those of everything,
    which is the share of the client's data that would have to be exchanged; the mean over clients.
    """
    sizes = table(data).astype(float)
    own = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), 1)
    whole = sizes.sum(axis=0) / max(sizes.sum(), 1)
    return float(np.abs(own - whole).sum(axis=1).mean() / 2) if len(sizes) else 0.0


def unlikeness_text(data: Holdings, task: str) -> str:
    """Return a line about a partition: how large and how unlike its parts are."""
    totals = table(data).sum(axis=1)
    least, most = (size_text(int(end), task) for end in (totals.min(), totals.max()))
    what = {TEXT: "", "image_classification": " images"}.get(task, " examples")
    return (
        f"{len(data)} clients of {least} to {most}{what}; for its mixture to be that of all, "
        f"{percent_text(unlikeness(data))} of a client's data would have to change"
    )


def _totals(panel: Axes, totals: NDArray[np.int64], task: str) -> None:
    panel.bar(range(len(totals)), totals, width=0.86, color=_BAR)
    panel.spines[:].set_visible(False)
    panel.tick_params(axis="x", length=0, labelbottom=False)
    panel.set_ylim(0, max(1, int(totals.max())) * 1.25)
    panel.set_yticks([])
    if len(totals) <= _NUMBERED:
        for client, total in enumerate(totals.tolist()):
            panel.annotate(
                size_text(total, task),
                (client, total),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=_TEXT - 1,
                color=_INK,
            )
    else:
        most = int(totals.max())
        panel.set_yticks([most], [size_text(most, task)], fontsize=_TEXT - 1, color=_GREY)
        panel.axhline(most, color=_FAINT, lw=0.8, zorder=0)
        panel.tick_params(axis="y", length=0)


def _cells(panel: Axes, sizes: NDArray[np.int64], names: Sequence[str], task: str) -> None:
    most = max(int(sizes.max()), 1)
    # The root, so that small parts are seen beside large ones.
    shades = np.sqrt(sizes.T / most)
    columns, rows = (np.arange(number + 1) - 0.5 for number in sizes.shape)
    lines = 1.0 if len(sizes) <= 40 else 0.4
    panel.pcolormesh(columns, rows, shades, cmap=_BLUES, vmin=0, vmax=1, ec="#EFEFEF", lw=lines)
    panel.invert_yaxis()
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0, labelsize=_TEXT, labelcolor=_INK)
    every = math.ceil(len(names) / _NAMED)
    panel.set_yticks(range(0, len(names), every), names[::every])
    sums = panel.secondary_yaxis("right")
    totals = [size_text(total, task) for total in sizes.sum(axis=0).tolist()]
    sums.set_yticks(range(0, len(names), every), totals[::every], color=_GREY)
    sums.spines[:].set_visible(False)
    sums.tick_params(length=0, labelsize=_TEXT - 1)
    if len(sizes) > _NUMBERED:
        return
    for (client, name), size in np.ndenumerate(sizes):
        if size:
            colour = "white" if shades[name, client] > 0.62 else _INK
            panel.text(
                client,
                name,
                size_text(int(size), task),
                ha="center",
                va="center",
                fontsize=_TEXT - 1.5,
                color=colour,
            )


def _name_clients(panel: Axes, clients: Sequence[str]) -> None:
    # What all names begin with is said once.
    common = commonprefix(clients) if len(clients) > 1 else ""  # noqa: RUF071  (they are no paths)
    common = common.rstrip("0123456789")
    every = math.ceil(len(clients) / _NAMED)
    shown = range(0, len(clients), every)
    panel.set_xticks(shown, [clients[i].removeprefix(common) for i in shown])
    if common:
        panel.set_xlabel(common.rstrip("-_. "), fontsize=_TEXT, color=_INK)
    elif max(map(len, clients)) > 6:
        panel.tick_params(axis="x", labelrotation=30)


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]
