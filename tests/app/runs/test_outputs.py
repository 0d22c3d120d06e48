"""The files of a run are complete, valid and consistent, and so is what it prints."""

import errno
import io
import json
import math
import os
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from recorded import DOMAINS, PERIODS, a_config, a_run_info, record, windows_of
from scripts import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flower_desloc.app.config import ConfigError, parse
from flower_desloc.app.runs import RunFolder, RunRecorder
from flower_desloc.app.runs.figures.curves import drift, heldout
from flower_desloc.app.runs.figures.losses import fill_heldout_loss
from flower_desloc.app.runs.figures.measures import DRIFT, fill
from flower_desloc.app.runs.figures.style import figure
from flower_desloc.app.runs.figures.timeline import fill_averages
from flower_desloc.app.runs.figures.traffic import fill_bytes
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.runs.record import load
from flower_desloc.app.runs.recorder import to_line
from flower_desloc.app.runs.tensorboard import TensorBoard
from flower_desloc.app.runs.terminal import TerminalView, closing
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.schedule import PARAMS, SyncSchedule
from flower_desloc.core.traffic import download_bytes
from flower_desloc.flower.observer import EvaluationRecord, Event


class Terminal(io.StringIO):
    def isatty(self):
        return True


def summary_of(run):
    """Return the summary, which must not hold NaN or infinity: they are not JSON."""
    return json.loads(run.summary.read_text(), parse_constant=pytest.fail)


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def printed():
    return io.StringIO()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, printed):
    """The folder of a finished run, which has ``printed`` what it did."""
    return record(tmp_path_factory.mktemp("runs"), stream=printed)


# The folder


def test_a_new_run_never_gets_an_existing_folder(tmp_path):
    (tmp_path / "a-run-3").write_text("a file of that name is somebody's too")
    made = [RunFolder.create(tmp_path, "a-run").path.name for _ in range(4)]
    assert made == ["a-run", "a-run-2", "a-run-4", "a-run-5"]


