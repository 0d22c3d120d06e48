"""Figures of runs with any streams, windows and clients."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from recorded import PERIODS, record
from report_page import PNG, keys, made, skip_pages

from flower_desloc.app.runs.figures import draw_losses, draw_timeline
from flower_desloc.app.runs.report import load


@pytest.mark.parametrize(
    ("periods", "steps", "clients", "change"),
    [
        ({"params": 1}, 1, 1, {}),
        ({"params": 1}, 1, 4, {"central": None, "federated": None}),
        ({"params": 8, "momentum_buffer": "never"}, 20, 4, {}),
        ({"params": "never", "exp_avg": 5, "buffers": 5, "max_exp_avg_sq": 5}, 10, 2, {}),
    ],
)
def test_any_streams_and_any_number_of_windows_are_drawn(
    tmp_path, monkeypatch, periods, steps, clients, change
):
    skip_pages(monkeypatch)
    run = record(tmp_path, periods, steps, clients=clients, change=lambda w: replace(w, **change))
    assert run.picture.read_bytes().startswith(PNG)
    assert run.partition.read_bytes().startswith(PNG)
    loaded = load(run.path)
    drawn = {"bytes", "timeline", "losses", "norms", "data"}
    assert drawn | (set() if change else {"held-out"}) <= set(keys(loaded))
    assert loaded.streams == list(periods)


def test_many_clients_are_drawn_as_bands(tmp_path):
    loaded = load(record(tmp_path, steps=96, clients=100, finish=False).path)
    panel = made(draw_losses([loaded])).axes[0]
    assert len(panel.lines) == 1  # their mean
    assert len(panel.collections) == 2  # the bands of 10 to 90 % and of all
    losses = [c["losses"][0] for c in loaded.windows[0]["clients"].values()]
    assert np.asarray(panel.lines[0].get_ydata())[0] == pytest.approx(np.mean(losses))
    assert len(made(draw_timeline(loaded)).axes[1].get_yticklabels()) < 20


def test_the_legend_of_four_streams_fits_into_the_overview(tmp_path, monkeypatch):
    skip_pages(monkeypatch)
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda made, *_, **__: saved.append(made))
    record(tmp_path, {**PERIODS, "max_exp_avg_sq": 96}, clients=1)
    made = saved[-1]
    made.draw_without_rendering()
    panel = made.axes[1]
    legend = panel.get_legend().get_window_extent()
    texts = panel.findobj(lambda each: isinstance(each, Text) and each.get_text() == "Bytes sent")
    assert legend.x1 < made.bbox.x1
    assert legend.y1 < texts[0].get_window_extent().y0
