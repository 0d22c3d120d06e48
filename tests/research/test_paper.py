"""research/paper.md: its commands exist, and its tables are what they say."""

import json
import re

import pytest
from scripts import ROOT, load_script
from typer.testing import CliRunner

PAGES = (*(ROOT / "docs").rglob("*.md"), *(ROOT / "research").glob("*.md"))
tables = load_script("paper_tables")


def test_every_study_is_on_a_page_and_what_the_pages_name_exists():
    text = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"desloc study (?:research/studies/)?([a-z0-9_]+)(?![a-z0-9_/])", text)
    presets = set(re.findall(r"desloc run ([a-z0-9_]+)", text))
    studies = [*(ROOT / "studies").glob("*.yaml"), *(ROOT / "research" / "studies").glob("*.yaml")]
    assert set(named) == {path.stem for path in studies}
    files = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")]
    assert presets <= {path.stem for path in files}


def test_rates_of_change_are_those_of_the_runs(tmp_path, monkeypatch):
    """A study of two seeds, whose folder was moved, with numbers to be worked out by hand."""
    runs = []
    for seed in range(2):
        run = tmp_path / "DES-LOC" / f"seed-{seed}"
        run.mkdir(parents=True)
        moments = {
            "exp_avg": {"moved": 2.0 + seed, "norm": 2.0},
            "exp_avg_sq": {"moved": 0.5, "norm": 5.0},
        }
        lines = [{"drift": moments}, {"drift": moments}, {"drift": {}}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        (run / "summary.json").write_text(json.dumps({"config": {"seed": seed}, "versions": {}}))
        runs.append(f"/elsewhere/DES-LOC/seed-{seed}")
    cell = {"method": "DES-LOC", "key": "optimizer.lr", "scores": [2.2, 3.3], "runs": runs}
    cell["bytes_up_per_client"] = 10.0
    (tmp_path / "results.json").write_text(json.dumps({"study": "methods", "cells": [cell]}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    CliRunner().invoke(tables.app, ["keep", str(tmp_path)], catch_exceptions=False)
    ours = tables.kept("methods")["DES-LOC",]
    # Seeds 0 and 1 moved 2/2 and 3/2; both 0.5/5.
    assert ours["rates_of_change"] == {"exp_avg": [1.0, 1.5], "exp_avg_sq": [0.1, 0.1]}
    assert ours["seeds"] == [0, 1]
    gap = tables.above(ours, {**ours, "scores": [2.0, 3.0]})
    assert (gap.mean, gap.reach) == (pytest.approx(10), pytest.approx(0, abs=1e-9))


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_of_the_page_is_that_of_the_results(name):
    _, _, rest = tables.page_of(name).read_text().partition(f"<!-- {name} -->\n")
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
