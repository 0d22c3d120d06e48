"""The report shows the content of a run's files, also of an interrupted run."""

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from test_outputs import PERIODS, record
from tiny import summary, train
from typer.testing import CliRunner

from flower_desloc.cli import app
from flower_desloc.config.units import bytes_text, figures, loss_text
from flower_desloc.flower.observer import Event, WindowRecord
from flower_desloc.plan.evidence import measured
from flower_desloc.plan.wall_clock import Link, star_seconds
from flower_desloc.runs.figures import draw_heldout, draw_losses, draw_timeline
from flower_desloc.runs.figures.curves import Curve, aligned
from flower_desloc.runs.groups import Spread
from flower_desloc.runs.report import NoRunError, RunRecord, find, grouped, load, write_report
from flower_desloc.runs.report.sections import sections
from flower_desloc.runs.report.tables import (
    TIMES,
    attendance,
    comparison,
    event_counts,
    events,
    tiles,
)
from flower_desloc.runs.time_model import DEFAULT_LINK, modelled, seconds_per_step

VOID = {"meta", "img", "br", "link"}
TINY = (
    "run.steps=8 run.eval_every=4 model.hidden_size=8 model.intermediate_size=8 "
    "model.num_hidden_layers=1 model.num_attention_heads=1 data.max_bytes=60000 data.seq_len=16 "
    "data.batch_size=2 evaluation.sequences=2 federation.num_clients=2 "
    "sync.params=2 sync.exp_avg=4 sync.exp_avg_sq=8"
)


class Page(HTMLParser):
    """A parsed page; fails if tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data.strip())
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def having(self, name: str, tag: str = "") -> list[str]:
        return [value for t, n, value in self.attributes if n == name and tag in ("", t)]

    @property
    def sections(self) -> list[str]:
        return self.having("id", "section")

    @property
    def images(self) -> list[bytes]:
        start = "data:image/svg+xml;base64,"
        sources = self.having("src", "img")
        assert all(source.startswith(start) for source in sources)
        return [base64.b64decode(source.removeprefix(start)) for source in sources]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny runs: two seeds of DES-LOC, one of Local Adam."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, f"{TINY} run.name=desloc run.seed=0")
    with pytest.MonkeyPatch.context() as patch:
        skip_pages(patch)
        train(folder, f"{TINY} run.name=desloc run.seed=1")
        train(folder, f"{TINY} run.name=local sync.exp_avg=2 sync.exp_avg_sq=2")
    return folder


def skip_pages(patch: pytest.MonkeyPatch) -> None:
    """Skip the slow steps at the end of a run."""
    patch.setattr("flower_desloc.runs.report.write_page", lambda *_: None)
    patch.setattr("flower_desloc.runs.figures.overview.draw", lambda *_: None)


@pytest.fixture
def copy(real: Path, tmp_path: Path) -> Path:
    """A run's folder to damage."""
    return Path(shutil.copytree(real / "desloc", tmp_path / "a-run"))


def page_of(*paths: Path, output: Path) -> Page:
    return Page(write_report(paths, output, pngs=False).read_text(encoding="utf-8"))


