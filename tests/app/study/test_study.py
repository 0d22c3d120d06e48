"""Studies: the grid, the search, the results, and that finished runs are not repeated."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from command import accepted
from hypothesis import given
from hypothesis import strategies as st
from light_task import WITH_LIGHT
from processes import DEFAULT_SIGNALS, processes_with, wait_until
from recorded import a_run_info, windows_of
from scripts import ROOT
from tiny import TINY

from flower_desloc.app.config import Config, ConfigError, dump
from flower_desloc.app.config.units import bytes_text
from flower_desloc.app.runs import RunFolder
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.runs.recorder import to_line
from flower_desloc.app.runs.summary import build
from flower_desloc.app.study.cells import counts, study_state
from flower_desloc.app.study.figures import draw
from flower_desloc.app.study.grid import code_once, config_digest, files_once, with_run
from flower_desloc.app.study.results import _objects, latex, markdown, table, write
from flower_desloc.app.study.run_study import run_study
from flower_desloc.app.study.search import best, is_bracketed, untried
from flower_desloc.app.study.store import OUTCOME, Store
from flower_desloc.app.study.study_file import read_study, with_view
from flower_desloc.app.study.workers import WorkerPool, run_to_end
from flower_desloc.flower.fingerprint import fingerprint
from flower_desloc.flower.observer import EvaluationRecord

PARTITIONED = "{iid: [data.partition=iid], skewed: [data.partition=dirichlet]}"
STUDIES = sorted(path for path in ROOT.rglob("*.yaml") if path.parent.name == "studies")
OF_USERS = [path for path in STUDIES if path.parents[1] == ROOT]
[MINIATURE] = (path for path in STUDIES if path.stem == "miniature")
SHORT = [*TINY, "run.steps=8", "run.eval_every=4"]
LONG = [
    *(*TINY, "run.steps=80", "run.eval_every=0", "sync.params=1", "data.partition=iid"),
    *("simulation.num_clients=2", "evaluation.federated=false"),
]
"""Enough windows to be interrupted during a run."""
LIGHT = [*LONG, "task=light_task:Light", "task_options.seconds=0.02"]


def results(made, store):
    return list(study_state(made, store).values())


def study(tmp_path, text, overrides=()):
    """Return the study of a file with this text, and its store."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return read_study(path, overrides), Store(tmp_path, "mine")


def search(score, start=0, most=9):
    """Return the scores of the positions that a search tries, in their order."""
    scores: dict[int, float] = {}
    while positions := untried(scores, start, most):
        for position in positions:
            assert position not in scores, "tried twice"
            scores[position] = score(position)
    return scores


# --- The file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("task_options.base", "data/base"),
        ("task_options.base", "./data/base"),
        ("data.source", "data/base"),
        ("run.init_from", "data/base"),
    ],
)
def test_a_relative_path_is_that_of_the_folder_where_the_study_was_called(
    tmp_path, monkeypatch, setting, value
):
    (tmp_path / "data" / "base").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "task_of_a_path.py").write_text("Task = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = f"base: {{task: 'task_of_a_path:Task', {setting}: {value}}}\naxes: {{a: {{b: []}}}}\n"
    made, _ = study(tmp_path, text)
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = made.cells[0].run(0).config
    section, _, key = setting.partition(".")
    found = (
        config.task_options[key]
        if section == "task_options"
        else vars(getattr(config, section))[key]
    )
    assert found == str(tmp_path / "data" / "base")


def test_a_path_of_a_study_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"in the cell 'b': data.source=./nowhere: there is no"):
        study(tmp_path, "base: {data.source: ./nowhere}\naxes: {a: {b: []}}\n")


# --- The search --------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.floats(0, 10), st.just(math.inf)), min_size=40, max_size=40),
    st.integers(-15, 15),
    st.integers(3, 12),
)
def test_a_search_brackets_the_best_value_or_uses_up_its_bound(course, start, most):
    scores = search(lambda position: course[position + 20], start, min(most, 4))
    assert {start - 1, start, start + 1} <= scores.keys()
    assert sorted(scores) == list(range(min(scores), max(scores) + 1))
    assert is_bracketed(scores) or len(scores) == min(most, 4)


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-20, 20))
def test_a_search_finds_the_minimum_of_a_valley_from_either_side(optimum, start, edge):
    def valley(position):
        return math.inf if position > max(edge, optimum) else abs(position - optimum)

    scores = search(valley, start, most=100)
    if math.isfinite(valley(start)) or start > optimum:
        assert best(scores) == optimum
        assert is_bracketed(scores)


