"""The two figures of a split, distance to the optimum and contour, and the map of the search."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from examples.toy.problem import OPTIMUM, SPLITS, START, Reals, distance, value
from examples.toy.runs import PATH_EVERY, Ways
from examples.toy.search import Row
from examples.toy.setting import K_X, METHODS, Setting
from flower_desloc.runs.figures.labels import named

# Okabe and Ito's: told apart with any colour vision.
_COLOURS: Final = {
    "desloc": "#0072B2",
    "local_adam": "#E69F00",
    "favg_keep_opt": "#6E6E6E",
    "favg_reset_opt": "#D55E00",
}
_DASHES: Final = {"local_adam": (0, (4, 2))}
"""Of what would hide another line."""
_BACK_TO_FRONT: Final = ("favg_reset_opt", "favg_keep_opt", "local_adam", "desloc")
_INK: Final = "#222222"
_GREY: Final = "#8A8A8A"
_TEXT: Final = 9.5
_STAR: Final[dict[str, Any]] = {
    "marker": "*",
    "ms": 13,
    "color": "white",
    "mec": _INK,
    "mew": 1.1,
    "zorder": 5,
}
_NEAR: Final = 0.3
"""Half of the height of the picture of the end."""
_SPLIT_NAMES: Final = {
    "iid": "IID: every gradient with Gaussian noise of standard deviation 1.5",
    "niid": "Non-IID: every worker with a standard deviation of its own, |N(0, 3)|",
}


def draw(ways: Ways, folder: Path) -> list[Path]:
    """Draw ``toy_iid.png`` and ``toy_niid.png``; return their paths."""
    return [_draw(ways, split, folder / f"toy_{split}.png") for split in SPLITS]


def draw_map(rows: Iterable[Row], folder: Path, *, like: Setting) -> Path:
    """Draw ``map.png``: final distance by learning rate, a panel for each beta1 and split.

    Of the search it shows the rule, clipping and beta2 of ``like``.
    """
    kept = [
        row
        for row in rows
        if (row.rule, row.clip, row.beta2) == (like.rule, like.clip, like.betas[1])
    ]
    betas = sorted({row.beta1 for row in kept})
    figure = _figure(2.75 * len(betas) + 0.6, 6.4)
    panels = figure.subplots(len(SPLITS), len(betas), sharex=True, sharey=True, squeeze=False)
    for line, split in zip(panels, SPLITS, strict=True):
        for panel, beta1 in zip(line, betas, strict=True):
            _tidy(panel)
            if split == SPLITS[0]:
                half = np.log(0.5) / np.log(beta1)
                named(panel, f"β₁ = {beta1:g}", f"half-life {half:.0f} steps")
            for method in METHODS:
                there = sorted(
                    (row.lr, row.distance, row.spread)
                    for row in kept
                    if (row.split, row.beta1, row.method) == (split, beta1, method)
                )
                lr, end, spread = np.array(there).T
                panel.errorbar(
                    lr, end, spread, **_style(method), marker="o", ms=3.5, elinewidth=0.8
                )
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_ylim(4e-3, 6)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
            if split == SPLITS[-1]:
                panel.set_xlabel("learning rate", fontsize=_TEXT, color=_INK)
        short = _SPLIT_NAMES[split].partition(":")[0]
        line[0].set_ylabel(f"{short}: final distance", fontsize=_TEXT, color=_INK)
    _legend(panels[0, 0], loc="upper left", ncols=1)
    _title(figure, "Where every method ends", f"{like.describe(lr=False)}; mean ± std over seeds")
    return _save(figure, folder / "map.png")


def _draw(ways: Ways, split: str, path: Path) -> Path:
    at = SPLITS.index(split)
    figure = _figure(12.8, 5.2)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _distances(left, ways, at)
    _contour(right, ways, at)
    size = ways.size
    _title(
        figure,
        _SPLIT_NAMES[split],
        f"{size.workers} workers, {K_X} local steps a round; {ways.setting.describe()}",
    )
    return _save(figure, path)


def _distances(panel: Axes, ways: Ways, split: int) -> None:
    _tidy(panel)
    size = ways.size
    named(
        panel,
        "Distance to the optimum",
        f"of the averages: median and quartiles of {size.seeds} seeds; "
        "dots: through Flower, lines: transcribed",
    )
    for method in METHODS:
        away = _distance(ways.averages[method][:, :, split])
        low, middle, high = np.quantile(away, (0.25, 0.5, 0.75), axis=1)
        panel.plot(middle, **_style(method))
        panel.fill_between(range(len(away)), low, high, color=_COLOURS[method], alpha=0.18, lw=0)
        through = np.median(_distance(ways.federated[method][:, :, split]), 1)
        panel.plot(through, ls="", marker="o", ms=5.5, mec="white", mew=0.7, color=_COLOURS[method])
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    panel.set_xlim(-0.01 * size.transcribed, max(size.rounds, size.transcribed))
    panel.set_xlabel("rounds", fontsize=_TEXT, color=_INK)
    _legend(panel, loc="upper right", ncols=2)


def _contour(panel: Axes, ways: Ways, split: int) -> None:
    _tidy(panel)
    named(panel, "The way there", f"mean of the workers every {PATH_EVERY} steps; one seed")
    panel.grid(visible=False)
    _levels(panel, (-1.6, 1.9), (-0.5, 2.6))
    for method in _BACK_TO_FRONT:
        x1, x2 = ways.means[method][:, :, split, 0].T
        panel.plot(x1, x2, color=_COLOURS[method], lw=0.9, alpha=0.8)
    panel.plot(*START, marker="s", ms=6, color=_INK)
    panel.annotate("start", START, xytext=(-4, -16), textcoords="offset points", fontsize=_TEXT)
    panel.plot(*OPTIMUM, **_STAR)
    panel.set_xlabel("x₁", fontsize=_TEXT, color=_INK)
    panel.set_ylabel("x₂", fontsize=_TEXT, color=_INK)
    _end(panel.inset_axes((0.24, 0.52, 0.4, 0.46)), ways, split)


def _end(panel: Axes, ways: Ways, split: int) -> None:
    """Draw the averages of the last half of the rounds, about the optimum."""
    panel.set_facecolor("white")
    panel.set_xticks([])
    panel.set_yticks([])
    panel.spines[:].set_color(_GREY)
    _levels(panel, (1 - _NEAR / 2, 1 + _NEAR / 2), (1 - _NEAR, 1 + _NEAR))
    for method in ("favg_reset_opt", "local_adam", "desloc", "favg_keep_opt"):
        averages = ways.averages[method]
        x1, x2 = averages[len(averages) // 2 :, :, split].swapaxes(0, 1)
        panel.plot(x1, x2, ls="", marker="o", ms=2.2, mew=0, color=_COLOURS[method], alpha=0.8)
    panel.plot(*OPTIMUM, **{**_STAR, "ms": 9})
    panel.annotate(
        "averages of the second half",
        (0.03, 0.03),
        xycoords="axes fraction",
        fontsize=7.5,
        color="#666666",
    )


def _levels(panel: Axes, x1: tuple[float, float], x2: tuple[float, float]) -> None:
    """Draw f's level lines, and set the panel's limits."""
    grid = np.meshgrid(np.linspace(*x1, 300), np.linspace(*x2, 300))
    levels = np.geomspace(0.01, 3000, 12)
    panel.contour(*grid, value(*grid), levels=levels, colors="#C4C4C4", linewidths=0.7)
    panel.set_xlim(x1)
    panel.set_ylim(x2)


def _distance(points: Reals) -> Reals:
    # (times, 2, seeds) -> (times, seeds)
    return distance(points.swapaxes(0, 1))


def _style(method: str) -> dict[str, Any]:
    return {"color": _COLOURS[method], "ls": _DASHES.get(method, "-"), "lw": 1.8}


def _legend(panel: Axes, **where: Any) -> None:
    handles = [Line2D([], [], **_style(name), label=m.name) for name, m in METHODS.items()]
    panel.legend(handles=handles, fontsize=_TEXT, frameon=False, labelcolor=_INK, **where)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=100, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    rect = (0.01, 0.01, 0.98, 1 - 0.8 / height)
    figure.get_layout_engine().set(rect=rect, wspace=0.04)  # type: ignore[union-attr, call-arg]
    return figure


def _title(figure: Figure, name: str, meaning: str) -> None:
    height = figure.get_figheight()
    top: dict[str, Any] = {"va": "top", "color": _INK}
    figure.text(0.015, 1 - 0.14 / height, name, fontsize=15, fontweight="bold", **top)
    figure.text(0.015, 1 - 0.46 / height, meaning, fontsize=11, **top)


def _tidy(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(_GREY)
    panel.tick_params(which="both", labelsize=_TEXT, color=_GREY, labelcolor=_INK)
    panel.grid(visible=True, axis="y", color="#EDEDED", lw=0.8)
    panel.set_axisbelow(True)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, pil_kwargs={"optimize": True})
    return path