def change_lines(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def keys(runs: list[RunRecord]) -> list[str]:
    return [section.key for section in sections(runs, DEFAULT_LINK)]


# The page


def test_a_run_writes_its_report_as_a_self_contained_page(real: Path) -> None:
    page = Page((real / "desloc" / "report.html").read_text(encoding="utf-8"))
    assert page.sections == [
        "held-out", "time", "bytes", "timeline", "losses", "fairness", "drift", "norms", "data",
        "settings", "provenance",
    ]  # fmt: skip
    assert page.having("href", "a") == [f"#{section}" for section in page.sections]
    ids = page.having("id")
    assert len(set(ids)) == len(ids)
    assert not {"script", "link", "iframe"} & {tag for tag, _, _ in page.attributes}
    assert not [v for _, n, v in page.attributes if n in ("src", "href") and ":" in v[:12]
                and not v.startswith("data:")]  # fmt: skip
    assert "url(" not in (real / "desloc" / "report.html").read_text(encoding="utf-8")
    assert len(page.images) == 8
    for image in page.images:
        for element in ElementTree.fromstring(image).iter():
            for name, value in element.attrib.items():
                if name.endswith("href"):
                    assert value.startswith(("#", "data:"))
    assert all(page.having("alt", "img"))


def test_the_headline_has_the_numbers_of_the_summary(real: Path) -> None:
    page = Page((real / "desloc" / "report.html").read_text(encoding="utf-8"))
    found = summary(real / "desloc")
    central, measured = found["evaluation"]["central"], found["bytes"]["measured"]
    for told in (
        loss_text(central["loss"]["final"]),
        figures(central["perplexity"]["final"]),
        bytes_text(measured["up"]["total"]),
        f"{bytes_text(measured['down']['total'])} down",
        f"{figures(found['ratio']['local_adam'])} {TIMES}",
        f"{figures(found['ratio']['ddp'])} {TIMES}",
        "completed",
    ):
        assert told in page.text, told
    cells = [cell for table in page.tables for row in table for cell in row]
    assert found["weights_sha256"] in cells
    assert found["versions"]["torch"] in cells
    assert found["versions"].keys() >= {"python", "torch", "flwr", "flower-desloc"}


@pytest.mark.parametrize("is_safe", [True, False])
@pytest.mark.parametrize("case", ["near", "far", "noisy"])
def test_the_headline_says_what_rare_averages_cost_near_the_run(
    real: Path, is_safe: bool, case: str
) -> None:
    gap = next(g for g in measured() if g.is_safe == is_safe and not g.formats and not g.bound)
    run = load(real / "desloc")
    run.summary["stream_bytes"]["params"] = 4 * gap.params * (1000 if case == "far" else 1)
    run.summary["noise_scale"] = 100.0 if case == "noisy" else 1.0
    run.summary["config"]["optimizer"] = gap.optimizer
    periods = dict(zip(("params", "exp_avg", "exp_avg_sq"), gap.periods, strict=True))
    run.summary["config"]["periods"] = periods
    run.config["data"] |= {"batch_size": 1, "seq_len": gap.tokens, "partition": gap.partition}
    (tile,) = (tile for tile in tiles(run) if tile.name == "rare averages")
    verdict = "safe" if is_safe else f"up to {gap.high:+.1f}%"
    assert tile.value == (verdict if case == "near" else "unknown")
    assert case == "far" or f"{gap.params:,} parameters" in tile.note


def test_the_worst_domain_and_the_worst_client_are_named(real: Path) -> None:
    last = json.loads((real / "desloc" / "metrics.jsonl").read_text().splitlines()[-1])
    text = " ".join(Page((real / "desloc" / "report.html").read_text()).text)
    for where, name in (("central", "domain"), ("federated", "client")):
        losses = {n: m["loss"] for n, m in last["evaluation"][where]["parts"].items()}
        worst = max(losses, key=losses.__getitem__)
        assert f"the worst {name} is {worst} with {losses[worst]:.3f}" in text


def test_the_same_run_gives_the_same_bytes(real: Path, tmp_path: Path) -> None:
    again = write_report([real / "desloc"], tmp_path / "again.html", pngs=False)
    assert again.read_bytes() == (real / "desloc" / "report.html").read_bytes()
    assert mpl.rcParams["svg.hashsalt"] is None  # the setting is restored


def test_text_from_clients_is_escaped(copy: Path, tmp_path: Path) -> None:
    event = {"kind": "refused", "client": "client-1", "what": "<script>alert(1)</script>"}
    change_lines(copy, lambda line: line.update(events=[event]))
    text = page_of(copy, output=tmp_path / "page.html")
    row = ["0 to 8", "client-1", "refused", "5", "<script>alert(1)</script>"]
    assert row in text.tables[2]
    assert "<script" not in (tmp_path / "page.html").read_text()


# Missing and damaged files


def test_the_summary_of_an_unfinished_run_is_computed_from_its_complete_lines(copy: Path) -> None:
    whole = summary(copy)
    (copy / "summary.json").unlink()
    run = load(copy)
    assert run.status == "unfinished"
    for key in ("steps", "windows", "clients", "syncs", "evaluation", "stream_bytes", "ratio"):
        assert run.summary[key] == whole[key], key
    assert run.summary["bytes"]["measured"] == whole["bytes"]["measured"]
    assert run.summary["bytes"]["local_adam"] == whole["bytes"]["local_adam"]
    assert "data" not in keys([run])  # the partition was in the summary


@pytest.mark.parametrize(
    ("lost", "absent"),
    [
        (lambda line: line.pop("evaluation", None), {"held-out", "fairness"}),
        (lambda line: line.update(drift={}), {"drift"}),
        (lambda line: line.update(bytes_up={}), set()),
        (
            lambda line: [
                client.update(losses=[], grad_norms=[], learning_rates=[], update_norm=None,
                              param_norm=None)
                for client in line["clients"].values()
            ],
            set(),
        ),
    ],
)  # fmt: skip
def test_a_section_without_data_is_absent(
    copy: Path, lost: Callable[[dict[str, Any]], Any], absent: set[str]
) -> None:
    everything = set(keys([load(copy)]))
    change_lines(copy, lost)
    assert set(keys([load(copy)])) == everything - absent


def test_numbers_that_are_not_finite_are_gaps(copy: Path, tmp_path: Path) -> None:
    def diverge(line: dict[str, Any]) -> None:
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
    page = page_of(copy, output=tmp_path / "page.html")
    assert {"held-out", "losses", "norms", "drift"} <= set(page.sections)
    assert load(copy).final("loss") is None
    assert "-" in page.text  # the held-out loss
    assert find([copy, copy.parent / "a-run"]) == [copy]  # the same folder twice is one run


def test_a_run_that_never_started_has_a_report(real: Path, tmp_path: Path) -> None:
    (tmp_path / "a-run").mkdir()
    shutil.copy(real / "desloc" / "config.yaml", tmp_path / "a-run")
    page = page_of(tmp_path / "a-run", output=tmp_path / "page.html")
    assert page.sections == ["settings", "provenance"]
    assert keys([load(tmp_path / "a-run"), load(real / "desloc")])[0] == "comparison"


@pytest.mark.parametrize(
    ("periods", "steps", "clients"),
    [
        ({"params": 1}, 1, 1),
        ({"params": 8, "momentum_buffer": "never"}, 20, 4),
        ({"params": "never", "exp_avg": 5, "buffers": 5, "max_exp_avg_sq": 5}, 10, 2),
    ],
)
def test_any_streams_and_any_number_of_windows_are_drawn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    periods: dict[str, Any],
    steps: int,
    clients: int,
) -> None:
    skip_pages(monkeypatch)
    _, run = record(tmp_path, periods, steps, clients=clients)
    loaded = load(run.path)
    assert {"held-out", "bytes", "timeline", "losses", "norms", "data"} <= set(keys([loaded]))
    assert loaded.streams == list(periods)