def test_where_everything_diverges_the_search_goes_down_and_ends():
    scores = search(lambda position: math.inf, most=6)
    assert sorted(scores) == [-4, -3, -2, -1, 0, 1]
    assert best(scores) is None
    assert not is_bracketed(scores)


# --- The file ----------------------------------------------------------------------------------


def test_the_grid_is_the_product_of_the_axes(tmp_path):
    text = """
base: {run: {steps: 24}, optimizer: {lr: 0.0021}}
axes:
  method: {DES-LOC: [], Local ADOPT: {config: local_adopt}}
  data: {IID: [data.partition=iid], by domain: {overrides: {data: {partition: by_domain}}}}
seeds: [3, 4]
sweep: {key: optimizer.lr}
"""
    made, _ = study(tmp_path, text, ["run.eval_every=12"])
    assert made.name == "mine"
    assert [cell.slug for cell in made.cells] == [
        "des-loc_iid", "des-loc_by-domain", "local-adopt_iid", "local-adopt_by-domain",
    ]  # fmt: skip
    config = made.cells[3].run(4).config
    assert (config.run.steps, config.run.eval_every, config.run.seed) == (24, 12, 4)
    assert (config.data.partition, config.sync["exp_avg"]) == ("by_domain", 16)
    assert {cell.search.value(1) for cell in made.cells} == {0.00297}


