"""``partition.png``: how much of each domain or label each client holds."""

import math
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flower_desloc.app.config import Config
from flower_desloc.app.config.imports import is_path
from flower_desloc.app.config.units import TEXT, examples_noun, percent_text, size_text
from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.record import natural

Holdings = Mapping[str, Mapping[str, int]]
"""Client -> domain or label -> size."""

_BLUES: Final = LinearSegmentedColormap.from_list(
    "white to blue", ["#FFFFFF", "#8DBBD9", "#0B4A7D"]
)
_MAX_NUMBERED: Final = 16
"""With more clients, the cells have no numbers."""
_MAX_NAMED: Final = 34
"""With more names on an axis, only some are written."""
_MAX_SKIPPED: Final = 3
"""If only one of more names than this is written, the cells have no numbers."""
_LONGEST: Final = 40
"""Characters of a name that are written."""


def draw_partition(data: Holdings, path: Path, *, task: str, title: str) -> None:
    """Draw the sizes into ``path``, with a headline."""
    made = draw_holdings(data, task)
    assert made is not None
    made.set_figheight(made.get_figheight() + style.HEAD)
    style.headline(made, title, total_variation_text(data, task))
    made.savefig(path, dpi=130)


def draw_holdings(data: Holdings, task: str) -> Figure | None:
    """Draw the sizes, one column for each client and one row for each label, with totals."""
    if not data:
        return None
    clients, names = list(data), labels(data)
    sizes = table(data)
    column = 0.95 if task == TEXT else 0.62
    height = min(11.3, max(3.5, 1.9 + 0.34 * len(names)))
    ratios = [1.0, max(1.6, 0.34 * len(names))]
    made, (totals, cells) = style.figure(2, 1, height, sharex=True, height_ratios=ratios)
    for panel in (totals, cells):
        panel.spines[:].set_visible(False)
        panel.grid(visible=False)
    made.set_figwidth(min(13.5, max(8.0, 2.4 + column * len(clients))))
    _draw_totals(totals, sizes.sum(axis=1), task)
    _draw_cells(cells, sizes, names, task)
    _name_clients(cells, clients)
    return made


def title(config: Config) -> str:
    """Return the headline: the run's name and how its data were divided."""
    data = config.data
    if is_path(config.task):  # a task of the user's own may divide its data in any way
        return config.run.name
    how = {
        "dirichlet": f"dirichlet, alpha {data.alpha:g}",
        "quantity": f"quantity, alpha {data.alpha:g}",
        "pathological": f"pathological, {data.classes_per_client} labels a client",
    }
    return f"{config.run.name}: {how.get(data.partition, data.partition.replace('_', ' '))}"


def labels(data: Holdings) -> list[str]:
    """Return all domains or labels in natural order."""
    return sorted({name for held in data.values() for name in held}, key=natural)


def table(data: Holdings) -> NDArray[np.int64]:
    """Return the sizes as an array of (client, label)."""
    names = labels(data)
    rows = [[held.get(name, 0) for name in names] for held in data.values()]
    return np.array(rows, dtype=np.int64).reshape(len(data), len(names))


def total_variation(data: Holdings) -> float:
    """Return how much the clients' mixtures differ from the mixture of all data; 0 if not at all.

    The total variation distance between a client's shares of the labels and those of all data,
    which is the share of the client's data that would have to be exchanged; the mean over clients.
    """
    sizes = table(data).astype(float)
    own = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), 1)
    whole = sizes.sum(axis=0) / max(sizes.sum(), 1)
    return float(np.abs(own - whole).sum(axis=1).mean() / 2) if len(sizes) else 0.0


def total_variation_text(data: Holdings, task: str) -> str:
    """Return a line about the sizes of the clients' data and how much their mixtures differ."""
    totals = table(data).sum(axis=1)
    least, most = (size_text(int(end), task) for end in (totals.min(), totals.max()))
    what = "" if task == TEXT else f" {examples_noun(task)}"
    return (
        f"{len(data)} clients of {least} to {most}{what}; to have the mixture of all, "
        f"{percent_text(total_variation(data))} of a client's data would have to change"
    )


def _draw_totals(panel: Axes, totals: NDArray[np.int64], task: str) -> None:
    most = int(totals.max())
    bars = panel.bar(range(len(totals)), totals, width=0.86, color=style.BAR)
    panel.tick_params(length=0, labelbottom=False)
    panel.set_ylim(0, max(1, most) * 1.25)
    panel.set_yticks([])
    small = style.TEXT_SIZE - 1
    if len(totals) > _MAX_NUMBERED:
        panel.set_yticks([most], [size_text(most, task)], fontsize=small, color=style.GREY)
        panel.axhline(most, color=style.FAINT, lw=0.8, zorder=0)
        return
    texts = [size_text(total, task) for total in totals.tolist()]
    panel.bar_label(bars, texts, padding=2, fontsize=small, color=style.INK)


def _draw_cells(panel: Axes, sizes: NDArray[np.int64], names: Sequence[str], task: str) -> None:
    # The square root, so that small sizes can be seen next to large ones.
    shades = np.sqrt(sizes.T / max(int(sizes.max()), 1))
    columns, rows = (np.arange(number + 1) - 0.5 for number in sizes.shape)
    lines = 1.0 if len(sizes) <= 40 else 0.4
    panel.pcolormesh(columns, rows, shades, cmap=_BLUES, vmin=0, vmax=1, ec="#EFEFEF", lw=lines)
    panel.invert_yaxis()
    panel.tick_params(length=0)
    every = math.ceil(len(names) / _MAX_NAMED)
    # The names are what clients say: "$" does not begin a formula in them.
    shown = [name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[::every]]
    panel.set_yticks(range(0, len(names), every), shown, parse_math=False)
    for row, total in list(enumerate(sizes.sum(axis=0).tolist()))[::every]:
        style.aside(panel, row, size_text(total, task), style.GREY)
    if len(sizes) > _MAX_NUMBERED or every > _MAX_SKIPPED:
        return
    for (client, name), size in np.ndenumerate(sizes):
        if size:
            colour = "white" if shades[name, client] > 0.62 else style.INK
            panel.text(
                client, name, size_text(int(size), task), ha="center", va="center",
                fontsize=style.TEXT_SIZE - 1.5, color=colour,
            )  # fmt: skip


def _name_clients(panel: Axes, clients: Sequence[str]) -> None:
    # The common beginning of all names is written once, as the label of the axis.
    common = commonprefix(clients) if len(clients) > 1 else ""  # noqa: RUF071 - no paths
    common = common.rstrip("0123456789")
    every = math.ceil(len(clients) / _MAX_NAMED)
    shown = range(0, len(clients), every)
    panel.set_xticks(shown, [clients[i].removeprefix(common) for i in shown])
    if common:
        panel.set_xlabel(common.rstrip("-_. "))
    elif max(map(len, clients)) > 6:
        panel.tick_params(axis="x", labelrotation=30)
