"""The command `desloc plan`, its page, and its figure."""

import re
from dataclasses import replace

import pytest
from command import accepted, desloc, refused
from planned import by_stream, planned, run_of
from scripts import ROOT

from flower_desloc import PARAMS, Kind, SyncSchedule
from flower_desloc.app.config import load
from flower_desloc.app.plan.advice import recommended
from flower_desloc.app.plan.rules import RULES, rule_for
from flower_desloc.app.plan.wall_clock import Link, Topology
from flower_desloc.app.runs.figures import plan as plan_figure
from flower_desloc.app.runs.figures.style import figure, stream_colours
from flower_desloc.app.setup.streams import RunStreams

SMALL = ("--params", "1e6", "--step-seconds", 0.1)


def plan(*arguments):
    return " ".join(accepted("plan", *arguments).split())


def test_the_page_shows_what_its_command_prints(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "how-to" / "plan.md").read_text()
    shown = r"```bash\ndesloc (plan .*?)\n```\n\n```\n(.*?)\n```"
    ((command, output),) = re.findall(shown, page, re.DOTALL)
    lines = [line.rstrip() for line in accepted(*command.split()).strip().splitlines()]
    assert lines == output.splitlines()


def test_preset_override_and_every_option_take_effect():
    said = plan(
        *("desloc_adam", "sync.params=8", "sync.exp_avg=24", "sync.exp_avg_sq=never"),
        *("--params", "1e6", "--workers", 2, "run.steps=4000", "--tokens-per-step", 5000),
        *("--value-bytes", 2, "--bandwidth", 500, "--latency", 20, "--flops", "1e12"),
        *("--mfu", 0.25, "--overlap", 0.5, "--share", 0.2, "optimizer.betas=[0.9,0.99]"),
        *("--rho", 0.5, "--psi", 0.25),
    )
    assert "desloc_adam: 1,000,000 parameters, adam on 2 workers" in said
    # 6 * 1e6 * 5000 / (0.25 * 1e12 * 2)
    assert "4,000 steps of 5,000 tokens; a step computes 60 ms" in said
    assert "500 Mbit/s, 20 ms latency; 50% of communication hidden" in said
    assert "tau_0.25" in said
    # ln 0.25 / ln 0.9, 24 of it, 0.9^24, rho, 2 rho (1 - 0.9^24)
    assert "exp_avg every 24 13.2 1.82 0.0798 0.5 0.92 " in said
    assert f"exp_avg_sq never 137.9 29 {0.99**4000:.3g} 0.25 0.5 " in said
    # 1/8 + 1/24 payloads of 2 MB
    assert "this run 0.167 333 kB" in said
    # alpha (2 M P / B + 2 l) of a window of 4/3 payloads, every 8 steps
    star = 0.5 * (2 * 2 * 2e6 / 62.5e6 * (1 / 8 + 1 / 24) + 2 * 0.02 / 8)
    assert f"this run {star * 1e3:.3g} ms" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "sync.params=64 --params 7e9",
            ("plan: 7,000,000,000 parameters", "params every 64", "exp_avg_sq every 1536"),
        ),
        ("quickstart sync_mode=probabilistic", ("averaged by coins",)),
        (
            "quickstart sync_delay=4 --step-seconds 0.2 --bandwidth 100",
            ("sync_delay=4", "largest window: 13.0 MB, 3 payloads"),
        ),
        (
            "quickstart sync_phase.exp_avg=16 sync_phase.exp_avg_sq=32",
            ("largest window: 8.7 MB, 2 payloads",),
        ),
    ],
)
def test_a_plan_names_what_was_asked_for(arguments, said):
    output = plan(*arguments.split())
    assert [words for words in said if words not in output] == []
    assert ("sync_delay=" in output) == ("sync_delay" in arguments)