def test_a_text_in_a_study_is_what_was_typed(tmp_path):
    text = """
name: 2026_01_05
base: {data: {domains: [007, yes], text_field: 2024_01}, run: {seed: 010}}
axes: {K: {016: {config: desloc_sgdm, overrides: {sync: {params: 016}}}, no: "data.source='a b'"}}
"""
    made, _ = study(tmp_path, text)
    assert (made.name, made.axes["K"]) == ("2026_01_05", ("016", "no"))
    first, second = (cell.run(0).config for cell in made.cells)
    assert (first.data.domains, first.data.text_field) == (["007", "yes"], "2024_01")
    assert (first.sync["params"], second.data.source) == (16, "a b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seedz: [1]", "seedz: no such key (did you mean seeds?)"),
        ("axes: {a: {b: {confg: x}}}", "axes.a.b.confg: no such key (did you mean config?)"),
        ("axes: {a: {b: [run.stepz=1]}}", "in the cell 'b': run.stepz: no such key"),
        ("base: [federation.min_clients=9]", "larger than simulation.num_clients=4"),
        ("axes: {a: {b: {config: nix}}}", "config=nix: no preset of that name"),
        ("axes: {a: {x: {config: ddp}}, b: {y: {config: ddp}}}", "both state a config"),
        ("axes: {a: {x y: [], x-y: []}}", "would share the folder x-y"),
        ("seeds: [1, 1]", "seeds=[1, 1]"),
        ("sweep: {key: optimizer.lrr}", "no such number (did you mean optimizer.lr?)"),
        ("sweep: {key: optimizer.lr, max_runs: 2}", "sweep.max_runs=2: at least 3"),
        ("sweep: {key: optimizer.lr, factor: 1}", "sweep.factor=1"),
        ("score: {where: elsewhere}", "score.where=elsewhere: must be one of central"),
        ("base: [evaluation.central=false]", "score.where=central: needs evaluation.central=true"),
        ("base: 3", "base: a list of key=value"),
        ("base: [data.alpha=0.1]", "base: data.alpha: no cell uses it: only data.partition="),
        (
            f"base: [data.alpha=0.1]\naxes: {{data: {PARTITIONED}}}".replace(
                "dirichlet", "by_domain"
            ),
            "base: data.alpha: no cell uses it; in 'iid' only data.partition=dirichlet or quantity",
        ),
        (
            f"axes: {{data: {PARTITIONED.replace('=iid', '=iid, data.alpha=0.1')}}}",
            "in the cell 'iid': data.alpha=0.1: only data.partition=dirichlet or quantity",
        ),
        (
            f"sweep: {{key: data.alpha}}\naxes: {{data: {PARTITIONED}}}",
            "sweep.key=data.alpha: the cell 'iid' does not use it",
        ),
        ("- a", "the study: must be a mapping"),
    ],
)
def test_a_mistake_in_a_study_is_reported_with_its_file_and_key(tmp_path, text, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        study(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'mine.yaml'}: ")


def test_a_setting_of_all_cells_is_left_out_where_nothing_uses_it(tmp_path):
    data = f"axes: {{data: {PARTITIONED}}}"
    default = Config()
    for text, words in ((f"base: [data.alpha=0.1]\n{data}", []), (data, ["data.alpha=0.1"])):
        made, _ = study(tmp_path, text, words)
        alphas = [cell.run(0).config.data.alpha for cell in made.cells]
        assert alphas == [default.data.alpha, 0.1]
    made, _ = study(
        tmp_path,
        "base: [outer.momentum=0.6]\n"
        "axes: {method: {FedAvg: {config: local_adam}, DiLoCo: {config: diloco}}}",
    )
    momenta = [cell.run(0).config.outer.momentum for cell in made.cells]
    assert momenta == [default.outer.momentum, 0.6]
    with pytest.raises(ConfigError, match=r"mine\.yaml: outer\.lr: no cell uses it; in 'iid'"):
        study(tmp_path, data, ["outer.lr=0.5"])


def test_a_runs_digest_depends_on_the_settings_and_not_on_the_name():
    (one, other) = (cell.run(0) for cell in read_study(MINIATURE).cells)
    (changed, _) = (cell.run(0) for cell in read_study(MINIATURE, ["run.steps=13"]).cells)
    assert config_digest(with_run(one.config, name="x")) == config_digest(one.config)
    assert len({one.folder, other.folder, changed.folder}) == 3


def test_an_axis_may_tune_what_the_study_does_not(tmp_path):
    axes = "{method: {tuned: {sweep: {key: optimizer.lr}}, fixed: []}}"
    for text in ("", "sweep: none\n"):
        tuned, fixed = study(tmp_path, f"{text}axes: {axes}")[0].cells
        assert (tuned.search.key, fixed.search) == ("optimizer.lr", None)


@pytest.mark.parametrize("item", ["run.seed=1", "run.name=x"])
def test_what_a_study_sets_itself_cannot_be_overridden(item):
    with pytest.raises(ConfigError, match=f"{item}: a study sets it"):
        read_study(MINIATURE, [item])


# --- The results -------------------------------------------------------------------------------


def leave(store, run, end, *, diverged=False):
    """Write the folder of a run of two clients, whose loss falls to ``end``, into the store."""
    config, folder = run.config, RunFolder(store.final_path(run))
    folder.path.mkdir(parents=True)
    folder.write_config(dump(config))
    for window in windows_of(config.sync, config.run.steps, clients=2):
        loss = end + config.run.steps - window.step
        heldout = EvaluationRecord(overall={"loss": loss}, parts={})
        folder.append_metrics(to_line(replace(window, central=heldout, federated=None)))
    run_info = a_run_info(config.sync, config.run.steps, clients=2)
    status: Any = "failed" if diverged else "completed"
    folder.write_summary(
        build(read_lines(folder.metrics), config=config, run=run_info, status=status)
    )
    outcome = {"status": "diverged" if diverged else "completed", "error": None, "seconds": 1.0}
    outcome |= {"config": dump(config), "library": fingerprint()}
    (folder.path / OUTCOME).write_text(json.dumps(outcome))


def test_results_are_mean_and_standard_deviation_over_the_seeds_at_the_tuned_value(tmp_path):
    text = """
base: [run.steps=48, optimizer.lr=0.0021, "sync.params=4", "sync.exp_avg=12", "sync.exp_avg_sq=24"]
axes:
  method: {DES-LOC: [], Local ADOPT: ["sync.exp_avg=4", "sync.exp_avg_sq=4"], Wild: [run.steps=47]}
  data: {IID: [data.partition=iid], by domain: [data.partition=by_domain]}
seeds: [0, 1, 2]
sweep: {key: optimizer.lr, max_runs: 5}
"""
    made, store = study(tmp_path, text)
    rng, ends = np.random.default_rng(0), {}
    for cell in made.cells:
        wild = cell.labels["method"] == "Wild"
        for position in (-3, -2, -1, 0, 1, 2) if wild else (-1, 0, 1, 2):
            for seed in (0, 1, 2) if position == 1 and not wild else (0,):
                run = cell.run(seed, position)
                ends[run.title] = rng.normal(2 + (position - 1) ** 2, 0.1)
                leave(store, run, ends[run.title], diverged=wild or position == 2)
    rows = results(made, store)
    assert [row.spread.mean is None for row in rows] == [False] * 4 + [True] * 2
    for cell, row in zip(made.cells[:4], rows, strict=False):
        scores = [ends[cell.run(seed, 1).title] for seed in (0, 1, 2)]
        assert row.tuned == cell.search.value(1) == 0.00297
        assert row.bracketed
        assert row.tried[cell.search.value(2)] == math.inf
        assert row.spread.mean == pytest.approx(np.mean(scores), rel=1e-12)
        assert row.spread.std == pytest.approx(np.std(scores, ddof=1), rel=1e-12)
    headings, lines = table(rows)
    assert headings == [
        "method", "data", "tuned", "final held-out loss", "difference to DES-LOC", "seeds",
        "sent by a client", "Local Adam sends", "DDP sends", "time",
    ]  # fmt: skip
    columns = [dict(zip(headings, line, strict=True)) for line in lines]
    # Of 48 steps: params 12 times, exp_avg 4, exp_avg_sq 2, of 275.2 kB each.
    assert lines[0] == [
        "DES-LOC", "IID", "lr 0.00297",
        f"{rows[0].spread.mean:.4f} ± {rows[0].spread.std:.4f}", "-", "3", "5.0 MB",
        "2.00 times", "2.67 times", "0:52",
    ]  # fmt: skip
    assert (columns[2]["sent by a client"], columns[2]["Local Adam sends"]) == (
        "9.9 MB",
        "1.00 times",
    )
    gaps = np.array(rows[2].scores) - np.array(rows[0].scores)
    reach = 4.302652729911275 * np.std(gaps, ddof=1) / 3**0.5  # Student's t with two degrees
    low, high = (f"{np.mean(gaps) + sign * reach:+.4f}" for sign in (-1, 1))
    assert columns[2]["difference to DES-LOC"] == f"{np.mean(gaps):+.4f} ({low} to {high})"
    assert lines[4][2:] == ["lr: all diverged", "-", "-", "0", "-", "-", "-", "-"]
    assert markdown(rows).count("\n") == 1 + len(rows)
    write(rows, store.path)
    assert (store.path / "table.md").read_text() == markdown(rows) + "\n"
    with (store.path / "table.csv").open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert float(found[2]["difference_low"]) == pytest.approx(np.mean(gaps) - reach)
    cells = json.loads((store.path / "results.json").read_text())["cells"]
    assert [cell["std"] for cell in cells] == [row.spread.std for row in rows]
    tried = [f"{made.cells[4].search.value(position):g}" for position in range(-3, 2)]
    assert cells[4]["tried"] == dict.fromkeys(tried)
    assert {path.stem for path in draw(rows, store.path)} == {
        "scores", "sweep", "loss_by_step", "loss_by_bytes"
    }  # fmt: skip


def test_a_table_reads_each_run_once(tmp_path, monkeypatch):
    """With a hundred runs the time of reading them again and again is minutes."""
    made, store = study(tmp_path, "axes: {method: {A: [], B: [], C: []}}\nseeds: [0, 1]")
    for cell in made.cells:
        for seed in made.seeds:
            leave(store, cell.run(seed), 1.0 + seed)
    read = Counter[Path]()

    def counted(path: Path) -> Iterator[Any]:
        read[path] += 1
        return read_lines(path)

    monkeypatch.setattr("flower_desloc.app.study.store.read_lines", counted)
    rows = results(with_view(made, target="loss=3.5", baseline="B"), store)
    table(rows)
    write(rows, store.path)
    assert [*read.values()] == [1] * 6


def test_tables_show_what_a_target_took_and_the_difference_to_any_baseline(tmp_path):
    text = """
base: [run.steps=8, "sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=2"]
axes:
  method: {A_1: [], B & C: ["sync.exp_avg=4", "sync.exp_avg_sq=4"]}
  data: {IID: [data.partition=iid], by domain: [data.partition=by_domain]}
seeds: [0, 1]
"""
    made, store = study(tmp_path, text)
    for cell in made.cells:
        for seed in made.seeds:
            leave(store, cell.run(seed), 1.0 + seed)  # plus the steps that are left
    assert (made.compared, made.baseline) == ("data", {"data": "IID"})
    rows = results(with_view(made, target="loss=3.5", baseline="B & C"), store)
    headings, lines = table(rows)
    columns = [dict(zip(headings, line, strict=True)) for line in lines]
    assert [each["difference to B & C"] for each in columns] == [
        "+0.0000 (+0.0000 to +0.0000)", "+0.0000 (+0.0000 to +0.0000)", "-", "-"
    ]  # fmt: skip
    windows = [*read_lines(rows[0].runs[0].folder.metrics)]
    # Seed 0 is at 3 after step 6, seed 1 at 2 after step 8.
    until = [[line for line in windows if line["step"] <= step] for step in (6, 8)]
    sent = [sum(sum(line["bytes_up"].values()) for line in part) / 2 for part in until]
    took = [
        sum(s["total"] - s["evaluation"] for line in part if (s := line["seconds_split"]))
        for part in until
    ]
    written = json.loads(json.dumps(_objects(rows)))[0]
    assert written["bytes_to_target"] == pytest.approx(np.mean(sent))
    assert written["seconds_to_target"] == pytest.approx(np.mean(took))
    assert columns[0]["bytes to loss 3.5"] == bytes_text(np.mean(sent))
    one = results(with_view(made, target="loss=1.5"), store)
    assert table(one)[1][0][-2].endswith(" (1 of 2)")
    assert table(results(with_view(made, target="loss=0.5"), store))[1][0][-2] == "-"
    lacking = table(results(with_view(made, target="accuracy=0.5"), store))
    assert lacking[1][0][lacking[0].index("bytes to accuracy 0.5")] == "no such metric"
    assert r"B \& C" in latex(rows)
    assert r"A\_1" in latex(rows)


def test_a_label_of_two_axes_is_a_baseline_of_the_axis_that_is_compared_or_named(tmp_path):
    text = """
base: [run.steps=4]
axes:
  model: {small: [], large: [model.hidden_size=64]}
  data: {small: [], mid: [data.max_bytes=50000], large: [data.max_bytes=60000]}
"""
    made, _ = study(tmp_path, text)
    [cell] = (c for c in made.cells if c.labels == {"model": "large", "data": "mid"})
    assert made.baseline_of(cell) == {"model": "large", "data": "small"}
    assert made.baseline_text == "data=small"
    other = with_view(made, baseline="model=small")
    assert other.baseline_of(cell) == {"model": "small", "data": "mid"}
    assert with_view(made, baseline="mid").baseline_text == "mid"
    with pytest.raises(ConfigError, match=r"--baseline large: .* model=large or data=large"):
        with_view(made, baseline="large")


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ({"metric": "f1"}, "--metric f1: .* name it max:f1 or min:f1"),
        ({"target": "accuracy"}, "--target accuracy: a metric and its value"),
        ({"target": "accuracy=high"}, "--target accuracy=high: a metric and its value"),
        ({"target": "loss=nan"}, "--target loss=nan: a metric and its value"),
        ({"target": "=1"}, "--target =1: a metric and its value"),
        ({"metric": ""}, "--metric: name a metric"),
        ({"baseline": "Local"}, "--baseline Local: must be one of DES-LOC, Local Adam"),
    ],
)
def test_a_view_that_cannot_be_is_refused(view, message):
    with pytest.raises(ConfigError, match=message):
        with_view(read_study(MINIATURE), **view)