def test_data_parallelism_has_a_report(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_pages(monkeypatch)
    words = " ".join(word for word in TINY.split() if not word.startswith("sync."))
    train(tmp_path, f"{words} run.steps=3", config="ddp")
    loaded = load(tmp_path / "ddp")
    there = set(keys([loaded]))
    assert {"held-out", "time", "bytes", "timeline", "losses", "norms"} <= there
    assert loaded.streams == ["gradients"]
    assert modelled(loaded, DEFAULT_LINK).keys() == {"this run", "DDP"}
    own, formula = modelled(loaded, DEFAULT_LINK).values()
    assert own.total == pytest.approx(formula.total)
    assert len(keys([loaded, load(real / "desloc")])) == 9


def test_many_clients_are_drawn_as_bands(tmp_path: Path) -> None:
    _, run = record(tmp_path, steps=96, clients=100, finish=False)
    loaded = load(run.path)
    training = draw_losses([loaded])
    assert training is not None
    panel = training.axes[0]
    assert len(panel.lines) == 1  # their mean
    assert len(panel.collections) == 2  # the bands of 10 to 90 % and of all
    losses = [c["losses"][0] for c in loaded.windows[0]["clients"].values()]
    assert panel.lines[0].get_ydata()[0] == pytest.approx(np.mean(losses))
    timeline = draw_timeline(loaded)
    assert timeline is not None
    assert len(timeline.axes[1].get_yticklabels()) < 20


# Participation and events


def test_joins_and_leaves_are_listed(tmp_path: Path) -> None:
    def change(window: WindowRecord) -> WindowRecord:
        clients = dict(window.clients)
        if 0 < window.step <= 32:
            clients.pop("client-3")
        if 64 < window.step <= 96:
            clients.pop("client-1")
        if window.step > 160:
            clients.pop("client-2")
        out = {}
        if window.step == 48:
            clients.pop("client-0")
            out = {"client-0": "its [params] hold NaN"}
        return replace(window, clients=clients, left_out=out)

    _, run = record(tmp_path, change=change, finish=False)
    loaded = load(run.path)
    there = attendance(loaded)
    assert there.rows == [
        ["32", "client-3", "joined"],
        ["64", "client-1", "left"],
        ["96", "client-1", "came back"],
        ["160", "client-2", "left"],
    ]


def happened(path: Path) -> RunRecord:
    def change(window: WindowRecord) -> WindowRecord:
        told = []
        if window.step in (16, 48):
            told.append(Event(kind="late", client="client-10", what="no reply"))
        if window.step == 48:
            told.append(Event(kind="repeated", client="", what="1 usable reply"))
            told.append(Event(kind="state lost", client="client-9", what="all is sent"))
        return replace(window, events=told, left_out={"client-10": "no reply"} if told else {})

    _, run = record(path, change=change, finish=False)
    return load(run.path)


def test_events_are_counted_by_client_and_kind(tmp_path: Path) -> None:
    loaded = happened(tmp_path)
    counts, told = event_counts(loaded), events(loaded)
    assert counts.head == ["client", "late", "state lost", "repeated"]
    assert counts.rows == [
        ["all", "0", "0", "1"],
        ["client-9", "0", "1", "0"],
        ["client-10", "2", "0", "0"],
    ]
    assert told.rows == [
        ["0 to 48", "client-10", "late", "2", "no reply"],
        ["32 to 48", "all", "repeated", "1", "1 usable reply"],
        ["32 to 48", "client-9", "state lost", "1", "all is sent"],
    ]
    assert "events" in keys([loaded])


# The model of time


def test_modelled_time_is_measured_compute_and_a_star_for_every_average(tmp_path: Path) -> None:
    _, run = record(tmp_path, finish=False)  # 4 clients, each 3.1 s per window of 16 steps
    loaded = load(run.path)
    assert seconds_per_step(loaded) == pytest.approx(3.1 / 16)
    link = Link(bandwidth=1e6, latency=0.25)
    methods = modelled(loaded, link)
    size = 275_200
    one, two, three = (star_seconds(n * size, 4, link) for n in (1, 2, 3))
    # Params are averaged in each of 12 windows, exp_avg in every third, exp_avg_sq in every sixth.
    assert methods["this run"].communication == pytest.approx(8 * one + 2 * two + 2 * three)
    assert methods["Local Adam"].communication == pytest.approx(12 * three)
    assert methods["DDP"].communication == pytest.approx(192 * one)
    for time in methods.values():
        assert time.compute == pytest.approx(12 * 3.1)
        assert (time.steps[-1], time.seconds[-1]) == (192, pytest.approx(time.total))


def test_local_adam_and_ddp_wait_for_the_slowest_of_sites_of_unequal_speed(tmp_path: Path) -> None:
    def slow(window: WindowRecord) -> WindowRecord:
        """Client 3 takes a quarter of the steps in the same time."""
        steps = window.step - window.start
        clients = {
            name: replace(client, seconds=2.0, steps=steps // 4 if name == "client-3" else steps)
            for name, client in window.clients.items()
        }
        return replace(window, clients=clients)

    _, run = record(tmp_path, change=slow, finish=False)
    methods = modelled(load(run.path), DEFAULT_LINK)
    assert methods["this run"].compute == pytest.approx(12 * 2)
    for name in ("Local Adam", "DDP"):
        assert methods[name].compute == pytest.approx(4 * 12 * 2)


# Several runs


def test_seeds_are_one_row_with_mean_and_sample_standard_deviation(real: Path) -> None:
    runs = [load(path) for path in find([real])]
    groups = grouped(runs)
    assert [(g.label, len(g.runs)) for g in groups] == [("desloc", 2), ("local", 1)]
    table = comparison(groups, DEFAULT_LINK)
    rows = {row[0]: row for row in table.rows}
    means = {}
    for name, folders in {
        "desloc": [real / "desloc", real / "desloc-2"],
        "local": [real / "local"],
    }.items():
        summaries = [summary(folder) for folder in folders]
        for metric, column, digits in (("loss", 3, 3), ("perplexity", 4, 2)):
            values = [s["evaluation"]["central"][metric]["final"] for s in summaries]
            assert len(set(values)) == len(folders)
            told = f"{np.mean(values):.{digits}f}"
            if len(values) > 1:
                told += f" ± {np.std(values, ddof=1):.{digits}f}"
            assert rows[name][column] == told
        means[name] = np.mean([s["evaluation"]["central"]["loss"]["final"] for s in summaries])
        assert rows[name][5] == bytes_text(summaries[0]["bytes"]["measured"]["up"]["total"])
        assert rows[name][6] == f"{figures(summaries[0]['ratio']['local_adam'])} {TIMES}"
    assert [row[0] for row in table.rows] == sorted(means, key=means.__getitem__)


def test_the_band_over_seeds_is_one_sample_standard_deviation(real: Path) -> None:
    figure = draw_heldout([load(path) for path in find([real])])
    assert figure is not None
    finals = [
        summary(real / name)["evaluation"]["central"]["loss"]["final"]
        for name in ("desloc", "desloc-2")
    ]
    loss_by_step = figure.axes[3]
    assert loss_by_step.lines[0].get_xydata()[-1] == pytest.approx((8, np.mean(finals)))
    corners = loss_by_step.collections[0].get_paths()[0].vertices
    last = corners[corners[:, 0] == 8][:, 1]
    assert last.max() - last.min() == pytest.approx(2 * np.std(finals, ddof=1))


def test_a_comparison_lists_the_settings_that_differ(real: Path, tmp_path: Path) -> None:
    page = page_of(real, output=tmp_path / "page.html")
    assert page.sections == [
        "comparison", "held-out", "bytes", "losses", "fairness", "drift", "norms", "settings",
        "provenance",
    ]  # fmt: skip
    differ = next(table for table in page.tables if table[0][0] == "setting")
    assert differ == [
        ["setting", "desloc", "local"],
        ["sync.exp_avg", "4", "2"],
        ["sync.exp_avg_sq", "8", "2"],
    ]
    assert len(page.tables[-1]) == 1 + 3  # the folders


def test_a_failed_run_does_not_count_among_completed_ones(real: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(real, folder)
    found = summary(folder / "desloc-2")
    (folder / "desloc-2" / "summary.json").write_text(
        json.dumps({**found, "status": "failed", "error": "cut off"})
    )
    runs = [load(path) for path in find([folder])]
    group = grouped(runs)[0]
    finals = [run.final("loss") for run in group.runs if run.path.name != "desloc-2"]
    assert group.final("loss") == Spread.of(finals)
    status = {row[0]: row[2] for row in comparison(grouped(runs), DEFAULT_LINK).rows}
    assert status == {"desloc": "1 completed, 1 failed", "local": "completed"}
    assert "events" in keys(runs)


def test_runs_with_the_same_name_are_labelled_by_the_settings_that_differ(tmp_path: Path) -> None:
    for period in (8, 16):
        record(tmp_path, {**PERIODS, "params": period}, 48, finish=False)
    runs = [load(path) for path in find([tmp_path])]
    assert [group.label for group in grouped(runs)] == [
        "desloc sync.params=8", "desloc sync.params=16",
    ]  # fmt: skip
    assert len({group.colour for group in grouped(runs)}) == 2


# The command


def desloc(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)


def test_the_command_writes_the_page_and_its_figures_as_png(copy: Path) -> None:
    (copy / "report.html").unlink()
    result = desloc(copy, "--bandwidth", 10, "--latency", 200)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"report: {copy / 'report.html'}\n"
    page = Page((copy / "report.html").read_text())
    assert "10 Mbit/s and 200 ms" in " ".join(page.text)
    figures_there = {path.stem for path in (copy / "report").iterdir()}
    assert figures_there == set(page.sections) - {"time", "settings", "provenance"}
    for path in (copy / "report").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.fixture
def no_runs(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "folder").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.yaml").write_text("- 1\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("no_such_setting: 1\n")
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "config.yaml").write_text("run: {}\n")
    (tmp_path / "metrics" / "metrics.jsonl").write_text("{}{}\n")
    (tmp_path / "summary").mkdir()
    (tmp_path / "summary" / "config.yaml").write_text("run: {}\n")
    (tmp_path / "summary" / "summary.json").write_text("[]")
    return tmp_path  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "no such folder"),
        ("folder", r"neither a run's folder \(it has no config.yaml\) nor a folder of runs"),
        ("list", "not a configuration: expected a mapping, got a list"),
        ("old", "no_such_setting"),
        ("metrics", "metrics.jsonl: not one JSON object a line"),
        ("summary", "summary.json: not the summary of a run"),
    ],
)
def test_a_path_without_a_readable_run_is_one_line_of_error(
    no_runs: Path, name: str, said: str
) -> None:
    with pytest.raises(NoRunError, match=said):
        [load(path) for path in find([no_runs / name])]
    result = desloc(no_runs / name)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert re.search(said, result.stderr)
    assert len(result.stderr.splitlines()) == 1


def test_a_link_without_bandwidth_is_refused(copy: Path) -> None:
    result = desloc(copy, "--bandwidth", 0)
    assert result.exit_code == 2, result.output
    assert result.stderr == "error: --bandwidth=0: must be above 0\n"


def test_seeds_evaluated_after_different_steps_are_interpolated():
    """With probabilistic windows the seeds have different steps, so a mean per step would jump."""
    line = Curve(np.array([2.0, 6.0]), np.array([4.0, 8.0]))
    other = Curve(np.array([1.0, 3.0, 5.0]), np.array([10.0, 30.0, 50.0]))
    table = aligned([line, other], interpolate=True)
    np.testing.assert_array_equal(table.index, [2, 3, 5])
    np.testing.assert_allclose(table, [[4, 20], [5, 30], [7, 50]])
    np.testing.assert_array_equal(aligned([line], interpolate=True)[0], line.y)
    assert aligned([], interpolate=True).empty
