"""The report shows the content of a run's files, also of an interrupted run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest
from command import accepted, desloc
from recorded import record
from report_page import CLOCKS, PNG, SHORT, Page, keys, made, page_of, skip_images, skip_pages
from tiny import summary, train

from flower_desloc.app.config.units import bytes_text, figures, loss_text
from flower_desloc.app.plan.wall_clock import REPORTED
from flower_desloc.app.runs.figures import draw_heldout, draw_norms
from flower_desloc.app.runs.report import find, load, write_report
from flower_desloc.app.runs.report.sections import sections
from flower_desloc.app.runs.report.tables import TIMES, tiles
from flower_desloc.app.runs.time_model import modelled


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A folder with a tiny run that has its page."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, *SHORT, *CLOCKS, "run.name=desloc", "run.seed=0")
    return folder


@pytest.fixture
def copy(real, tmp_path):
    """A run's folder to damage."""
    return Path(shutil.copytree(real / "desloc", tmp_path / "a-run"))


def change_lines(folder, change):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


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
    assert (real / "desloc" / "partition.png").is_file()
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
    (settings,) = (s for s in sections([run], REPORTED) if s.key == "settings")
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


def test_text_from_clients_is_escaped(copy, tmp_path, monkeypatch):
    skip_images(monkeypatch)
    event = {"kind": "refused", "client": "client-1", "what": "<script>alert(1)</script>"}
    change_lines(copy, lambda line: line.update(events=[event]))
    page = page_of(copy, tmp_path / "page.html")
    assert ["0 to 8", "client-1", "refused", "5", "<script>alert(1)</script>"] in page.rows
    assert "<script" not in (tmp_path / "page.html").read_text()


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


def test_data_parallelism_has_a_report(real, tmp_path, monkeypatch):
    skip_pages(monkeypatch)
    loaded = load(train(tmp_path, *SHORT, "run.steps=3", config="ddp"))
    assert {"held-out", "time", "bytes", "timeline", "losses", "norms"} <= set(keys(loaded))
    assert loaded.streams == ["gradients"]
    assert modelled(loaded, REPORTED).keys() == {"this run", "DDP"}
    own, formula = modelled(loaded, REPORTED).values()
    assert own.total == pytest.approx(formula.total)
    assert len(keys(loaded, load(real / "desloc"))) == 9


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


def test_numbers_that_are_not_finite_are_gaps(copy, tmp_path, monkeypatch):
    skip_images(monkeypatch)

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
        (
            {"config.yaml": "no_such_setting: 1"},
            ["."],
            "config.yaml: the configuration was written by another version of flower-desloc "
            "(no_such_setting: no such key); start a new run",
        ),
        ({"metrics.jsonl": "{}{}\n"}, ["."], "metrics.jsonl: not one JSON object a line"),
        ({"summary.json": "[]"}, ["."], "summary.json: not the summary of a run"),
        ({}, [".", "--bandwidth", 0], "error: --bandwidth=0: must be from 1e-12"),
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
