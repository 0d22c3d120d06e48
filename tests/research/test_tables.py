"""research/: its tables are those of the results, and its commands exist."""

import csv
import json
import re

import pytest
from command import accepted
from scripts import RESEARCH, ROOT, load_script

PAGES = (*(ROOT / "docs").rglob("*.md"), *RESEARCH.glob("*.md"))
collect, draw, ladder, paired = (
    load_script(name) for name in ("collect", "draw", "ladder", "paired")
)


def test_every_study_is_on_a_page_and_what_the_pages_name_exists():
    text = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"desloc study (?:research/studies/)?([a-z0-9_]+)(?![a-z0-9_/])", text)
    presets = set(re.findall(r"desloc run ([a-z0-9_]+)", text))
    studies = [*(ROOT / "studies").glob("*.yaml"), *(RESEARCH / "studies").glob("*.yaml")]
    assert set(named) == {path.stem for path in studies}
    files = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")]
    assert presets <= {path.stem for path in files}


@pytest.mark.parametrize("program", ["collect", "non_iid"])
def test_results_stay_where_no_run_is_found(program, tmp_path, monkeypatch):
    script = load_script(program)
    name = "privacy"
    before = (paired.RESULTS / f"{name}.json").read_text()
    (tmp_path / name).mkdir()
    with pytest.raises(SystemExit, match=r"has no finished runs; the results in .* stay"):
        script.main([tmp_path / name])
    assert (paired.RESULTS / f"{name}.json").read_text() == before


@pytest.mark.parametrize("name", draw.CSV)
def test_a_table_is_that_of_the_results(name):
    assert (paired.TABLES / f"{name}.csv").read_text() == draw.CSV[name]().csv


@pytest.mark.parametrize(("page", "marker"), draw.ON_PAGES)
def test_a_table_of_a_page_is_that_of_the_results(page, marker):
    _, between, _ = paired.between(ROOT / page, marker)
    assert between == draw.ON_PAGES[page, marker]().markdown


@pytest.mark.parametrize("page", ["docs/explanation/measured.md", "research/baseline.md"])
def test_an_interval_of_a_page_is_in_a_table(page):
    number = r"[+-]\d+\.\d\d"
    text = (ROOT / page).read_text().replace("\N{MINUS SIGN}", "-")
    stated = re.findall(rf"({number}) % \(({number}) to ({number})\)", text)
    drawn = "".join(path.read_text() for path in paired.TABLES.glob("*.csv"))
    assert len(stated) > 3
    for mean, low, high in stated:
        assert f"{mean} ({low} to {high})" in drawn, mean


def test_the_losses_and_bytes_of_the_readme_are_those_of_the_table():
    known = {
        (data, method): (above, share)
        for name in ("fair_methods", "fair_muon")
        for data, method, *_, above, share in csv.reader(
            (paired.TABLES / f"{name}.csv").read_text().splitlines()
        )
    }
    text = (ROOT / "README.md").read_text().replace("\N{MINUS SIGN}", "-")
    for words, method in {
        "data parallelism": "DDP",
        "| FAVG+OPT": "FAVG+OPT",
        "| Local Adam |": "Local",
        "**DES-LOC**": "DES-LOC, bounded",
        "**`lean`**": "lean",
        "**`leanest`**": "2 bits, rare moments",
        "**`muon`**": "Muon, compressed",
    }.items():
        (line,) = (each for each in text.splitlines() if words in each and each.startswith("|"))
        *_, share, losses = (cell.strip(" *") for cell in line.strip("|").split("|"))
        found = [float(loss) for loss in losses.split(";")]
        both = [known[data, method][0].partition(" ")[0] for data in ("IID", "by domain")]
        wanted = [round(float(loss or 0), 1) for loss in both]
        assert found == (wanted if len(found) == 2 else [wanted[0]]), method
        assert float(share) == pytest.approx(float(known["IID", method][1]), rel=0.02)


def test_every_table_and_every_result_is_used():
    assert {path.stem for path in paired.TABLES.glob("*")} == set(draw.CSV)
    linked = "".join(page.read_text() for page in PAGES)
    for name in draw.CSV:
        source = (paired.RESULTS / f"{name}.json").exists() and f"results/{name}.json" in linked
        assert f"tables/{name}.csv" in linked or source, name
    scripts = "".join(path.read_text() for path in RESEARCH.rglob("*.py"))
    for path in paired.RESULTS.glob("*.json"):
        names = {path.stem, path.stem.removeprefix("thin_links_")}  # of cells, without the prefix
        assert path.stem == "thin_links" or any(f'"{name}"' in scripts for name in names), path


def test_the_product_does_not_know_research():
    for path in (ROOT / "flower_desloc").rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) research\b", path.read_text(), re.M), path