@pytest.mark.parametrize(("seconds", "number"), [(1, 1), (0.002, 4)])
def test_a_run_accepts_the_recommended_settings_over_its_own_phases(seconds, number):
    words = ["sync_phase.exp_avg=16", "sync_phase.exp_avg_sq=32"]
    said = plan("quickstart", "--step-seconds", seconds, *words).partition("Recommended")[2]
    found = re.findall(r"(?: sync\S+=\w+)+", said.partition("Warnings")[0])
    assert len(found) == number
    for settings in found:
        config = load("quickstart", [*words, *settings.split()])
        assert not any(RunStreams(config).schedule.phases.values())


def test_where_no_period_is_affordable_the_plan_shows_what_long_ones_reach():
    said = plan("digits", "--step-seconds", 0.0025, "--bandwidth", 20)
    shown = said.partition("Recommended")[2].partition("Warnings")[0]
    run = run_of(load("digits"), step_seconds=0.0025)
    run = replace(run, link=Link(bandwidth=2.5e6, latency=0.05))
    assert recommended(run, Topology.STAR) is None
    found = re.findall(r"sync.params=(\d+) .*?takes ([\d.,]+) times as long as compute", shown)
    assert [int(period) for period, _ in found] == [8, 16, 32, 64]
    for period, times in found:
        clocks = run.with_periods(rule_for(run, int(period)).periods(run.streams, int(period)))
        waiting = clocks.waiting(clocks.desloc, Topology.STAR) / run.compute
        assert float(times) == pytest.approx(waiting, rel=0.01)
    assert "exp_avg_sq never averaged" in shown
    for word in ("sync_mode=probabilistic", "sync_once_at=[8]"):
        assert "never averaged" not in plan(
            "digits", "--step-seconds", 0.0025, "--bandwidth", 20, word
        )


def period_for_a_star(said: str) -> int:
    found = re.search(r"star: .*?sync.exp_avg_sq=(\d+)", said)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("mixed", [False, True])
def test_an_optimizers_own_ceiling_is_told_where_all_parts_of_a_stream_have_one(mixed):
    group = "optimizer.groups=[{kinds: [norms_and_biases], name: adam, lr: 0.1, weight_decay: 0}]"
    said = plan("quickstart", "optimizer.name=adopt", "optimizer.lr=0.1", *[group] * mixed)
    assert ("itself gives the ceiling of exp_avg" in said) == (not mixed)


def test_a_recommended_period_beyond_the_run_is_said_to_average_nothing():
    said = plan("desloc_adopt", *SMALL, "run.steps=900", "--share", 0.02)
    assert period_for_a_star(said) > 900
    assert "exp_avg_sq never averaged" in said.partition("Recommended")[2]
    once = plan("desloc_adopt", *SMALL, "run.steps=900", "--share", 0.02, "sync_once_at=[8]")
    assert period_for_a_star(once) > 900
    assert "never averaged" not in once


def test_a_plan_prints_only_what_applies_to_the_run():
    quickstart = plan("quickstart", *SMALL)
    paper = plan("1.7b")
    assert [name in paper for name in ("Time on a ring", "ring: ")] == [1, 1]
    assert [name in quickstart for name in ("on a ring", "ring: ")] == [0, 0]
    assert plan("quickstart", *SMALL, "--share", 1).count("1x at") == 1


def test_without_the_time_of_a_step_a_plan_has_half_lives_and_bytes():
    said, timed = plan("digits"), plan("digits", "--step-seconds", 1)
    assert "give --step-seconds" in " ".join(said.split())
    for title in ("Moments", "tau_0.5", "Bytes", "Warnings"):
        assert title in said
    for title in ("Time on a", "Recommended", "a step computes", "--share"):
        assert title not in said
        assert title in timed or title == "--share"
    moments = said.partition("Moments")[2].partition("Bytes")[0]
    assert moments == timed.partition("Moments")[2].partition("Bytes")[0]
    assert "nan" not in said.lower()


def test_no_figure_of_times_is_drawn_without_the_time_of_a_step(tmp_path):
    error = refused("plan", "digits", "--plot", tmp_path / "plan.png")
    assert "give --step-seconds" in error
    assert not list(tmp_path.iterdir())


