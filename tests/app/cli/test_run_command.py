"""`desloc run`: what is refused before anything starts, what it prints, what reaches the app."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from command import accepted, desloc
from files import write
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st
from scripts import ROOT

import flower_desloc
from flower_desloc.app.cli import run, run_arguments
from flower_desloc.app.config import load, load_run_config, parse
from flower_desloc.app.config.run_config import app_run_config
from flower_desloc.app.engines import in_process as engine
from flower_desloc.app.engines.simulation import flwr_run


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(engine, "run_in_process", refuse)


@pytest.mark.parametrize("name", list(run.Engine))
def test_a_setting_of_federations_that_the_engine_does_not_use_is_named(name, capsys):
    waits = "federation.timeout=5 federation.on_failure=continue federation.grace=3"
    run.note_unused(load("quickstart", f"federation.data_address=a:1 {waits}"), name)
    said = capsys.readouterr().out.splitlines()
    where = {"simulation": "in a simulation", "inprocess": "by --engine inprocess"}[name]
    waited = ["timeout", "grace"] if name == "inprocess" else []
    assert said == [f"federation.{key} is not used {where}" for key in ("data_address", *waited)]
    run.note_unused(load("quickstart"), name)
    assert capsys.readouterr().out == ""


# --- The configuration comes first -------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quickstrat"], "did you mean quickstart?"),
        (["quickstart", "run.steps=0"], "run.steps=0: must be at least 1"),
        (["quickstart", "run.name=two words"], "run.name=two words: must have 1 to 80"),
        (["quickstart", "data.source=./no where"], "data.source=./no where: there is no such file"),
        (["quickstart", "run.init_from=../nowhere"], "run.init_from=../nowhere: there is no such"),
        (["quickstart", "data.source=path/to/text"], "data.source=path/to/text: there is no such"),
        (["quickstart", "federation.min_clients=9"], "larger than simulation.num_clients=4"),
        (["quickstart", "federation.attendance.8=9"], "at most simulation.num_clients=4"),
        (["desloc_sgdm", "sync.exp_avg=3"], "its streams are params, momentum_buffer"),
        (["quickstart", "--engine", "inprocess", "--workers", "2"], "--workers is for --engine"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(nothing_starts, arguments, said):
    result = desloc("run", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_a_parameter_group_of_no_parameter_of_the_model_is_refused_too(nothing_starts, tmp_path):
    groups = "optimizer.groups=[{names: [nope], lr: 1}]"
    result = desloc("run", "quickstart", groups, "--output-dir", tmp_path)
    assert result.exit_code == 2, result.output
    assert "groups[0].names=nope: matches no trained parameter" in result.stderr


def test_the_quorum_of_a_deployment_is_at_most_its_nodes(capsys):
    words = ["federation.min_clients=6"]
    assert (
        run_arguments.RunArguments.parse("quickstart", words, 6).config.federation.min_clients == 6
    )
    with pytest.raises(typer.Exit):
        run_arguments.RunArguments.parse("quickstart", words, 3)
    assert (
        "federation.min_clients=6: the quorum is larger than --nodes=3" in capsys.readouterr().err
    )


def test_without_a_preset_the_presets_are_listed(nothing_starts):
    result = desloc("run")
    assert result.exit_code == 2, result.output
    for preset in (ROOT / "configs").glob("*.yaml"):
        assert re.search(rf"^  {preset.stem} +\w", result.stderr, re.MULTILINE)


def test_the_version_is_ours_and_flowers():
    ours = re.escape(flower_desloc.__version__)
    assert re.fullmatch(rf"desloc {ours} \(Flower 1\.\d+\.\d+\)\n", accepted("--version"))


def test_a_dry_run_prints_configuration_command_and_the_papers_ratios_and_starts_nothing(
    nothing_starts,
):
    words = "run.steps=1536 sync.params=256 sync.exp_avg=768 sync.exp_avg_sq=1536"
    said = accepted("run", "quickstart", words, "--output-dir", "/o", "--dry-run")
    yaml, _, rest = said.partition("flwr run")
    assert parse(yaml) == load("quickstart", words)
    command = f"flwr run{rest.splitlines()[0]}"
    assert shlex.split(command)[:4] == ["flwr", "run", str(ROOT), "local"]
    assert f'config="quickstart" overrides="{words}" output-dir="/o"' in command
    assert "2.00 times as much" in rest
    assert "170.67 times as much" in rest
    assert re.search(r"exp_avg +2 times 4.3 MB .*\n +exp_avg_sq +1 time 4.3 MB ", rest)


# --- What reaches the app ----------------------------------------------------------------------


def test_lists_and_dictionaries_with_blanks_reach_the_app(nothing_starts):
    words = ["data.domains=[a b, 007]", "federation.attendance={0: 4, 96: 3}", "run.seed=010"]
    said = accepted("run", "quickstart", *words, "--dry-run")
    yaml, _, rest = said.partition("flwr run")
    command = shlex.split(rest.splitlines()[0])
    run_config = parse_config_args([command[command.index("--run-config") + 1]])
    config = load_run_config({**app_run_config(), **run_config})
    assert config == parse(yaml)
    assert (config.data.domains, config.run.seed) == (["a b", "007"], 10)
    assert config.federation.attendance == {0: 4, 96: 3}


LINES = st.text(st.characters(exclude_categories=["Cc", "Cs"], include_characters="\n\t"))


@given(LINES, LINES)
def test_what_flower_reads_from_the_printed_command_is_what_was_meant(overrides, output_dir):
    meant = {"config": "quickstart", "overrides": overrides, "output-dir": output_dir}
    printed = shlex.join(flwr_run(Path("/an app"), meant, {"num-supernodes": 3}))
    command = shlex.split(printed)
    assert command[2] == "/an app"
    assert parse_config_args([command[command.index("--run-config") + 1]]) == meant
    assert parse_config_args([command[command.index("--federation-config") + 1]]) == {
        "num-supernodes": 3
    }


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (["quickstart"], "builtin"),  # a name of ours, whatever else is called so
        (["quickstart", "data.source=two words", "run.steps=7 run.seed=8"], "two words"),
        (["quickstart", "data.source=."], "."),
        (["mine.yaml"], "two words"),
    ],
)
def test_relative_paths_with_blanks_reach_the_app_as_absolute_paths(
    nothing_starts, tmp_path, monkeypatch, arguments, source
):
    here = tmp_path / "my own folder\u00a0"
    for name in ("two words", "builtin"):
        write(here / name / "text.txt", "text\n" * 200)
    write(here / "mine.yaml", "extends: quickstart\ndata: {source: two words}\n")
    monkeypatch.chdir(here)
    lines = accepted("run", *arguments, "--dry-run").splitlines()
    (command,) = [shlex.split(line) for line in lines if line.startswith("flwr run")]
    told = parse_config_args([command[command.index("--run-config") + 1]])
    meant = source if source == "builtin" else str((here / source).resolve())
    assert load(told["config"], told["overrides"]).data.source == meant
    assert told["config"] in ("quickstart", str(here / "mine.yaml"))
    assert told["output-dir"] == str(here / "runs")


# --- In this process ----------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch):
    calls = []
    monkeypatch.setattr(engine, "run_in_process", lambda *args: calls.append(args))
    return calls


def test_a_run_config_changed_in_the_apps_pyproject_changes_every_run(in_process, monkeypatch):
    changed = {**app_run_config(), "seed": 7, "learning-rate": 0.25}
    for module in (run, run_arguments):
        monkeypatch.setattr(module, "app_run_config", lambda: changed)
    words = "optimizer.lr=0.5 simulation.num_clients=3"
    yaml = accepted("run", "quickstart", words, "--dry-run").partition("flwr run")[0]
    assert parse(yaml) == load("quickstart", f"run.seed=7 {words}")
    accepted("run", "quickstart", words, "--engine", "inprocess")
    told = {"config": "quickstart", "overrides": words, "output-dir": str(Path("runs").resolve())}
    assert in_process == [({**changed, **told}, 3)]
    assert load_run_config({**changed, **told}) == parse(yaml)


@pytest.mark.parametrize("flags", [[], ["--verbose"]])
@pytest.mark.usefixtures("in_process")
def test_the_inprocess_engine_fails_in_one_line_unless_asked_for_more(monkeypatch, flags):
    def fail(run_config, num_clients):
        raise RuntimeError("the quorum is gone")

    monkeypatch.setattr(engine, "run_in_process", fail)
    result = desloc("run", "quickstart", "--engine", "inprocess", *flags)
    assert result.exit_code == 1, result.output
    assert ("Traceback" in result.stderr) == bool(flags)
    assert result.stderr.endswith("error: the run failed: RuntimeError: the quorum is gone\n")
    assert flags or len(result.stderr.splitlines()) == 1


# --- A site's own protection --------------------------------------------------------------------


@pytest.mark.parametrize("form", [["--node-config", "{}"], ["--node-config={}"]])
def test_a_misspelt_key_keeps_a_supernode_from_connecting(form, monkeypatch):
    started = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    for key in ("accept_app", "accept-app"):
        words = [word.format(f'{key}="abc" hospital=1') for word in form]
        result = desloc("supernode", "--insecure", *words)
        if key == "accept_app":
            assert (result.exit_code, started) == (2, [])
            assert "accept_app in the node config is no key of a site; accept-app" in result.stderr
    assert [words[-1 - len(form) :] for words in started] == [["--insecure", *words]]


@pytest.mark.parametrize(
    "node_config",
    [
        "site.toml",  # there is none
        "name=bare",  # not TOML
        "required=1 Epsilon=1 eps=2",  # of another app
    ],
)
def test_all_other_node_configs_are_left_to_flower_and_to_the_app(
    node_config, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    result = desloc("supernode", "--node-config", node_config)
    assert (result.exit_code, result.output) == (0, "")
    assert [words[-2:] for words in started] == [["--node-config", node_config]]