def test_the_authors_clock_is_what_its_command_prints():
    page = (RESEARCH / "paper.md").read_text()
    found = re.search(r"desloc (plan --params 1\.3e9 .*)", page)
    assert found is not None
    _, *command = found[1].split()
    heads, rows = draw.CSV["wall_clock"]()
    for column, head in list(enumerate(heads))[1::2]:
        bandwidth = 1000 * float(head.removesuffix(" Gbit/s"))
        said = " ".join(accepted("plan", *command, "--bandwidth", bandwidth).split())
        for method, *cells in rows[:4]:
            name = "this run" if method == "DES-LOC" else method
            expected = rf"{name} \S+ \S+ \S+ \S+ {cells[column - 1]} "
            assert re.search(expected, said.partition("Time on a ring")[2]), (name, bandwidth)


def a_run(folder, seed, loss):
    config = {
        "strategy": "desloc",
        "sync": {"params": 16, "exp_avg": 48, "exp_avg_sq": 96},
        "sync_once_at": [],
        "compression": {},
        "outer": {"name": "none"},
        "optimizer": {"name": "adam", "lr": 0.0084, "betas": [0.95, 0.95]},
        "data": {"partition": "iid", "domains": ["a"], "batch_size": 8, "seq_len": 32},
        "simulation": {"num_clients": 2},
        "run": {"seed": seed, "steps": 32},
    }
    folder.mkdir(parents=True)
    outcome = {"config": json.dumps(config), "status": "completed", "seconds": 1.0}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    score = {"loss": {"final": loss}, "perplexity": {"final": 2 * loss}}
    summary = {"stream_bytes": {"params": 400}, "evaluation": {"central": score}, "clients": 2}
    summary |= {"bytes": {"measured": {"up": {"total": 1000}}}, "versions": {}}
    (folder / "summary.json").write_text(json.dumps(summary))
    moments = {
        "exp_avg": {"moved": 2.0 + seed, "norm": 2.0},
        "exp_avg_sq": {"moved": 0.5, "norm": 5.0},
    }
    central = {"overall": {"activation_norm": 3.0}, "parts": {"a": {"loss": loss}}}
    clients = {"0": {"param_norm": 4.0}}
    window = {"drift": moments, "evaluation": {"central": central}, "clients": clients}
    lines = (window, window, window | {"drift": {}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_finished_run_is_collected_once_with_its_rates_of_change(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "RESULTS", tmp_path)
    study = tmp_path / "runs" / "mine"
    for seed in range(2):
        a_run(study / "DES-LOC_IID" / f"seed-{seed}", seed, 2.0 + seed)
    for _ in range(2):
        collect.main([study])
    runs = json.loads((tmp_path / "mine.json").read_text())["runs"]
    assert [(run["cell"], run["method"], run["seed"]) for run in runs] == [
        ("des-loc-iid", "DES-LOC", 0),
        ("des-loc-iid", "DES-LOC", 1),
    ]
    assert [run["loss"] for run in runs] == [2.0, 3.0]
    assert {run["bytes_sent_by_a_client"] for run in runs} == {500}
    # Seeds 0 and 1 moved 2/2 and 3/2; both 0.5/5.
    rates = [run["rates_of_change"] for run in runs]
    assert rates == [{"exp_avg": 1.0, "exp_avg_sq": 0.1}, {"exp_avg": 1.5, "exp_avg_sq": 0.1}]


def test_methods_are_compared_with_local_by_seed_and_at_any_rate(monkeypatch):
    common = {
        **{"partition": "iid", "optimizer": "adam", "status": "completed", "params": 100},
        **{"tokens": 256, "steps": 512, "period": 16, "betas": [0.95, 0.95]},
    }
    runs = [
        {**common, "method": method, "seed": seed, "rate": rate, "bytes_sent_by_a_client": sent}
        | {"loss": loss * (1 + seed), "perplexity": 2 * loss * (1 + seed)}
        | {"sync": {"params": 16, "exp_avg": k_u, "exp_avg_sq": k_u}}
        for method, k_u, rate, sent, loss in (
            ("Local", 16, 0.0084, 100, 2.0),
            ("DES-LOC", 48, 0.0042, 50, 2.2),
        )
        for seed in (0, 1)
    ]
    runs.append({**runs[0], "seed": 100, "loss": 99.0})  # a seed that tunes does not count
    monkeypatch.setattr(ladder, "records", lambda study: runs if study == ladder.PAPER else [])
    ladder.ladder.cache_clear()
    try:
        heads, rows = ladder.comparison(ladder.PAPER)
        local, ours = (dict(zip(heads, row, strict=True)) for row in rows)
    finally:
        ladder.ladder.cache_clear()
    assert [local[key] for key in ("rate", "bytes", "seeds", "loss")] == [
        "0.0084",
        "1.00",
        2,
        "3.000",
    ]
    assert local["above Local, %"] == ""
    assert [ours[key] for key in ("rate", "bytes", "seeds", "loss")] == [
        "0.0042",
        "0.50",
        2,
        "3.300",
    ]
    assert ours["above Local, %"] == "+10.00 (+10.00 to +10.00)"