def test_runs_that_start_at_the_same_time_get_different_folders(tmp_path):
    together = threading.Barrier(8)

    def start(_):
        together.wait()
        return RunFolder.create(tmp_path / "new", "a-run").path

    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(start, range(8))}) == 8


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_an_output_dir_below_a_file_is_a_config_error(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^output-dir=.*file.*give a folder"):
        RunFolder.create(tmp_path / "file" / below, "a-run")


def test_a_run_folder_without_write_permission_is_a_config_error(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written to"):
        RunFolder(tmp_path).claimed().__enter__()


def test_config_yaml_is_the_complete_configuration(finished):
    assert parse(finished.config.read_text()) == a_config()


def test_a_summary_that_cannot_be_written_leaves_the_previous_one(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path, "a-run")
    run.write_summary({"status": "former"})
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        run.write_summary({"status": "newer"})
    assert summary_of(run) == {"status": "former"}
    assert [path.name for path in run.path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("end", [OSError("disk"), KeyboardInterrupt()])
def test_the_final_model_is_complete_or_absent(tmp_path, end):
    run = RunFolder.create(tmp_path, "a-run")

    def save_half(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        assert not run.final.exists()
        raise end

    with pytest.raises(type(end)):
        run.write_final(save_half)
    assert not list(run.path.iterdir())
    run.write_final(lambda folder: (folder / "model.safetensors").touch())
    assert [path.name for path in run.final.iterdir()] == ["model.safetensors"]


# metrics.jsonl


def test_a_diverged_run_writes_valid_json(tmp_path):
    def diverge(window):
        if window.round != 3:
            return window
        clients = {
            name: replace(client, losses=[math.nan, math.inf], train_loss=math.nan)
            for name, client in window.clients.items()
        }
        bad = {"loss": math.nan, "perplexity": math.inf}
        central = EvaluationRecord(overall=bad, parts={"library": bad})
        return replace(window, clients=clients, train_loss=math.nan, central=central)

    run = record(tmp_path, change=diverge)
    lines = run.metrics.read_text().splitlines()
    line = [json.loads(text, parse_constant=pytest.fail) for text in lines][3]
    assert line["train_loss"] is None
    assert line["clients"]["client-0"]["losses"] == [None, None]
    assert line["evaluation"]["central"]["overall"]["perplexity"] is None
    course = summary_of(run)["evaluation"]["central"]["loss"]
    assert course["best"] == course["final"]  # a NaN is never the best


def test_a_line_of_metrics_has_the_documented_keys(finished):
    first, *lines = read_lines(finished.metrics)
    assert (first["step"], first["train_loss"]) == (0, None)
    for line in lines:
        assert line.keys() == {
            "round", "start", "step", "streams", "bytes_up", "bytes_down", "framed_bytes_up",
            "framed_bytes_down", "train_loss", "seconds", "seconds_split", "clients", "left_out",
            "events", "drift", "evaluation",
        }  # fmt: skip
        parts = dict(line["seconds_split"])
        assert parts.pop("total") == line["seconds"] == pytest.approx(sum(parts.values()))
        assert line["clients"]["client-0"].keys() == {
            "num_examples", "train_loss", "losses", "grad_norms", "learning_rates",
            "update_norm", "param_norm", "seconds", "steps",
        }  # fmt: skip
        assert line["drift"].keys() == set(line["streams"])
        assert line["drift"]["params"].keys() == {"spread", "moved", "norm"}
    assert [line["step"] for line in lines if line["evaluation"]] == [48, 96, 144, 192]
    assert lines[-1]["evaluation"].keys() == {"central", "federated"}


def test_a_full_disk_leaves_complete_lines_and_an_error_that_names_the_file(tmp_path):
    run = RunFolder.create(tmp_path, "a-run")
    recorder = RunRecorder(a_config(), run, stream=io.StringIO())
    recorder.started(a_run_info())
    before, first, second, *_ = windows_of()
    recorder.window(before)
    recorder.window(first)
    whole = run.metrics.read_bytes()
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The limit falls inside the line: the system takes a part of it, then refuses.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 40, former[1]))
    try:
        with pytest.raises(OSError, match=r"cannot record the window.*metrics\.jsonl"):
            recorder.window(second)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert run.metrics.read_bytes() == whole
    recorder.finish("failed", error="disk full")
    assert summary_of(run)["steps"] == first.step


def test_an_incomplete_last_line_is_not_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n{"rou')
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [{"round": 0}]
    assert list(read_lines(tmp_path / "not-there.jsonl")) == []


# summary.json


def test_the_totals_are_sums_over_the_windows_and_half_of_local_adams(finished):
    lines, summary = list(read_lines(finished.metrics)), summary_of(finished)
    measured, analytic = summary["bytes"]["measured"], summary["bytes"]["analytic"]
    for way in ("up", "down"):
        assert measured[way] == analytic[way]
        total = measured[way].pop("total")
        assert total == sum(measured[way].values())
        for stream in PERIODS:
            by_window = [line[f"bytes_{way}"].get(stream, 0) for line in lines]
            assert measured[way][stream] == sum(by_window)
        assert measured[f"framed_{way}"] == sum(line[f"framed_bytes_{way}"] for line in lines)
    assert summary["ratio"] == {"local_adam": 2.0, "ddp": 192 / 18}
    assert summary["syncs"] == {"params": 12, "exp_avg": 4, "exp_avg_sq": 2}
    assert summary["seconds"]["total"] == pytest.approx(sum(line["seconds"] for line in lines))
    assert (summary["windows"], summary["clients"]) == (12, 4)
    assert summary["weights_sha256"] == "5ha256"


def test_the_page_of_the_report_lists_every_key_of_the_summary(finished):
    page = (ROOT / "docs" / "reference" / "report.md").read_text(encoding="utf-8")
    table = page.partition("## summary.json")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(summary_of(finished))


def test_the_summary_has_what_the_steps_and_the_averages_depend_on(finished):
    found, config = summary_of(finished)["config"], a_config()
    assert found["lr"] == config.optimizer.lr
    assert found["sync_bound"] == config.sync_bound


def test_the_summary_has_the_first_the_final_and_the_best_of_each_metric(tmp_path):
    losses = {0: 5.0, 48: 2.0, 96: 1.5, 144: 1.75, 192: 1.6}

    def change(window):
        if window.central is None:
            return window
        overall = {"loss": losses[window.step], "accuracy": 1 / losses[window.step]}
        return replace(window, federated=None, central=EvaluationRecord(overall=overall, parts={}))

    steps = {"final_step": 192, "best_step": 96}
    assert summary_of(record(tmp_path, change=change))["evaluation"] == {
        "central": {
            "loss": {"first": 5.0, "final": 1.6, "best": 1.5} | steps,
            "accuracy": {"first": 0.2, "final": 0.625, "best": 1 / 1.5} | steps,
        }
    }


@pytest.mark.parametrize("private", ["privacy.secure_aggregation=true", "privacy.epsilon=3"])
def test_a_private_run_has_the_counted_totals(private, tmp_path, monkeypatch):
    if "epsilon" in private:
        pytest.importorskip("opacus")
        accountant = "flower_desloc.privacy.accounting._epsilon"  # which takes seconds
        monkeypatch.setattr(accountant, lambda *_: 0.0)
    words = ["run.steps=4", "sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=4"]
    run = tiny.train(tmp_path, *tiny.TINY, *words, private, clients=3)
    counted = tiny.summary(run)["bytes"]
    for way in ("up", "down"):
        assert counted["measured"][way] == counted["analytic"][way]


def test_other_methods_are_counted_with_the_clients_that_took_part(tmp_path):
    def halve(window):
        present = dict(list(window.clients.items())[window.round % 2 :: 2])
        up = {stream: count // 2 for stream, count in window.traffic.up.items()}
        return replace(window, clients=present, traffic=replace(window.traffic, up=up))

    summary = summary_of(record(tmp_path, change=halve))
    assert summary["clients"] == 4
    assert summary["bytes"]["measured"]["up"] == summary["bytes"]["analytic"]["up"]
    assert summary["ratio"]["local_adam"] == 2.0


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (RuntimeError("client-2 is gone"), "RuntimeError: client-2 is gone"),
        (KeyboardInterrupt(), "the run was stopped"),
        (SystemExit(143), "the run was stopped"),
    ],
)
def test_a_run_that_is_cut_off_has_a_summary(tmp_path, end, said):
    run, stream = RunFolder.create(tmp_path, "a-run"), io.StringIO()

    def train():
        with RunRecorder(a_config(), run, stream=stream) as recorder:
            recorder.started(a_run_info())
            for window in windows_of():
                if window.step > 100:
                    raise end
                recorder.window(window)

    with pytest.raises(type(end)):
        train()
    summary = summary_of(run)
    assert (summary["status"], summary["error"]) == ("failed", said)
    assert summary["steps"] == list(read_lines(run.metrics))[-1]["step"] == 96
    assert summary["bytes"]["measured"]["up"] == summary["bytes"]["analytic"]["up"]
    assert summary["ratio"]["local_adam"] == 2.0
    assert f"failed after 96 steps in 0:28: {said}" in stream.getvalue()


def test_a_run_that_never_started_has_a_summary(tmp_path):
    run, stream = RunFolder.create(tmp_path, "a-run"), io.StringIO()
    recorder = RunRecorder(a_config(), run, stream=stream)
    recorder.finish("failed", error="no client came")
    recorder.finish("completed")  # too late
    assert summary_of(run)["error"] == "no client came"
    assert summary_of(run)["ratio"] == {"local_adam": None, "ddp": None}
    assert stream.getvalue().count("folder: ") == 1


PERIOD = st.integers(1, 9) | st.just("never")
STATES = st.dictionaries(st.sampled_from(["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]), PERIOD)


@given(
    periods=st.builds(lambda params, states: {PARAMS: params, **states}, PERIOD, STATES),
    coin_seed=st.none() | st.integers(0, 5),
    num_steps=st.integers(1, 40),
    federated=st.booleans(),
    eval_every=st.integers(1, 20),
)
def test_download_bytes_are_those_that_a_client_lacks(
    periods, coin_seed, num_steps, federated, eval_every
):
    schedule = SyncSchedule(periods, coin_seed)
    sizes = {stream: 10 + i for i, stream in enumerate(periods)}
    compressed = {stream: 1 + i for i, stream in enumerate(periods)}
    versions, sent = dict.fromkeys(periods, 0), dict.fromkeys(periods, 0)
    held = {**versions, PARAMS: None}  # zero states need no sending

    def send(streams):
        for stream in streams:
            if held[stream] != versions[stream]:
                sent[stream] += (compressed if versions[stream] else sizes)[stream]
                held[stream] = versions[stream]

    if federated:
        send([PARAMS])
    for window in schedule.windows(num_steps):
        send(versions)
        for stream in window.due:
            versions[stream] = window.stop
        evaluates = window.stop // eval_every > window.start // eval_every
        if federated and (window.stop == num_steps or (PARAMS in window.due and evaluates)):
            send([PARAMS])
    assert download_bytes(schedule, sizes, compressed, num_steps, federated=federated) == sent


# The views


def test_tensorboard_has_every_curve(finished):
    events = EventAccumulator(str(finished.tensorboard))
    events.Reload()
    assert {*events.Tags()["scalars"]} >= {
        "loss/mean", "loss/client-0", "grad_norm/client-3", "learning_rate",
        "update_norm/client-0", "param_norm/client-0",
        "heldout_perplexity/central", "heldout_perplexity/central/library",
        "heldout_bits_per_byte/central", "heldout_bits_per_byte/federated/client-2",
        "heldout_loss/federated", "bytes_up/params", "bytes_up/total", "bytes_down/exp_avg_sq",
        "drift/params", "drift/exp_avg", "change/params",
    }  # fmt: skip
    assert [event.step for event in events.Scalars("loss/mean")] == list(range(1, 193))
    assert [event.step for event in events.Scalars("drift/exp_avg_sq")] == [96, 192]
    total = summary_of(finished)["bytes"]["measured"]["up"]["total"]
    last = events.Scalars("bytes_up/total")[-1]
    assert (last.step, last.value) == (192, pytest.approx(total))


def test_a_view_or_report_that_fails_is_logged_once_and_the_run_continues(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(TensorBoard, "window", no_space)
    monkeypatch.setattr("flower_desloc.app.runs.report.write_page", no_space)
    run = record(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} failed and is left out; the run is not affected: "
        "OSError(28, 'No space left on device')"
        for name in ("TensorBoard", "report.html")
    ]
    assert len(list(read_lines(run.metrics))) == 13
    assert summary_of(run)["status"] == "completed"


def test_a_run_prints_the_streams_loss_bytes_and_time_of_windows_and_their_totals(
    finished, printed
):
    text = printed.getvalue()
    assert text.startswith("run desloc: waiting for its clients")  # before any has come
    assert re.search(
        r"\nstep  48/192  window  3/12  synced params exp_avg +loss  2\.\d{3}"
        r"  up  4\.4 MB \(Local Adam 9\.9 MB, DDP 52\.8 MB\)  \d:\d\d, 0:36 left"
        r"\nstep  48/192  held-out loss 2\.\d{3} \(ppl 16\.\d\), on clients 2\.\d{3} \(ppl .*\)\n",
        text,
    )
    assert "  0:52, 0:00 left\nstep 192/192  held-out" in text
    closing = text.split("\n\n")[-1]
    assert "\ncompleted after 192 steps in 0:52\n" in closing
    assert re.search(r"exp_avg +every 48 +4 +4\.4 MB +4\.4 MB +13\.2 MB", closing)
    assert re.search(r"total +19\.8 MB +19\.8 MB +39\.6 MB", closing)
    assert "Local Adam 39.6 MB, 2.00 times as much; DDP 211 MB, 10.7 times as much" in closing
    assert re.search(r"held-out loss: 5\.\d{3} to 1\.\d{3}; perplexity", closing)
    assert closing.endswith(f"folder: {finished.path}\n")


def test_clients_that_join_or_are_left_out_are_printed(tmp_path):
    stream = io.StringIO()
    progress = TerminalView(a_config(), tmp_path, stream)
    progress.started(a_run_info())
    progress.joined("client-9", ClientInfo(device="cuda:0"))
    out = Event(kind="refused", client="client-2", what="its [params]\n hold NaN")
    window = replace([*windows_of()][3], events=[out])
    progress.window(to_line(window))
    assert "\njoined: client-9: device cuda:0\n" in stream.getvalue()
    assert "\nstep  48/192  refused: client-2: its [params] hold NaN\n" in stream.getvalue()


def test_a_training_loss_that_clients_hide_is_not_printed_as_a_number(tmp_path):
    stream = io.StringIO()
    record(tmp_path, change=lambda window: replace(window, train_loss=math.nan), stream=stream)
    assert stream.getvalue().count("  loss hidden  up") == 12
    assert "nan" not in stream.getvalue()


def test_clients_that_leave_and_return_are_printed(tmp_path):
    told = {
        32: Event(kind="left", client="client-1", what="node 7 is not online"),
        64: Event(kind="returned", client="client-1", what="node 7 is online again"),
        96: Event(kind="repeated", client="", what="1 usable replies"),
        112: Event(kind="joined", client="client-4", what="at node 9"),
    }

    def change(window):
        return replace(window, events=[told[window.step]] if window.step in told else [])

    stream = io.StringIO()
    record(tmp_path, change=change, stream=stream)
    for line in (
        "step  32/192  left: client-1: node 7 is not online",
        "step  64/192  returned: client-1: node 7 is online again",
        "step  96/192  repeated: 1 usable replies",
        "events: left 1, returned 1, repeated 1, joined 1; each is in report.html",
    ):
        assert f"\n{line}\n" in stream.getvalue()
    assert "joined: " not in stream.getvalue()  # printed when it joined


def test_a_schedule_is_told_in_the_same_words_everywhere(finished):
    run = load(finished.path)
    run.summary["config"].update(once_at=[20], phases={"exp_avg": 16})
    told = {"params": "every 16 and after 20", "exp_avg": "every 48 from 16 and after 20"}
    _, (panel, _) = figure(1, 2, 4)
    fill_averages(panel, run)
    labels = [label.get_text() for label in panel.get_yticklabels()]
    for stream, words in told.items():
        assert f"{stream} {words}" in run.averaged
        assert re.search(rf"^{stream} +{words} ", closing(run), re.MULTILINE)
        assert f"{stream}, {words}" in labels


def test_a_terminal_shows_a_progress_bar_and_gets_its_cursor_back(tmp_path):
    stream = Terminal()
    record(tmp_path, stream=stream)
    assert "held-out" in stream.getvalue()
    hidden, shown = "\x1b[?25l", "\x1b[?25h"  # the cursor
    assert -1 < stream.getvalue().rfind(hidden) < stream.getvalue().rfind(shown)
    assert "synced" not in stream.getvalue()


def test_a_stream_that_flower_copies_into_a_log_gets_plain_lines(tmp_path):
    stream = Terminal()
    stream.write = stream.write  # type: ignore[method-assign]  # as Flower does to stdout
    record(tmp_path, steps=48, stream=stream, clients=1)
    assert "\x1b[" not in stream.getvalue()


def test_the_panels_of_the_overview_show_the_numbers_of_the_record(finished):
    run = load(finished.path)
    _, (loss, sent, averages, drifts) = figure(2, 2, 7)
    fill_heldout_loss(loss, run)
    assert {text.get_text() for text in loss.texts} >= {*DOMAINS, "training"}
    assert [*np.asarray(loss.lines[-1].get_ydata())] == [*heldout(run, "loss").y]
    assert [*np.asarray(loss.lines[-1].get_xdata())] == [0, 48, 96, 144, 192]
    fill_bytes(sent, [run])
    bars: list[Any] = sent.patches[:3]
    widths = [bar.get_width() for bar in bars]
    assert widths == [run.summary["bytes"]["measured"]["up"][stream] for stream in PERIODS]
    factors = {"39.6 MB, 2.00 times this run", "211 MB, 10.7 times this run →"}
    assert {text.get_text() for text in sent.texts} >= factors
    fill_averages(averages, run)
    assert [len(bars.get_paths()) for bars in averages.collections] == [12, 4, 2]
    fill(drifts, [run], DRIFT)
    for line, stream in zip(drifts.lines, PERIODS, strict=True):
        assert [*np.asarray(line.get_ydata())] == [*drift(run)[stream].y]