def test_a_view_needs_the_evaluation_that_it_is_of(tmp_path):
    made, _ = study(tmp_path, "base: [evaluation.federated=false]")
    with pytest.raises(ConfigError, match=r"needs evaluation\.federated=true"):
        with_view(made, metric="federated/loss")


def test_a_client_whose_loss_is_not_finite_is_the_worst(tmp_path):
    made, store = study(tmp_path, "base: [run.steps=16]\nseeds: [0, 1]")
    for seed in made.seeds:
        run = made.cells[0].run(seed)
        leave(store, run, 1.0)
        path = RunFolder(store.final_path(run)).metrics
        *lines, last = read_lines(path)
        parts = {"client-0": {"loss": 2.0}, "client-1": {"loss": 3.0 if seed else None}}
        last["evaluation"]["federated"] = {"overall": {"loss": 2.5}, "parts": parts}
        path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, last]))
    [row] = results(made, store)
    headings, [line] = table([row])
    assert line[headings.index("worst client")] == "3.0000 (1 of 2)"
    row.runs = row.runs[:1]
    headings, [line] = table([row])
    assert line[headings.index("worst client")] == "not finite"


def test_a_seed_that_diverged_is_counted_and_left_out_of_the_mean(tmp_path):
    made, store = study(tmp_path, "base: [run.steps=16]\nseeds: [0, 1, 2]")
    for seed, end in enumerate((1.0, 2.0, 3.0)):
        leave(store, made.cells[0].run(seed), end, diverged=seed == 2)
    [row] = results(made, store)
    assert (row.diverged, row.spread.mean) == (1, 1.5)
    assert row.spread.std == pytest.approx(0.5**0.5)
    assert "diverged" in table([row])[0]


