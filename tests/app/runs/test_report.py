"""The report shows the content of a run's files, also of an interrupted run."""

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from command import accepted, desloc
from matplotlib.figure import Figure
from matplotlib.text import Text
from recorded import PERIODS, SIZE, record
from tiny import TINY, summary, train

from flower_desloc.app.config.units import bytes_text, figures, loss_text
from flower_desloc.app.plan.wall_clock import Link, star_seconds
from flower_desloc.app.runs.figures import draw_heldout, draw_losses, draw_norms, draw_timeline
from flower_desloc.app.runs.figures.curves import Curve, aligned
from flower_desloc.app.runs.groups import Spread, grouped
from flower_desloc.app.runs.report import find, load, write_report
from flower_desloc.app.runs.report.sections import sections
from flower_desloc.app.runs.report.tables import (
    TIMES,
    attendance,
    comparison,
    event_counts,
    events,
    tiles,
)
from flower_desloc.app.runs.time_model import DEFAULT_LINK, modelled, seconds_per_step
from flower_desloc.flower.observer import Event

PNG = b"\x89PNG\r\n\x1a\n"
SHORT = [*TINY, "run.steps=8", "run.eval_every=4", "simulation.num_clients=2"]
CLOCKS = ["sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=8"]


class Page(HTMLParser):
    """The text, attributes and rows of tables of a page; fails if tags do not match."""

    def __init__(self, path):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, Any]] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)

    def having(self, tag, name):
        return [value for *where, value in self.attributes if where == [tag, name]]

    @property
    def sections(self):
        return self.having("section", "id")