def test_a_plan_prints_the_rule_of_its_run():
    said = plan("desloc_adam", *SMALL).partition("Rule ")[2]
    assert said.startswith(
        "Adam, non-IID data, K_x up to 2 half-lives: sync.params=16 sync.exp_avg=16 "
        "sync.exp_avg_sq=96 sync_bound=true compression.params=int8 compression.exp_avg=int4 "
    )
    assert "research/paper.md" in said
    said = plan("local_adam", "sync.params=64", "data.partition=iid", *SMALL)
    assert "Rule Adam, IID data: sync.params=64 sync.exp_avg=64" in said
    assert "cost in loss: not measured" in plan("desloc_sgdm", *SMALL)
    assert "Rule " not in plan("quickstart", "sync.params=never", *SMALL)


def test_all_rules_are_printed_without_a_run():
    said = plan("--rules")
    for rule in RULES:
        assert f"{rule.optimizer} {rule.data} {rule.half_lives} {rule.first} {rule.second}" in said
        assert rule.note in said


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_every_preset_with_periods_has_a_plan(preset):
    result = desloc("plan", preset, *SMALL)
    if PARAMS in load(preset).sync:
        assert (result.exit_code, result.stderr) == (0, "")
        assert "Recommended" in result.stdout
    else:
        assert result.exit_code == 2
        assert "sync.params is not set" in result.stderr


def test_it_draws_when_asked_to_and_writes_nothing_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan("quickstart", *SMALL)
    assert not [*tmp_path.iterdir()]
    said = plan("quickstart", "sync.exp_avg_sq=never", *SMALL, "--plot", "plan.png")
    assert said.endswith("drawn into plan.png")
    assert (tmp_path / "plan.png").exists()


@pytest.fixture
def figures(monkeypatch):
    """The figures that a plan draws."""
    made = []

    def keep(*arguments):
        made.append(figure(*arguments))
        return made[-1]

    monkeypatch.setattr(plan_figure, "figure", keep)
    return made


def test_the_figure_has_every_moment_in_a_colour_of_its_own(tmp_path, figures):
    """Also several of one kind, as of an optimizer with two means of the gradient."""
    moments = {f"m{i}": Kind.FIRST_MOMENT for i in range(3)} | {"v": Kind.SECOND_MOMENT}
    run = planned(8, 24, 48, topologies=(Topology.STAR,))
    streams = [replace(run.streams[1], name=name, kind=kind) for name, kind in moments.items()]
    schedule = SyncSchedule({PARAMS: 8, **dict.fromkeys(moments, 24)})
    drawn = replace(run, streams=(run.streams[0], *streams), schedule=schedule)
    plan_figure.draw(drawn, tmp_path / "plan.png")
    lines = {line.get_label(): line.get_color() for line in figures[0][1][-1].lines}
    colours = [lines[name] for name in moments]
    assert len({*colours}) == len(moments)
    assert colours[0] == stream_colours(["exp_avg"], {})["exp_avg"]


@pytest.mark.parametrize("compute", [1e-4, 9000])
def test_the_figure_has_its_times_in_units_that_fit_them(compute, tmp_path, figures):
    run = planned(8, 24, 48, compute=compute, link=Link(bandwidth=2.5e6, latency=0.05))
    for topologies in ((Topology.STAR,), tuple(Topology)):
        plan_figure.draw(replace(run, topologies=topologies), tmp_path / "plan.png")
        _, panels = figures.pop()
        assert len(panels) == len(topologies) + 1
        for panel in panels[:-1]:
            labels = [tick.get_text() for tick in panel.get_yticklabels()]
            assert 2 <= len(labels) <= 8
            assert all(re.fullmatch(r"[\d,]+ (µs|ms|s|min|h|days?)", label) for label in labels)
            assert not any("000 ms" in label for label in labels)