def test_a_run_with_other_settings_does_not_count_as_finished(tmp_path):
    run = read_study(MINIATURE).cells[0].run(0)
    leave(Store(tmp_path, "mine"), run, 1.0)
    outcome = Store(tmp_path, "mine").final_path(run) / OUTCOME
    whole = outcome.read_text()
    other = whole.replace("steps: 12", "steps: 13")
    for text, finished in ((whole, True), (other, False), ("half a fi", False)):
        outcome.write_text(text)
        assert bool(Store(tmp_path, "mine").finished(run)) == finished


@pytest.mark.parametrize("sweep", ["seeds: [0]", "sweep: {key: optimizer.lr}"])
def test_a_run_whose_configuration_cannot_be_read_is_named_and_not_repeated(tmp_path, sweep):
    made, store = study(tmp_path, sweep)
    [cell] = made.cells
    run = cell.run(0, 0 if cell.search else None)
    leave(store, run, 1.0)
    file = store.final_path(run) / OUTCOME
    outcome = json.loads(file.read_text())
    outcome["config"] += "no_such_setting: 1\n"
    file.write_text(json.dumps(outcome))
    said = "was written by another version of flower-desloc (no_such_setting: no such key); delete"
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        study_state(made, Store(tmp_path, "mine"))
    assert str(error.value).startswith(f"{file.parent}: ")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a study of a task of one's own, which is read again, and the task's file."""
    file = tmp_path / "task_of_a_study.py"
    file.write_text("import helper_of_a_study\n\nTask = None\n")
    (tmp_path / "helper_of_a_study.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def read():
        code_once.cache_clear()
        return study(tmp_path, "base: [task=task_of_a_study:Task]", SHORT)

    yield read, file
    for name in ("task_of_a_study", "helper_of_a_study"):  # or the next test would find these
        sys.modules.pop(name, None)


@pytest.mark.parametrize("changed", ["task_of_a_study.py", "helper_of_a_study.py"])
def test_a_run_of_other_code_does_not_count_as_finished(mine, changed):
    read, file = mine
    made, store = read()
    leave(store, made.cells[0].run(0), 1.0)
    file = file.with_name(changed)
    before = file.read_text()
    for text, finished in ((before, 1), (before + "y = 2\n", 0), (before, 1)):
        file.write_text(text)
        assert counts(study_state(*read()))[0] == finished


def test_a_run_on_other_data_does_not_count_as_finished(tmp_path):
    data = tmp_path / "text"
    data.mkdir()
    file = data / "a.txt"

    def read(text):
        file.write_text(100 * text)
        files_once.cache_clear()
        return study(tmp_path, f"base: [data.source={data}]", SHORT)

    made, store = read("some text")
    leave(store, made.cells[0].run(0), 1.0)
    for text, finished in (("some text", 1), ("some test", 0), ("some text", 1)):
        assert counts(study_state(*read(text)))[0] == finished


def test_code_that_changes_while_a_study_runs_stops_the_rest_of_it(mine):
    read, file = mine
    made, store = read()
    run = made.cells[0].run(0)
    file.write_text("Task = 1\n")
    outcome = run_to_end(run, store.path)
    assert outcome["status"] == "failed"
    assert outcome["error"] is not None
    assert "has changed since the study was started" in outcome["error"]
    assert store.failed_path(run).is_dir()


def test_runs_of_another_version_of_this_package_are_kept_and_counted(tmp_path, monkeypatch):
    text = "axes: {who: {A: [], B: []}}"
    made, store = study(tmp_path, text)
    for cell in made.cells:
        leave(store, cell.run(0), 1.0)
    dry_run = ["study", tmp_path / "mine.yaml", "--output-dir", tmp_path, "--dry-run"]
    assert "another version" not in accepted(*dry_run)
    file = store.final_path(made.cells[0].run(0)) / OUTCOME
    file.write_text(file.read_text().replace(fingerprint(), "another"))
    said = " ".join(accepted(*dry_run).split())
    assert "1 of 2 finished runs were computed by another version of flower-desloc" in said
    assert "2 runs done, 0 to run" in said


# --- The runs ----------------------------------------------------------------------------------


class Here(WorkerPool):
    """A pool of one worker: this process."""

    def __init__(self):
        super().__init__(jobs=1)

    def start(self, run, store):
        self.run, self.store = run, store

    def ended(self, timeout):
        yield self.run, run_to_end(self.run, self.store.path)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_has_cells_that_are_valid_and_rightly_named(path):
    made = read_study(path)
    assert path.stem.startswith(made.name)  # some add to the folder of another
    assert path.read_text().startswith("# ")
    assert len(made.cells) == math.prod(map(len, made.axes.values()))
    for cell in made.cells:  # a cell that is named after an optimizer has it
        optimizer = cell.load().optimizer.name
        named = {word.lower() for word in re.findall(r"\b(ADOPT|Adam|AdamW|SGDM)\b", cell.name)}
        assert named <= {optimizer, optimizer.removesuffix("w")}, cell.name  # "Local Adam"


@pytest.mark.parametrize("path", OF_USERS, ids=lambda path: path.stem)
def test_the_first_cell_of_a_users_study_runs(path, tmp_path):
    made = read_study(path)
    cell = replace(made.cells[0], search=None, overrides=(*made.cells[0].overrides, *SHORT))
    made = replace(made, cells=(cell,), seeds=made.seeds[:1])
    store = Store(tmp_path, made.name)
    assert run_study(made, store, Here(), Mock()) == {}
    [row] = results(made, store)
    assert row.spread.mean is not None
    assert "-" not in table([row])[1][0][len(made.axes) :]


@pytest.mark.slow
def test_a_divergence_is_a_result_whatever_the_method(tmp_path):
    text = """
