"""The report compares several runs: seeds are one row and one band."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import PERIODS, record
from report_page import CLOCKS, SHORT, keys, made, page_of
from tiny import summary, train

from flower_desloc.app.config.units import bytes_text, figures
from flower_desloc.app.plan.wall_clock import REPORTED
from flower_desloc.app.runs.figures import draw_heldout
from flower_desloc.app.runs.figures.curves import Curve, aligned
from flower_desloc.app.runs.groups import Spread, grouped
from flower_desloc.app.runs.report import find, load
from flower_desloc.app.runs.report.tables import TIMES, comparison


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Tiny runs: two seeds of DES-LOC and one of Local Adam."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train(folder, *SHORT, *CLOCKS, "run.name=desloc", f"run.seed={seed}")
    together = ["sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=2"]
    train(folder, *SHORT, *together, "run.name=local")
    return folder


def test_seeds_are_one_row_with_mean_and_sample_standard_deviation(real):
    groups = grouped([load(path) for path in find([real])])
    assert [(g.label, len(g.runs)) for g in groups] == [("desloc", 2), ("local", 1)]
    expected = {}
    for name, folders in {"desloc": ["desloc", "desloc-2"], "local": ["local"]}.items():
        summaries = [summary(real / folder) for folder in folders]
        row = []
        for metric, digits in (("loss", 3), ("perplexity", 2)):
            values = [s["evaluation"]["central"][metric]["final"] for s in summaries]
            assert len(set(values)) == len(folders)
            row.append(f"{np.mean(values):.{digits}f}")
            if len(values) > 1:
                row[-1] += f" ± {np.std(values, ddof=1):.{digits}f}"
        row.append(bytes_text(summaries[0]["bytes"]["measured"]["up"]["total"]))
        row.append(f"{figures(summaries[0]['ratio']['local_adam'])} {TIMES}")
        expected[name] = row
    rows = comparison(groups, REPORTED).rows
    assert {name: cells[2:6] for name, *cells in rows} == expected
    finals: dict[str, Any] = {group.label: group.final("loss").mean for group in groups}
    assert [name for name, *_ in rows] == sorted(finals, key=finals.__getitem__)


def test_the_band_over_seeds_is_one_sample_standard_deviation(real):
    runs = [real / "desloc", real / "desloc-2"]
    loss_by_step = made(draw_heldout([load(path) for path in find([real])])).axes[3]
    finals = [summary(run)["evaluation"]["central"]["loss"]["final"] for run in runs]
    assert np.asarray(loss_by_step.lines[0].get_xydata())[-1] == pytest.approx((8, np.mean(finals)))
    corners = np.asarray(loss_by_step.collections[0].get_paths()[0].vertices)
    last = corners[corners[:, 0] == 8][:, 1]
    assert last.max() - last.min() == pytest.approx(2 * np.std(finals, ddof=1))


def test_a_comparison_lists_the_settings_that_differ(real, tmp_path):
    page = page_of(real, tmp_path / "page.html")
    assert page.sections == [
        "comparison", "held-out", "bytes", "losses", "fairness", "drift", "norms", "settings",
        "provenance",
    ]  # fmt: skip
    start = page.rows.index(["setting", "desloc", "local"])
    assert page.rows[start + 1 : start + 3] == [
        ["sync.exp_avg", "4", "2"],
        ["sync.exp_avg_sq", "8", "2"],
    ]
    assert {row[0] for row in page.rows[-3:]} == {str(path) for path in find([real])}


def test_a_failed_run_does_not_count_among_completed_ones(real, tmp_path):
    folder = Path(shutil.copytree(real, tmp_path / "runs"))
    failed = {**summary(folder / "desloc-2"), "status": "failed", "error": "cut off"}
    (folder / "desloc-2" / "summary.json").write_text(json.dumps(failed))
    runs = [load(path) for path in find([folder])]
    assert grouped(runs)[0].final("loss") == Spread.of([load(folder / "desloc").final("loss")])
    status = {row[0]: row[2] for row in comparison(grouped(runs), REPORTED).rows}
    assert status == {"desloc": "1 completed, 1 failed", "local": "completed"}
    assert "events" in keys(*runs)


def test_runs_with_the_same_name_are_labelled_by_the_settings_that_differ(tmp_path):
    for period in (8, 16):
        record(tmp_path, {**PERIODS, "params": period}, 48, finish=False)
    groups = grouped([load(path) for path in find([tmp_path])])
    assert [g.label for g in groups] == ["desloc sync.params=8", "desloc sync.params=16"]
    assert len({group.colour for group in groups}) == 2


def test_seeds_evaluated_after_different_steps_are_interpolated():
    """With probabilistic windows the seeds have different steps, so a mean per step would jump."""
    line = Curve(np.array([2.0, 6.0]), np.array([4.0, 8.0]))
    other = Curve(np.array([1.0, 3.0, 5.0]), np.array([10.0, 30.0, 50.0]))
    table = aligned([line, other], interpolate=True)
    np.testing.assert_array_equal(table.index, [2, 3, 5])
    np.testing.assert_allclose(table, [[4, 20], [5, 30], [7, 50]])
    np.testing.assert_array_equal(aligned([line], interpolate=True)[0], line.y)
    assert aligned([], interpolate=True).empty