@pytest.mark.parametrize(
    ("topologies", "once_at"),
    [((Topology.STAR,), range(16, 976, 16)), (tuple(Topology), ())],
)
def test_the_heading_of_the_figure_fits_above_its_panels(topologies, once_at, tmp_path, figures):
    run = planned(160, 480, 960, phases=by_stream(8, 128, 256), once_at=once_at)
    plan_figure.draw(replace(run, topologies=topologies), tmp_path / "plan.png")
    made, panels = figures.pop()
    made.draw_without_rendering()  # at its own resolution
    name, subtitle = (text.get_window_extent() for text in made.texts)
    assert subtitle.x1 <= made.bbox.x1
    assert max(panel.get_tightbbox().y1 for panel in panels) < subtitle.y0 < subtitle.y1 < name.y0


def test_a_ring_that_is_not_drawn_sets_no_bandwidth_of_the_star(tmp_path, figures):
    run = planned(16, 48, 96, window_seconds=8, topologies=(Topology.STAR,))
    plan_figure.draw(run, tmp_path / "plan.png")
    _, (times, _) = figures.pop()
    halves = [b for m in run.methods if (b := run.bandwidth_for(m, Topology.STAR, 1))]
    ends = min(run.link.bandwidth, *halves) / 30, max(run.link.bandwidth, *halves) * 30
    assert times.get_xlim() == pytest.approx(ends)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which preset, or how many --params?"),
        (["1.8b"], "no preset of that name"),
        (["1.7b", "sync.parms=3"], "sync.parms"),
        (["1.7b", "sync.params=0"], "the period of 'params'"),
        (["1.7b", "sync.buffers=3"], "sync.buffers: the model has none"),
        (["digits", "--tokens-per-step", "9"], "--tokens-per-step: task=image_classification"),
        (["1.7b", *SMALL, "--plot", "plan.xyz"], "--plot plan.xyz: "),
        (["1.7b", *SMALL, "--plot", "no/such/plan.png"], "--plot no/such/plan.png: "),
    ],
)
def test_bad_input_is_a_sentence_that_names_the_option(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = desloc("plan", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("limits", "values"),
    [
        ("1 to 1e+24", "params=0 workers=0 tokens-per-step=0 flops=inf params=1e+300"),
        ("1 to 1e+24", f"params=1e+30 workers={10**24 + 1} workers={10**400}"),
        ("1e-12 to 1e+24", "value-bytes=0 bandwidth=0 bandwidth=nan step-seconds=0 share=0 rho=0"),
        ("1e-12 to 1e+24", "bandwidth=1e-300"),
        ("0 to 1e+24", "latency=-1 latency=1e+300"),
        ("0 to 1", "overlap=2"),
        ("1e-12 to 1", "mfu=0 mfu=1.5 mfu=1e-300"),
        ("1e-12 to 0.999999", "psi=0 psi=1 psi=1e-300"),
    ],
)
def test_an_option_outside_its_limits_is_refused(limits, values):
    for value in values.split():
        assert refused("plan", "1.7b", f"--{value}") == f"error: --{value}: must be from {limits}"


@pytest.mark.parametrize(
    "widest",
    [
        "params=1e24 bandwidth=1e-12 latency=1e24",
        "params=1e24 tokens-per-step=1e24 mfu=1e-12 flops=1 workers=1",
        f"params=1 tokens-per-step=1 flops=1e24 mfu=1 workers={10**24} bandwidth=1e24",
        "value-bytes=1e24 step-seconds=1e-12 window-seconds=1e24 share=1e-12 bandwidth=1e-12",
        "value-bytes=1e-12 step-seconds=1e24 share=1e24 overlap=1",
        "rho=1e24 psi=1e-12",
        "rho=1e-12 psi=0.999999",
    ],
)
def test_the_widest_values_of_options_give_finite_numbers(widest):
    said = plan("1.7b", *(f"--{each}" for each in widest.split())).lower()
    assert not re.search(r"\b(nan|inf|forever)", said), said