base: [optimizer.lr=1e30, simulation.num_clients=2, data.partition=iid, evaluation.federated=false]
axes:
  method:
    DES-LOC: {config: quickstart}
    DDP: {config: ddp}
    DiLoCo: {config: diloco, overrides: [outer.lr=1e30, sync.params=2]}
    FedAvg: {config: fedavg}
    FedAdam: {config: fedadam, overrides: [optimizer.lr=0.01, strategy_options.eta=1e39]}
    going on: {overrides: [federation.on_failure=continue, federation.repeats=0]}
"""
    made, store = study(tmp_path, text, SHORT)
    assert run_study(made, store, Here(), Mock()) == {}
    rows = results(made, store)
    assert [(row.diverged, row.spread.mean) for row in rows] == [(1, None)] * 6
    assert all(cells[1] == "diverged" for cells in table(rows)[1])


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_others_and_is_retried(tmp_path):
    source = tmp_path / "nothing"
    source.mkdir()
    broken = source / "broken.parquet"
    broken.write_text("this is no table")
    text = f"""
base: [simulation.num_clients=2, data.partition=iid, evaluation.federated=false]
axes: {{data: {{none: [data.source={source}], some: []}}}}
"""
    made, store = study(tmp_path, text, SHORT)
    failed = run_study(made, store, Here(), Mock())
    assert list(failed) == ["none, seed 0"]
    assert "nothing" in failed["none, seed 0"]
    assert (store.failed_path(made.cells[0].run(0)) / "log.txt").exists()
    assert [len(row.runs) for row in results(made, store)] == [0, 1]
    tales = [json.dumps({"text": f"Tale {n}: {'once upon a time. ' * 20}"}) for n in range(40)]
    broken.unlink()
    (source / "tales.jsonl").write_text("\n".join(tales))
    assert run_study(made, store, Here(), Mock()) == {}
    assert not store.failed_path(made.cells[0].run(0)).exists()


def test_a_worker_that_dies_between_two_runs_is_replaced(tmp_path):
    made, store = study(tmp_path, "seeds: [0]", SHORT)
    run = replace(made.cells[0].run(0), code="changed")  # so it fails at once
    with WorkerPool(1) as pool:
        for _ in range(2):
            pool.start(run, store)
            [(_, outcome)] = pool.ended(60)
            assert outcome is not None
            assert outcome["status"] == "failed"
            [worker] = active_children()
            worker.kill()
            worker.join()
            # The pool's own thread notices it a moment later.
            wait_until(lambda: pool._idle[0].executor._broken, limit=10)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_run_whose_worker_dies_is_retried_once(tmp_path):
    text = "axes: {who: {A: [], B: [optimizer.lr=1e-3]}}"
    made, store = study(tmp_path, text, LONG)
    deaths, killed = {"A": ["at once"], "B": ["in the middle", "at once"]}, set()

    def kill(states, running):
        """Kill the worker of a run, at once or in the middle."""
        for run in running:
            planned = deaths[run.cell.name]
            begun = list(store.scratch_path(run).glob("*/metrics.jsonl"))
            alive = [child for child in active_children() if child.pid not in killed]
            if planned and alive and (planned[0] == "at once" or begun):
                planned.pop(0)
                killed.add(alive[0].pid)
                alive[0].kill()

    with WorkerPool(1) as pool:
        failed = run_study(made, store, pool, Mock(tick=kill))
    assert list(failed) == ["B, seed 0"]
    assert "died twice; is there enough memory?" in failed["B, seed 0"]
    assert len(killed) == 3
    assert [len(row.runs) for row in results(made, store)] == [1, 0]


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_stopped_or_killed_study_resumes_where_it_was(tmp_path):
    made, store = study(tmp_path, "seeds: [0, 1]", LIGHT)
    folder, half = store.path, ".unfinished/*/*/*/metrics.jsonl"
    output = tmp_path / "output.txt"
    code = DEFAULT_SIGNALS + "from flower_desloc.app.cli import app; app()"
    options = [*LIGHT, "--output-dir", str(tmp_path), "--jobs", "1"]
    command = [sys.executable, "-c", code, "study", str(tmp_path / "mine.yaml"), *options]
    own = {**os.environ, **WITH_LIGHT, "DESLOC_TEST": str(tmp_path)}

    def done():
        return {run: (run / "summary.json").stat().st_mtime_ns for run in folder.glob("*/*seed-*")}

    def in_run_2():
        return len(done()) == 1 and any(file.stat().st_size for file in folder.glob(half))

    def stop_within_run_2(how):
        """Send a signal when the first run is done and the second has written a window."""
        with output.open("a") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=own)
        try:
            wait_until(lambda: process.poll() is not None or in_run_2(), output.read_text)
            process.send_signal(how)
            return process.wait(600)
        finally:
            process.kill()

    assert stop_within_run_2(signal.SIGINT) == 128 + signal.SIGINT, output.read_text()
    kept = "stopped by SIGINT; finished runs are kept; the same command resumes the study\n"
    assert output.read_text().endswith(kept), output.read_text()
    assert not (folder / ".unfinished").exists()
    first = done()
    assert len(first) == 1, output.read_text()

    assert stop_within_run_2(signal.SIGKILL) == -signal.SIGKILL, output.read_text()
    assert list(folder.glob(half)), "it was not in the middle of a run"
    assert done() == first
    # The workers end with their study.
    wait_until(lambda: not processes_with("DESLOC_TEST", str(tmp_path)), output.read_text)

    with store.locked():
        assert run_study(made, store, Here(), Mock()) == {}
    assert first.items() < done().items()
    assert not (folder / ".unfinished").exists()
    [cell] = results(made, store)
    assert [run.summary["config"]["seed"] for run in cell.runs] == [0, 1]
    assert {run.folder.path for run in cell.runs} == set(done())


@pytest.mark.slow
def test_a_complete_study_is_only_redrawn(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys.modules["flower_desloc.app.cli.study"], "WorkerPool", lambda jobs: nullcontext(Here())
    )
    reports = []
    monkeypatch.setattr(
        "flower_desloc.app.runs.report.write_report", lambda runs, path, **_: reports.append(path)
    )
    folder = tmp_path / "miniature"

    def made():
        output = accepted("study", "miniature", "--output-dir", tmp_path)
        return output, {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*")}

    _, files = made()
    cells = json.loads((folder / "results.json").read_text())["cells"]
    assert [cell["method"] for cell in cells] == ["DES-LOC", "Local Adam"]
    assert [cell["local_adam_ratio"] for cell in cells] == [2.0, 1.0]
    (folder / "scores.png").unlink()
    output, same_files = made()
    # The page has this table; its losses are those on the text of one Python.
    changing = r"\d:\d\d$" if sys.version_info[:3] == (3, 11, 7) else r"\d:\d\d$|\d\.\d{4}"
    shown = (ROOT / "docs" / "how-to" / "compare.md").read_text()
    for line in output.splitlines()[-5:-1]:
        assert re.sub(changing, "", line) in re.sub(changing, "", shown, flags=re.MULTILINE)
    assert same_files == files
    assert (folder / "scores.png").exists()
    assert "1/2" not in output
    assert reports == [folder / "report.html"] * 2
