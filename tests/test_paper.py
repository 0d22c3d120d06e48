"""docs/paper.md: its commands exist, and its tables are what they say."""

import json
import re
from pathlib import Path

import pytest
from scripts import load_benchmark
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "docs" / name
    for name in ("paper.md", "baselines.md", "studies.md", "wire.md", "ladder.md")
]
tables = load_benchmark("paper_tables")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_study_and_preset_that_is_named_exists(page):
    text = page.read_text()
    studies = set(re.findall(r"desloc study ([a-z0-9_]+)(?![a-z0-9_/])", text))
    presets = set(re.findall(r"desloc run ([a-z0-9_]+)", text))
    assert studies | presets
    for folder, names in (("studies", studies), ("configs", presets)):
        assert not {name for name in names if not (ROOT / folder / f"{name}.yaml").is_file()}


def test_every_study_is_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    for study in (ROOT / "studies").glob("*.yaml"):
        assert f"desloc study {study.stem}" in text, study


@pytest.fixture
def study(tmp_path):
    """A study of two cells and two seeds, with numbers to be worked out by hand."""
    cells = []
    for method, scores in (("DES-LOC", [2.2, 3.3]), ("Local", [2.0, 3.0])):
        runs = []
        for seed in range(2):
            run = tmp_path / method / f"seed-{seed}"
            run.mkdir(parents=True)
            moments = {
                "exp_avg": {"moved": 2.0 + seed, "norm": 2.0},
                "exp_avg_sq": {"moved": 0.5, "norm": 5.0},
            }
            lines = [{"drift": moments}, {"drift": moments}, {"drift": {}}]
            (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
            summary = {"config": {"seed": seed}, "versions": {}}
            (run / "summary.json").write_text(json.dumps(summary))
            runs.append(f"/elsewhere/{method}/seed-{seed}")
        cell = {"method": method, "key": "optimizer.lr", "scores": scores, "runs": runs}
        cells.append(cell | {"bytes_up_per_client": 10.0})
    (tmp_path / "results.json").write_text(json.dumps({"study": "methods", "cells": cells}))
    return tmp_path


def test_results_that_are_kept_are_those_of_the_runs(study, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    CliRunner().invoke(tables.app, ["keep", str(study)], catch_exceptions=False)
    cells = tables.kept("methods")
    ours = cells["DES-LOC",]
    # Seeds 0 and 1 moved 2/2 and 3/2; both 0.5/5.
    assert ours["rates_of_change"] == {"exp_avg": [1.0, 1.5], "exp_avg_sq": [0.1, 0.1]}
    assert ours["seeds"] == [0, 1]
    assert tables.above(ours, cells["Local",]).mean == pytest.approx(10)
    assert tables.above(ours, cells["Local",]).reach == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_of_the_page_is_that_of_the_results(name):
    page = (ROOT / "docs" / "paper.md").read_text()
    _, _, rest = page.partition(f"<!-- {name} -->\n")
    assert rest.partition(f"\n<!-- /{name} -->")[0] == tables.TABLES[name]()


def test_methods_are_compared_with_local_in_pairs_and_at_any_rate(tmp_path, monkeypatch):
    common = {"partition": "iid", "optimizer": "adam", "status": "completed"}
    measured = ("worst_client", "param_norm", "activation_norm")
    runs = [
        {**common, "method": method, "seed": seed, "rate": rate, "bytes_sent_by_a_client": sent}
        | {"loss": loss * (1 + seed), "perplexity": 2 * loss * (1 + seed)}
        | dict.fromkeys(measured, 3.0)
        for method, rate, sent, loss in (("Local", 0.0084, 100, 2.0), ("DES-LOC", 0.0042, 50, 2.2))
        for seed in (0, 1)
    ]
    runs.append({**runs[0], "seed": 100, "loss": 99.0})  # a seed that tunes does not count
    (tmp_path / "paper_baselines.json").write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    *_, local, ours = tables.methods("paper_baselines", "iid").splitlines()
    assert local.split(" | ")[1:6] == ["0.0084", "1.00", "2", "3.000", ""]
    assert ours.split(" | ")[1:6] == ["0.0042", "0.50", "2", "3.300", "+10.00 (+10.00 to +10.00)"]
