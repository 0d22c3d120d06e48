"""Figures: distance to the optimum and contour for each split, and the map of the search."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from examples.toy.problem import OPTIMUM, SPLITS, START, Reals, distance, value
from examples.toy.runs import PATH_EVERY, MethodRuns
from examples.toy.setting import K_X, METHODS, ToySetting
from flower_desloc.app.runs.figures.style import GREY, INK, figure, title

# Okabe and Ito's palette, for any colour vision.
_COLOURS: Final = {
    "desloc": "#0072B2",
    "local_adam": "#E69F00",
    "favg_keep_opt": "#6E6E6E",
    "favg_reset_opt": "#D55E00",
}
_DASHES: Final = {"local_adam": (0, (4, 2))}
"""Dashes of a line that would hide another."""
_BACK_TO_FRONT: Final = ("favg_reset_opt", "favg_keep_opt", "local_adam", "desloc")
_TEXT: Final = 9.5
_STAR: Final[dict[str, Any]] = {"marker": "*", "color": "white", "mec": INK, "zorder": 5}
_NEAR: Final = 0.3
"""Half of the height of the picture of the end."""
_SPLIT_NAMES: Final = {
    "iid": "IID: every gradient with Gaussian noise of standard deviation 1.5",
    "niid": "Non-IID: every worker with a standard deviation of its own, |N(0, 3)|",
}


Runs = dict[str, MethodRuns]


def draw(runs: Runs, setting: ToySetting, workers: int, folder: Path) -> list[Path]:
    """Draw ``toy_iid.png`` and ``toy_niid.png``; return their paths."""
    paths = []
    for at, split in enumerate(SPLITS):
        made, (left, right) = figure(1, 2, 5.2, width_ratios=(1.25, 1))
        made.set_figwidth(12.8)
        _distances(left, runs, at)
        _contour(right, runs, at)
        meaning = f"{workers} workers, {K_X} local steps a round; {setting.describe()}"
        paths.append(_save(made, _SPLIT_NAMES[split], meaning, folder / f"toy_{split}.png"))
    return paths


def draw_map(rows: pd.DataFrame, folder: Path, *, like: ToySetting) -> Path:
    """Draw ``map.png``: final distance by learning rate, a panel for each beta1 and split.

    It shows the settings of the search with the rule, clipping and beta2 of ``like``.
    """
    kept = rows.query("rule == @like.rule and clip == @like.clip and beta2 == @like.betas[1]")
    betas = sorted(kept["beta1"].unique())
    made, panels = figure(len(SPLITS), len(betas), 6.4, sharex=True, sharey=True)
    made.set_figwidth(2.75 * len(betas) + 0.6)
    for number, panel in enumerate(panels):
        line, column = divmod(number, len(betas))
        split, beta1 = SPLITS[line], betas[column]
        if line == 0:
            half = np.log(0.5) / np.log(beta1)
            title(panel, f"β₁ = {beta1:g}", f"half-life {half:.0f} steps")
        for method in METHODS:
            there = kept.query("split == @split and beta1 == @beta1 and method == @method")
            there = there.sort_values("lr")
            panel.errorbar(
                there["lr"], there["distance"], there["spread"],
                **_style(method), marker="o", ms=3.5, elinewidth=0.8,
            )  # fmt: skip
        panel.set(xscale="log", yscale="log", ylim=(4e-3, 6))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
        if line == len(SPLITS) - 1:
            panel.set_xlabel("learning rate", fontsize=_TEXT, color=INK)
        if column == 0:
            short = _SPLIT_NAMES[split].partition(":")[0]
            panel.set_ylabel(f"{short}: final distance", fontsize=_TEXT, color=INK)
    _legend(panels[0], loc="upper left", ncols=1)
    meaning = f"{like.describe(lr=False)}; mean ± std over seeds"
    return _save(made, "Final distance of every method", meaning, folder / "map.png")


def _distances(panel: Axes, runs: Runs, split: int) -> None:
    title(
        panel,
        "Distance to the optimum",
        "of the averages: median and quartiles of the seeds; "
        "dots: through Flower, lines: transcription",
    )
    for method in METHODS:
        away = _distance(runs[method].averages[:, :, split])
        low, middle, high = np.quantile(away, (0.25, 0.5, 0.75), axis=1)
        panel.plot(middle, **_style(method))
        panel.fill_between(range(len(away)), low, high, color=_COLOURS[method], alpha=0.18, lw=0)
        through = np.median(_distance(runs[method].federated[:, :, split]), 1)
        panel.plot(through, ls="", marker="o", ms=5.5, mec="white", mew=0.7, color=_COLOURS[method])
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    panel.set_xlim(-0.01 * len(away), None)
    panel.set_xlabel("rounds", fontsize=_TEXT, color=INK)
    _legend(panel, loc="upper right", ncols=2)


def _contour(panel: Axes, runs: Runs, split: int) -> None:
    title(panel, "Path of the mean", f"mean of the workers every {PATH_EVERY} steps; one seed")
    panel.grid(visible=False)
    _levels(panel, (-1.6, 1.9), (-0.5, 2.6))
    for method in _BACK_TO_FRONT:
        x1, x2 = runs[method].means[:, :, split, 0].T
        panel.plot(x1, x2, color=_COLOURS[method], lw=0.9, alpha=0.8)
    panel.plot(*START, marker="s", ms=6, color=INK)
    panel.annotate("start", START, xytext=(-4, -16), textcoords="offset points", fontsize=_TEXT)
    panel.plot(*OPTIMUM, ms=13, mew=1.1, **_STAR)
    panel.set_xlabel("x₁", fontsize=_TEXT, color=INK)
    panel.set_ylabel("x₂", fontsize=_TEXT, color=INK)
    _end(panel.inset_axes((0.24, 0.52, 0.4, 0.46)), runs, split)


def _end(panel: Axes, runs: Runs, split: int) -> None:
    """Draw the averages of the last half of the rounds, about the optimum."""
    panel.set_facecolor("white")
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_color(GREY)
    _levels(panel, (1 - _NEAR / 2, 1 + _NEAR / 2), (1 - _NEAR, 1 + _NEAR))
    for method in ("favg_reset_opt", "local_adam", "desloc", "favg_keep_opt"):
        averages = runs[method].averages
        x1, x2 = averages[len(averages) // 2 :, :, split].swapaxes(0, 1)
        panel.plot(x1, x2, ls="", marker="o", ms=2.2, mew=0, color=_COLOURS[method], alpha=0.8)
    panel.plot(*OPTIMUM, ms=9, mew=1.1, **_STAR)
    caption = "averages of the second half"
    panel.text(0.03, 0.03, caption, transform=panel.transAxes, fontsize=7.5, color=GREY)


def _levels(panel: Axes, x1: tuple[float, float], x2: tuple[float, float]) -> None:
    """Draw f's level lines, and set the panel's limits."""
    grid = np.meshgrid(np.linspace(*x1, 300), np.linspace(*x2, 300))
    levels = np.geomspace(0.01, 3000, 12)
    panel.contour(*grid, value(*grid), levels=levels, colors="#C4C4C4", linewidths=0.7)
    panel.set(xlim=x1, ylim=x2)


def _distance(points: Reals) -> Reals:
    # (times, 2, seeds) -> (times, seeds)
    return distance(points.swapaxes(0, 1))


def _style(method: str) -> dict[str, Any]:
    return {"color": _COLOURS[method], "ls": _DASHES.get(method, "-"), "lw": 1.8}


def _legend(panel: Axes, **where: Any) -> None:
    handles = [Line2D([], [], **_style(name), label=m.name) for name, m in METHODS.items()]
    panel.legend(handles=handles, fontsize=_TEXT, frameon=False, labelcolor=INK, **where)


def _save(made: Figure, name: str, meaning: str, path: Path) -> Path:
    """Write a title above the panels, and save the figure."""
    made.suptitle(f"{name}\n{meaning}", x=0.015, ha="left", fontsize=12, color=INK)
    made.savefig(path, dpi=100, pil_kwargs={"optimize": True})
    return path