def made(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """Tiny runs: two seeds of DES-LOC, of which the first has a page, and one of Local Adam."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, *SHORT, *CLOCKS, "run.name=desloc", "run.seed=0")
    with pytest.MonkeyPatch.context() as patch:
        skip_pages(patch)
        train(folder, *SHORT, *CLOCKS, "run.name=desloc", "run.seed=1")
        together = ["sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=2"]
        train(folder, *SHORT, *together, "run.name=local")
    return folder


def skip_pages(patch):
    """Skip the slowest step at the end of a run."""
    patch.setattr("flower_desloc.app.runs.report.write_page", lambda *_: None)


@pytest.fixture
def copy(real, tmp_path):
    """A run's folder to damage."""
    return Path(shutil.copytree(real / "desloc", tmp_path / "a-run"))


def page_of(path, output):
    return Page(write_report([path], output, pngs=False))


def change_lines(folder, change):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def keys(*runs):
    return [section.key for section in sections(runs, DEFAULT_LINK)]


# The page


def test_a_run_writes_its_report_as_a_self_contained_page(real):
    page = Page(real / "desloc" / "report.html")
    assert page.sections == [
        "held-out", "time", "bytes", "timeline", "losses", "fairness", "drift", "norms", "data",
        "settings", "provenance",
    ]  # fmt: skip
    assert page.having("a", "href") == [f"#{section}" for section in page.sections]
    assert not {"script", "link", "iframe"} & {tag for tag, *_ in page.attributes}
    assert all(value.startswith(("#", "data:"))
               for _, name, value in page.attributes if name in ("src", "href"))  # fmt: skip
    assert "url(" not in (real / "desloc" / "report.html").read_text(encoding="utf-8")
    images = page.having("img", "src")
    assert len(images) == len([alt for alt in page.having("img", "alt") if alt]) == 8


def test_the_page_has_the_numbers_of_the_runs_files(real):
    page, found = Page(real / "desloc" / "report.html"), summary(real / "desloc")
    central, sent = found["evaluation"]["central"], found["bytes"]["measured"]
    for told in (
        loss_text(central["loss"]["final"]),
        figures(central["perplexity"]["final"]),
        bytes_text(sent["up"]["total"]),
        f"{bytes_text(sent['down']['total'])} down",
        f"{figures(found['ratio']['local_adam'])} {TIMES}",
        f"{figures(found['ratio']['ddp'])} {TIMES}",
        "completed",
        found["weights_sha256"],
        found["versions"]["torch"],
    ):
        assert told in page.text, told
    assert found["versions"].keys() >= {"python", "torch", "flwr", "flower-desloc"}
    last = load(real / "desloc").lines[-1]["evaluation"]
    for where, name in (("central", "domain"), ("federated", "client")):
        losses = {n: metrics["loss"] for n, metrics in last[where]["parts"].items()}
        worst = max(losses, key=losses.__getitem__)
        assert f"the worst {name} is {worst} with {losses[worst]:.3f}" in " ".join(page.text)


def test_the_settings_of_a_custom_task_say_that_it_reads_its_own_data(real):
    run = load(real / "desloc")
    run.summary["config"]["task"] = "my:Task"
    (settings,) = (s for s in sections([run], DEFAULT_LINK) if s.key == "settings")
    assert "my:Task reads what it likes" in settings.caption


def test_the_parts_of_the_wall_clock_add_up_to_it(real):
    run = load(real / "desloc")
    parts = {"clients": 5.0, "averaging": 30.0, "evaluation": 16.0, "exchange": 87.0}
    run = replace(run, summary={**run.summary, "seconds": {"total": 138.0, **parts}})
    (tile,) = (tile for tile in tiles(run) if tile.name == "wall-clock")
    split = "clients 0:05, averaging 0:30, evaluation 0:16, exchange 1:27"
    assert (tile.value, tile.note) == ("2:18", split)


def test_the_same_run_gives_the_same_bytes(real, tmp_path):
    again = write_report([real / "desloc"], tmp_path / "again.html", pngs=False)
    assert again.read_bytes() == (real / "desloc" / "report.html").read_bytes()
    assert mpl.rcParams["svg.hashsalt"] is None  # the setting is restored


def test_text_from_clients_is_escaped(copy, tmp_path):
    event = {"kind": "refused", "client": "client-1", "what": "<script>alert(1)</script>"}
    change_lines(copy, lambda line: line.update(events=[event]))
    page = page_of(copy, tmp_path / "page.html")
    assert ["0 to 8", "client-1", "refused", "5", "<script>alert(1)</script>"] in page.rows
    assert "<script" not in (tmp_path / "page.html").read_text()


# Missing and damaged files


def test_the_summary_of_an_unfinished_run_is_computed_from_its_complete_lines(copy):
    whole = summary(copy)
    (copy / "summary.json").unlink()
    run = load(copy)
    assert run.status == "unfinished"
    for key in ("steps", "windows", "clients", "syncs", "evaluation", "stream_bytes", "ratio"):
        assert run.summary[key] == whole[key], key
    for key in ("measured", "local_adam"):
        assert run.summary["bytes"][key] == whole["bytes"][key]
    assert "data" not in keys(run)  # the partition was in the summary


def without_numbers_of_clients(line):
    for client in line["clients"].values():
        client |= {"losses": [], "grad_norms": [], "learning_rates": []}
        client |= {"update_norm": None, "param_norm": None}


@pytest.mark.parametrize(
    ("lose", "absent"),
    [
        (lambda line: line.update(evaluation={}), {"held-out", "fairness"}),
        (lambda line: line.update(drift={}), {"drift"}),
        (lambda line: line.update(bytes_up={}), set()),
        (without_numbers_of_clients, set()),
    ],
)
def test_a_section_without_data_is_absent(copy, lose, absent):
    everything = set(keys(load(copy)))
    change_lines(copy, lose)
    assert set(keys(load(copy))) == everything - absent


def test_numbers_that_are_not_finite_are_gaps(copy, tmp_path):
    def diverge(line):
        if line["step"] < 4:
            return
        for client in line["clients"].values():
            for name in ("losses", "grad_norms"):
                client[name] = [None for _ in client[name]]
            client["update_norm"] = client["param_norm"] = None
        line["drift"] = {s: dict.fromkeys(d) for s, d in line["drift"].items()}
        for evaluation in line.get("evaluation", {}).values():
            evaluation["overall"] = dict.fromkeys(evaluation["overall"])
            evaluation["parts"] = {p: dict.fromkeys(m) for p, m in evaluation["parts"].items()}

    change_lines(copy, diverge)
    (copy / "summary.json").unlink()
    page = page_of(copy, tmp_path / "page.html")
    assert {"held-out", "losses", "norms", "drift"} <= set(page.sections)
    assert load(copy).final("loss") is None
    assert "-" in page.text  # the held-out loss
    assert find([copy, copy.parent / "a-run"]) == [copy]  # the same folder twice is one run


def test_a_run_that_never_started_has_a_report(real, tmp_path):
    (tmp_path / "a-run").mkdir()
    shutil.copy(real / "desloc" / "config.yaml", tmp_path / "a-run")
    page = page_of(tmp_path / "a-run", tmp_path / "page.html")
    assert page.sections == ["settings", "provenance"]
    assert keys(load(tmp_path / "a-run"), load(real / "desloc"))[0] == "comparison"


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


def test_data_parallelism_has_a_report(real, tmp_path, monkeypatch):
    skip_pages(monkeypatch)
    loaded = load(train(tmp_path, *SHORT, "run.steps=3", config="ddp"))
    assert {"held-out", "time", "bytes", "timeline", "losses", "norms"} <= set(keys(loaded))
    assert loaded.streams == ["gradients"]
    assert modelled(loaded, DEFAULT_LINK).keys() == {"this run", "DDP"}
    own, formula = modelled(loaded, DEFAULT_LINK).values()
    assert own.total == pytest.approx(formula.total)
    assert len(keys(loaded, load(real / "desloc"))) == 9


def test_many_clients_are_drawn_as_bands(tmp_path):
    loaded = load(record(tmp_path, steps=96, clients=100, finish=False).path)
    panel = made(draw_losses([loaded])).axes[0]
    assert len(panel.lines) == 1  # their mean
    assert len(panel.collections) == 2  # the bands of 10 to 90 % and of all
    losses = [c["losses"][0] for c in loaded.windows[0]["clients"].values()]
    assert np.asarray(panel.lines[0].get_ydata())[0] == pytest.approx(np.mean(losses))
    assert len(made(draw_timeline(loaded)).axes[1].get_yticklabels()) < 20


def test_a_figure_alone_explains_its_lines_and_axes(real, tmp_path):
    run = load(real / "desloc")
    norms = made(draw_norms([run]))
    (legend,) = norms.legends
    assert [text.get_text() for text in legend.texts] == ["mean", *run.clients]
    drawn = norms.axes[1].lines  # update norms: the clients' and the mean
    colours = [line.get_color() for line in legend.get_lines()]
    assert [line.get_color() for line in drawn] == [*colours[1:], colours[0]]
    heldout = made(draw_heldout([run]))
    assert "dashed: on the clients' data" in heldout.axes[0].texts[0].get_text()
    assert heldout.axes[1].get_xlabel() == "bytes, logarithmic, without step 0"
    many = load(record(tmp_path, clients=13, finish=False).path)
    assert not made(draw_norms([many])).legends


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


# Participation and events


def test_joins_and_leaves_are_listed(tmp_path):
    absent = {"client-3": range(16, 33), "client-1": range(80, 97), "client-2": range(176, 193)}

    def change(window):
        out = {"client-0": "its [params] hold NaN"} if window.step == 48 else {}
        gone = {*out, *(name for name, steps in absent.items() if window.step in steps)}
        present = {name: c for name, c in window.clients.items() if name not in gone}
        return replace(window, clients=present, left_out=out)

    run = record(tmp_path, change=change, finish=False)
    assert attendance(load(run.path)).rows == [
        ["32", "client-3", "joined"],
        ["64", "client-1", "left"],
        ["96", "client-1", "came back"],
        ["160", "client-2", "left"],
    ]


def test_events_are_counted_by_client_and_kind(tmp_path):
    def change(window):
        told = []
        if window.step in (16, 48):
            told.append(Event(kind="late", client="client-10", what="no reply"))
        if window.step == 48:
            told.append(Event(kind="repeated", client="", what="1 usable reply"))
            told.append(Event(kind="state lost", client="client-9", what="all is sent"))
        return replace(window, events=told)

    loaded = load(record(tmp_path, change=change, finish=False).path)
    counts = event_counts(loaded)
    assert counts.head == ["client", "late", "state lost", "repeated"]
    assert counts.rows == [
        ["all", "0", "0", "1"],
        ["client-9", "0", "1", "0"],
        ["client-10", "2", "0", "0"],
    ]
    assert events(loaded).rows == [
        ["0 to 48", "client-10", "late", "2", "no reply"],
        ["32 to 48", "all", "repeated", "1", "1 usable reply"],
        ["32 to 48", "client-9", "state lost", "1", "all is sent"],
    ]
    assert "events" in keys(loaded)


# The model of time


def test_modelled_time_is_measured_compute_and_a_star_for_every_average(tmp_path):
    # 4 clients, each 3.1 s per window of 16 steps
    loaded = load(record(tmp_path, finish=False).path)
    assert seconds_per_step(loaded) == pytest.approx(3.1 / 16)
    link = Link(bandwidth=1e6, latency=0.25)
    methods = modelled(loaded, link)
    one, two, three = (star_seconds(n * SIZE, 4, link) for n in (1, 2, 3))
    # Params are averaged in each of 12 windows, exp_avg in every third, exp_avg_sq in every sixth.
    assert methods["this run"].communication == pytest.approx(8 * one + 2 * two + 2 * three)
    assert methods["Local Adam"].communication == pytest.approx(12 * three)
    assert methods["DDP"].communication == pytest.approx(192 * one)
    for time in methods.values():
        assert time.compute == pytest.approx(12 * 3.1)
        assert time.steps[-1] == 192
        assert time.seconds[-1] == pytest.approx(time.total)


def test_local_adam_and_ddp_wait_for_the_slowest_of_sites_of_unequal_speed(tmp_path):
    def slow(window):
        """Client 3 takes a quarter of the steps in the same time."""
        steps = window.step - window.start
        clients = {
            name: replace(client, seconds=2.0, steps=steps // 4 if name == "client-3" else steps)
            for name, client in window.clients.items()
        }
        return replace(window, clients=clients)

    run = record(tmp_path, change=slow, finish=False)
    methods = modelled(load(run.path), DEFAULT_LINK)
    assert methods["this run"].compute == pytest.approx(12 * 2)
    for name in ("Local Adam", "DDP"):
        assert methods[name].compute == pytest.approx(4 * 12 * 2)


# Several runs


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
    rows = comparison(groups, DEFAULT_LINK).rows
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
    status = {row[0]: row[2] for row in comparison(grouped(runs), DEFAULT_LINK).rows}
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


# The command


def test_the_command_writes_the_page_and_its_figures_as_png(copy):
    (copy / "report.html").unlink()
    said = accepted("report", copy, "--bandwidth", 10, "--latency", 200)
    assert said == f"report: {copy / 'report.html'}\n"
    page = Page(copy / "report.html")
    assert "10 Mbit/s and 200 ms" in " ".join(page.text)
    pictures = [*(copy / "report").iterdir()]
    assert {path.stem for path in pictures} == {*page.sections} - {"time", "settings", "provenance"}
    assert all(path.read_bytes().startswith(PNG) for path in pictures)


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({}, ["nowhere"], "no such folder"),
        ({}, ["."], "neither a run's folder (it has no config.yaml) nor a folder of runs"),
        ({"config.yaml": "- 1"}, ["."], "not a configuration: expected a mapping, got a list"),
        ({"config.yaml": "no_such_setting: 1"}, ["."], "no_such_setting"),
        ({"metrics.jsonl": "{}{}\n"}, ["."], "metrics.jsonl: not one JSON object a line"),
        ({"summary.json": "[]"}, ["."], "summary.json: not the summary of a run"),
        ({}, [".", "--bandwidth", 0], "error: --bandwidth=0: must be above 0"),
    ],
)
def test_what_cannot_be_reported_is_one_line_of_error(
    tmp_path, monkeypatch, files, arguments, said
):
    monkeypatch.chdir(tmp_path)
    for name, text in ({"config.yaml": "run: {}"} | files if files else {}).items():
        Path(name).write_text(text)
    result = desloc("report", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert said in line
