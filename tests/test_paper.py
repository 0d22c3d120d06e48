"""docs/paper.md: its commands exist, and its tables are what they say."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import load_benchmark

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


def line(step: int, clients: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    return {
        "round": step // 16,
        "start": step - 16,
        "step": step,
        "clients": {
            name: {"grad_norms": norms, "param_norm": 2.0} for name, norms in clients.items()
        },
        "drift": {},
        **more,
    }


def evaluation(loss: float, activations: float = 1.0) -> dict[str, Any]:
    overall = {"loss": loss, "activation_norm": activations}
    return {"evaluation": {"central": {"overall": overall, "parts": {}}}}


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
            lines = [
                line(16, {"client-0": [1.0, 3.0]}, drift=moments, **evaluation(3.0, 7.0)),
                line(32, {"client-0": [2.0, 2.0]}, drift=moments, **evaluation(2.5)),
                line(48, {"client-0": [2.0], "client-1": [9.0]}, **evaluation(2.0 + seed, 4.0)),
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
            runs.append(f"/elsewhere/{method}/seed-{seed}")
        cells.append({"method": method, "key": "optimizer.lr", "scores": scores, "runs": runs})
    (tmp_path / "results.json").write_text(json.dumps({"cells": cells}))
    return tmp_path


def printed(monkeypatch, capsys, *arguments: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["paper_tables.py", *arguments])
    tables.main()
    rows = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_rate_of_change_is_the_distance_moved_over_the_last_norm(study, monkeypatch, capsys):
    heading, _, row, _ = printed(monkeypatch, capsys, "rates", str(study))
    assert heading[1:] == ["exp_avg", "exp_avg_sq", "exp_avg / exp_avg_sq"]
    # Seeds 0 and 1 moved 2/2 and 3/2; both 0.5/5.
    assert row == ["DES-LOC", "1.25 ± 0.35", "0.1 ± 0", "12.5 ± 3.5"]


def test_the_doubling_is_told_by_losses_and_gradients_around_it(study, monkeypatch, capsys):
    heading, _, row, _ = printed(monkeypatch, capsys, "doubling", str(study), "--step", "32")
    told = dict(zip(heading, row, strict=True))
    assert told["loss before"] == "2.5 ± 0"
    assert told["first loss after"] == told["final loss"] == "2.5 ± 0.71"
    assert told["gradient before"] == "2 ± 0"
    assert (told["after, old"], told["after, new"]) == ("2 ± 0", "9 ± 0")


def test_cells_are_compared_seed_by_seed(study, monkeypatch, capsys):
    arguments = ("against", str(study), "--reference", "Local")
    _, _, ours, theirs = printed(monkeypatch, capsys, *arguments)
    name, more = ours
    assert name == "DES-LOC"
    assert float(more.split(" ± ")[0]) == pytest.approx(10)
    assert float(more.split(" ± ")[1]) == pytest.approx(0, abs=1e-9)
    assert theirs == ["Local", "0 ± 0"]
