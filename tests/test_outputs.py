"""The files of a run are complete, valid and consistent, and so is what it prints."""

import errno
import io
import json
import math
import os
import random
import re
import resource
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flower_desloc.config import Config, ConfigError, parse
from flower_desloc.core.averaging import Drift
from flower_desloc.core.schedule import PARAMS, SyncSchedule, Window
from flower_desloc.core.traffic import download_bytes
from flower_desloc.flower.observer import (
    ClientRecord,
    EvaluationRecord,
    Plan,
    Traffic,
    WindowRecord,
)
from flower_desloc.runs import RunFolder, RunRecorder
from flower_desloc.runs.figures.curves import drift, heldout
from flower_desloc.runs.figures.losses import fill_heldout_loss
from flower_desloc.runs.figures.measures import DRIFT, fill
from flower_desloc.runs.figures.style import figure
from flower_desloc.runs.figures.timeline import fill_averages
from flower_desloc.runs.figures.traffic import fill_bytes
from flower_desloc.runs.folder import read_lines
from flower_desloc.runs.record import load
from flower_desloc.runs.recorder import to_line
from flower_desloc.runs.tensorboard import TensorBoard
from flower_desloc.runs.terminal import TerminalView

PERIODS = {"params": 16, "exp_avg": 48, "exp_avg_sq": 96}
SIZES = dict.fromkeys(PERIODS, 275_200)
DOMAINS = ("library", "docstrings", "reference", "descriptions")


def a_config(periods: Mapping[str, Any] = PERIODS, steps: int = 192, **federation: Any) -> Config:
    config = Config(sync=dict(periods))
    config.run.steps = steps
    for key, value in federation.items():
        setattr(config.federation, key, value)
    return config


def a_plan(schedule: SyncSchedule, steps: int, sizes: Mapping[str, int], clients: int = 4) -> Plan:
    return Plan(
        num_steps=steps,
        num_windows=len(list(schedule.windows(steps))),
        stream_bytes=sizes,
        clients={
            f"client-{i}": {"device": "cpu", f"data/{DOMAINS[i % 4]}": "1000"}
            for i in range(clients)
        },
    )


def windows_of(
    schedule: SyncSchedule,
    steps: int,
    sizes: Mapping[str, int],
    clients: int = 4,
    eval_every: int = 48,
    loss_at_end: float = 1.9,
) -> Iterator[WindowRecord]:
    """A run whose measured bytes are the formula's and whose losses look like a small model's."""
    rng = random.Random(7)
    names = [f"client-{i}" for i in range(clients)]
    decay = steps / 6

    def loss(step: int, part: int = 0) -> float:
        return loss_at_end + 0.12 * (part - 1) + (5.55 - loss_at_end) * math.exp(-step / decay)

    def evaluation(step: int, parts: tuple[str, ...] | list[str], bias: float) -> EvaluationRecord:
        values = [loss(step, i) + bias for i in range(len(parts))]
        return EvaluationRecord(
            overall=metrics(sum(values) / len(values)),
            parts={part: metrics(value) for part, value in zip(parts, values, strict=True)},
        )

    def metrics(nats: float) -> dict[str, float]:
        return {
            "loss": nats,
            "perplexity": math.exp(nats),
            "bits_per_byte": nats / math.log(2),
            "nats_per_byte": nats,
        }

    def seconds(total: float) -> dict[str, float]:
        return {"total": total, "clients": total * 0.7, "averaging": 0.05, "evaluation": 0.2}

    def traffic(up: frozenset[str], down: list[str]) -> Traffic:
        return Traffic(
            up={s: clients * sizes[s] for s in up},
            down={s: clients * sizes[s] * down.count(s) for s in down},
            framed_up=sum(clients * (sizes[s] + 900) for s in up) + 4000,
            framed_down=sum(clients * (sizes[s] + 900) for s in down) + 4000,
        )

    yield WindowRecord(
        round=0, start=0, step=0, streams=[], train_loss=None, clients={}, left_out={},
        traffic=traffic(frozenset(), [PARAMS]), drift={}, seconds=seconds(0.9),
        central=evaluation(0, DOMAINS, 0.0), federated=evaluation(0, names, 0.02),
    )  # fmt: skip
    lacking: set[str] = set()
    for number, window in enumerate(schedule.windows(steps), start=1):
        span = range(window.start + 1, window.stop + 1)
        records = {
            name: ClientRecord(
                num_examples=8 * len(span),
                train_loss=loss(window.stop, i),
                losses=[loss(step, i) + rng.gauss(0, 0.05) for step in span],
                grad_norms=[1 + rng.random() for _ in span],
                learning_rates=[0.002 * min(1, step / 16) for step in span],
                update_norm=0.4,
                param_norm=20 + window.stop / 50,
                seconds=3.1,
            )
            for i, name in enumerate(names)
        }
        evaluates = PARAMS in window.due and (
            window.stop == steps or window.stop // eval_every > window.start // eval_every
        )
        # Training sends what the clients lack, and evaluation the params, which is one thing less.
        down = [*sorted(lacking), *([PARAMS] if evaluates else [])]
        lacking = set(window.due) - ({PARAMS} if evaluates else set())
        yield WindowRecord(
            round=number, start=window.start, step=window.stop, streams=order(schedule, window),
            train_loss=sum(r.train_loss for r in records.values()) / clients,
            clients=records, left_out={}, traffic=traffic(window.due, down),
            drift={
                s: Drift(
                    spread=scale * (0.6 + math.exp(-window.stop / decay)) * rng.uniform(0.9, 1.1),
                    moved=2 * scale, norm=20.0,
                )
                for s, scale in zip(PERIODS, (0.35, 6.0, 2.2), strict=False) if s in window.due
            },
            seconds=seconds(4.0),
            central=evaluation(window.stop, DOMAINS, 0.0) if evaluates else None,
            federated=evaluation(window.stop, names, 0.02) if evaluates else None,
        )  # fmt: skip


def order(schedule: SyncSchedule, window: Window) -> list[str]:
    return [stream for stream in schedule.periods if stream in window.due]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(
    folder: Path,
    periods: Mapping[str, Any] = PERIODS,
    steps: int = 192,
    *,
    change: Any = lambda window: window,
    stream: io.StringIO | None = None,
    clients: int = 4,
    finish: bool = True,
) -> tuple[RunRecorder, RunFolder]:
    """Record the run of ``windows_of``."""
    schedule = SyncSchedule(periods)
    sizes = dict.fromkeys(periods, 275_200)
    run = RunFolder.create(folder, "a-run")
    recorder = RunRecorder(a_config(periods, steps), run, stream=stream or io.StringIO())
    recorder.started(a_plan(schedule, steps, sizes, clients))
    for window in windows_of(schedule, steps, sizes, clients):
        recorder.window(change(window))
    if finish:
        recorder.finish("completed", "5ha256")
    return recorder, run


def summary_of(run: RunFolder) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    loaded = json.loads(run.summary.read_text(), parse_constant=refuse)
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(autouse=True)
def _no_overview(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures at the end of a run: they take a second."""
    monkeypatch.setattr("flower_desloc.runs.figures.overview.draw", lambda *_: None)
    monkeypatch.setattr(
        "flower_desloc.runs.figures.partition.draw_partition", lambda *_, **__: None
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """A finished run's folder, and what it printed."""
    stream = io.StringIO()
    _, run = record(tmp_path_factory.mktemp("runs"), stream=stream)
    return run, stream.getvalue()


# The folder


def test_a_new_run_never_gets_an_existing_folder(tmp_path: Path) -> None:
    (tmp_path / "a-run-3").write_text("a file of that name is somebody's too")
    made = [RunFolder.create(tmp_path, "a-run").path.name for _ in range(4)]
    assert made == ["a-run", "a-run-2", "a-run-4", "a-run-5"]


def test_runs_that_start_at_the_same_time_get_different_folders(tmp_path: Path) -> None:
    together, made = threading.Barrier(8), []

    def start() -> None:
        together.wait()
        made.append(RunFolder.create(tmp_path / "new", "a-run").path)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_an_output_dir_below_a_file_is_a_config_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^output-dir=.*file.*give a folder"):
        RunFolder.create(tmp_path / "file" / below, "a-run")


def test_a_run_folder_without_write_permission_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written to"):
        RunFolder(tmp_path).claimed().__enter__()


def test_config_yaml_is_the_complete_configuration(finished: tuple[RunFolder, str]) -> None:
    assert parse(finished[0].config.read_text()) == a_config()


def test_a_summary_that_cannot_be_written_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path, "a-run")
    run.write_summary({"status": "former"})
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        run.write_summary({"status": "newer"})
    assert summary_of(run) == {"status": "former"}
    assert [path.name for path in run.path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("end", [OSError("disk"), KeyboardInterrupt()])
def test_the_final_model_is_complete_or_absent(tmp_path: Path, end: BaseException) -> None:
    run = RunFolder.create(tmp_path, "a-run")

    def save_half(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        assert not run.final.exists()
        raise end

    with pytest.raises(type(end)):
        run.write_final(save_half)
    assert not list(run.path.iterdir())
    run.write_final(lambda folder: (folder / "model.safetensors").touch())
    assert [path.name for path in run.final.iterdir()] == ["model.safetensors"]


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# metrics.jsonl


def test_a_diverged_run_writes_valid_json(tmp_path: Path) -> None:
    def diverge(window: WindowRecord) -> WindowRecord:
        if window.round != 3:
            return window
        clients = {
            name: replace(client, losses=[math.nan, math.inf], train_loss=math.nan)
            for name, client in window.clients.items()
        }
        bad = {"loss": math.nan, "perplexity": math.inf, "nats_per_byte": math.nan}
        return replace(
            window,
            clients=clients,
            train_loss=math.nan,
            central=EvaluationRecord(overall=bad, parts={"library": bad}),
        )

    _, run = record(tmp_path, change=diverge)
    text = run.metrics.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert [json.loads(line)["round"] for line in text.splitlines()] == list(range(13))
    line = list(read_lines(run.metrics))[3]
    assert line["train_loss"] is None
    assert line["clients"]["client-0"]["losses"] == [None, None]
    assert line["evaluation"]["central"]["overall"]["perplexity"] is None
    course = summary_of(run)["evaluation"]["central"]["loss"]
    assert course["best"] == course["final"]  # a NaN is never the best


def test_a_line_of_metrics_has_the_documented_keys(finished: tuple[RunFolder, str]) -> None:
    first, *lines = read_lines(finished[0].metrics)
    assert first["step"] == 0
    assert first["train_loss"] is None
    for line in lines:
        assert line.keys() >= {
            "round", "step", "streams", "bytes_up", "bytes_down", "framed_bytes_up",
            "framed_bytes_down", "train_loss", "seconds", "seconds_split", "clients", "left_out",
            "events", "drift",
        }  # fmt: skip
        parts = dict(line["seconds_split"])
        assert parts.pop("total") == line["seconds"] == pytest.approx(sum(parts.values()))
        assert line["clients"]["client-0"].keys() == {
            "num_examples", "train_loss", "losses", "grad_norms", "learning_rates",
            "update_norm", "param_norm", "seconds", "steps",
        }  # fmt: skip
        assert line["drift"].keys() == set(line["streams"])
        assert line["drift"]["params"].keys() == {"spread", "moved", "norm"}
    assert [line["step"] for line in lines if "evaluation" in line] == [48, 96, 144, 192]
    assert lines[-1]["evaluation"].keys() == {"central", "federated"}


def test_a_full_disk_leaves_complete_lines_and_an_error_that_names_the_file(tmp_path: Path) -> None:
    recorder, run = record(tmp_path, finish=False)
    whole = run.metrics.read_bytes()
    window = next(windows_of(SyncSchedule(PERIODS), 192, SIZES))
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The limit falls inside the line: the system takes a part of it, then refuses.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 40, former[1]))
    try:
        with pytest.raises(OSError, match=r"cannot record the window.*metrics\.jsonl"):
            recorder.window(window)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert run.metrics.read_bytes() == whole
    recorder.finish("failed", error="disk full")
    assert summary_of(run)["steps"] == 192


def test_an_incomplete_last_line_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n{"rou')
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [{"round": 0}]
    assert list(read_lines(tmp_path / "not-there.jsonl")) == []


# summary.json


def test_periods_16_48_96_send_half_of_local_adam(finished: tuple[RunFolder, str]) -> None:
    summary = summary_of(finished[0])
    assert summary["bytes"]["measured"]["up"] == summary["bytes"]["analytic"]["up"]
    assert summary["bytes"]["measured"]["down"] == summary["bytes"]["analytic"]["down"]
    assert summary["ratio"] == {"local_adam": 2.0, "ddp": 192 / 18}


def test_the_totals_are_sums_over_the_windows(
    finished: tuple[RunFolder, str],
) -> None:
    lines, summary = list(read_lines(finished[0].metrics)), summary_of(finished[0])
    measured = summary["bytes"]["measured"]
    for way in ("up", "down"):
        total = measured[way].pop("total")
        assert total == sum(measured[way].values())
        for stream in PERIODS:
            by_window = [line[f"bytes_{way}"].get(stream, 0) for line in lines]
            assert measured[way][stream] == sum(by_window)
        assert measured[f"framed_{way}"] == sum(line[f"framed_bytes_{way}"] for line in lines)
    assert summary["syncs"] == {"params": 12, "exp_avg": 4, "exp_avg_sq": 2}
    assert summary["seconds"]["total"] == pytest.approx(sum(line["seconds"] for line in lines))
    assert summary["windows"] == 12
    assert summary["clients"] == 4
    assert summary["weights_sha256"] == "5ha256"


def test_the_summary_has_the_first_the_final_and_the_best_of_each_metric(tmp_path: Path) -> None:
    losses = {0: 5.0, 48: 2.0, 96: 1.5, 144: 1.75, 192: 1.6}

    def change(window: WindowRecord) -> WindowRecord:
        if window.central is None:
            return window
        overall = {"loss": losses[window.step], "accuracy": 1 / losses[window.step]}
        return replace(window, federated=None, central=EvaluationRecord(overall=overall, parts={}))

    _, run = record(tmp_path, change=change)
    steps = {"final_step": 192, "best_step": 96}
    assert summary_of(run)["evaluation"] == {
        "central": {
            "loss": {"first": 5.0, "final": 1.6, "best": 1.5} | steps,
            "accuracy": {"first": 0.2, "final": 0.625, "best": 1 / 1.5} | steps,
        }
    }


def test_other_methods_are_counted_with_the_clients_that_took_part(tmp_path: Path) -> None:
    def halve(window: WindowRecord) -> WindowRecord:
        present = dict(list(window.clients.items())[window.round % 2 :: 2])
        traffic = replace(
            window.traffic, up={s: count // 2 for s, count in window.traffic.up.items()}
        )
        return replace(window, clients=present, traffic=traffic)

    _, run = record(tmp_path, change=halve)
    summary = summary_of(run)
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
def test_a_run_that_is_cut_off_has_a_summary(tmp_path: Path, end: BaseException, said: str) -> None:
    schedule, run = SyncSchedule(PERIODS), RunFolder.create(tmp_path, "a-run")
    stream = io.StringIO()

    def train() -> None:
        with RunRecorder(a_config(), run, stream=stream) as recorder:
            recorder.started(a_plan(schedule, 192, SIZES))
            for window in windows_of(schedule, 192, SIZES):
                if window.step > 100:
                    raise end
                recorder.window(window)

    with pytest.raises(type(end)):
        train()
    summary = summary_of(run)
    assert summary["status"] == "failed"
    assert summary["error"] == said
    assert summary["steps"] == list(read_lines(run.metrics))[-1]["step"] == 96
    measured, analytic = summary["bytes"]["measured"], summary["bytes"]["analytic"]
    assert measured["up"] == analytic["up"]
    assert summary["ratio"]["local_adam"] == 2.0
    assert f"failed after 96 steps in 0:25: {summary['error']}" in stream.getvalue()


def test_a_run_that_never_started_has_a_summary(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a-run")
    stream = io.StringIO()
    recorder = RunRecorder(a_config(), run, stream=stream)
    recorder.finish("failed", error="no client came")
    recorder.finish("completed")  # too late
    assert summary_of(run)["error"] == "no client came"
    assert summary_of(run)["ratio"] == {"local_adam": None, "ddp": None}
    assert stream.getvalue().count("folder: ") == 1


periods = st.dictionaries(
    st.sampled_from(["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    st.one_of(st.integers(1, 9), st.just("never")),
).flatmap(
    lambda states: st.one_of(st.integers(1, 9), st.just("never")).map(
        lambda period: {PARAMS: period, **states}
    )
)
schedules = st.builds(SyncSchedule, periods, st.one_of(st.none(), st.integers(0, 5)))
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(
    schedule=schedules,
    num_steps=st.integers(1, 40),
    federated=st.booleans(),
    eval_every=st.integers(1, 20),
)
def test_download_bytes_are_those_that_a_client_lacks(
    schedule: SyncSchedule, num_steps: int, federated: bool, eval_every: int
) -> None:
    sizes = {stream: 10 + i for i, stream in enumerate(schedule.periods)}
    wire = {stream: 1 + i for i, stream in enumerate(schedule.periods)}
    versions = dict.fromkeys(schedule.periods, 0)
    held: dict[str, int | None] = {**versions, PARAMS: None}  # zero states need no sending
    sent = dict.fromkeys(schedule.periods, 0)

    def send(streams: Any) -> None:
        for stream in streams:
            if held[stream] != versions[stream]:
                sent[stream] += (wire if versions[stream] else sizes)[stream]
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
    assert download_bytes(schedule, sizes, wire, num_steps, federated=federated) == sent


# TensorBoard


def test_tensorboard_has_every_curve(finished: tuple[RunFolder, str]) -> None:
    events = EventAccumulator(str(finished[0].tensorboard))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {
        "loss/mean", "loss/client-0", "grad_norm/client-3", "learning_rate",
        "update_norm/client-0", "param_norm/client-0",
        "heldout_perplexity/central", "heldout_perplexity/central/library",
        "heldout_bits_per_byte/central", "heldout_bits_per_byte/federated/client-2",
        "heldout_loss/federated", "bytes_up/params", "bytes_up/total", "bytes_down/exp_avg_sq",
        "drift/params", "drift/exp_avg", "change/params",
    }  # fmt: skip
    assert [event.step for event in events.Scalars("loss/mean")] == list(range(1, 193))
    assert [event.step for event in events.Scalars("drift/exp_avg_sq")] == [96, 192]
    total = summary_of(finished[0])["bytes"]["measured"]["up"]["total"]
    last = events.Scalars("bytes_up/total")[-1]
    assert (last.step, last.value) == (192, pytest.approx(total))


def test_a_view_or_report_that_fails_is_logged_once_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TensorBoard, "window", no_space)
    monkeypatch.setattr("flower_desloc.runs.report.write_page", no_space)
    _, run = record(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} failed and is left out; the run is not affected: "
        "OSError(28, 'No space left on device')"
        for name in ("TensorBoard", "report.html")
    ]
    assert len(list(read_lines(run.metrics))) == 13
    assert summary_of(run)["status"] == "completed"
    assert not run.report.exists()


# The terminal


def test_a_printed_line_has_streams_loss_bytes_and_time(
    finished: tuple[RunFolder, str],
) -> None:
    lines = [line for line in finished[1].splitlines() if line.startswith("step")]
    third = next(line for line in lines if "window  3/12" in line)
    assert re.fullmatch(
        r"step  48/192  window  3/12  synced params exp_avg +loss  2\.\d{3}"
        r"  up  4\.4 MB \(Local Adam 9\.9 MB, DDP 52\.8 MB\)  \d:\d\d, 0:36 left",
        third,
    )
    assert re.fullmatch(
        r"step  48/192  held-out loss 2\.\d{3} \(ppl 16\.\d\), on clients 2\.\d{3} \(ppl .*\)",
        lines[lines.index(third) + 1],
    )
    loss_at = {line.index("  loss ") for line in lines if "window" in line}
    assert len(loss_at) == 1  # aligned


def test_clients_that_join_or_are_left_out_are_printed(tmp_path: Path) -> None:
    schedule, stream = SyncSchedule(PERIODS), io.StringIO()
    progress = TerminalView(a_config(), tmp_path, stream)
    progress.started(a_plan(schedule, 192, SIZES))
    progress.joined("client-9", {"device": "cuda:0"})
    window = list(windows_of(schedule, 192, SIZES))[3]
    window = replace(window, left_out={"client-2": "its [params]\n hold NaN"})
    progress.window(to_line(window))
    assert "\njoined: client-9: device cuda:0\n" in stream.getvalue()
    assert "\nstep  48/192  left out: client-2: its [params] hold NaN\n" in stream.getvalue()


def test_the_closing_table_has_bytes_ratios_and_losses(finished: tuple[RunFolder, str]) -> None:
    closing = finished[1].split("\n\n")[-1]
    assert re.search(r"exp_avg +every 48 +4 +4\.4 MB +4\.4 MB +13\.2 MB", closing)
    assert re.search(r"total +19\.8 MB +19\.8 MB +39\.6 MB", closing)
    assert "Local Adam 39.6 MB, 2.00 times as much; DDP 211 MB, 10.7 times as much" in closing
    assert re.search(r"held-out loss: 5\.\d{3} to 1\.\d{3}; perplexity", closing)
    assert closing.endswith(f"folder: {finished[0].path}\n")


def test_a_terminal_shows_a_progress_bar_and_gets_its_cursor_back(tmp_path: Path) -> None:
    stream = Terminal()
    record(tmp_path, stream=stream)
    assert "held-out" in stream.getvalue()
    hidden, shown = "\x1b[?25l", "\x1b[?25h"  # the cursor
    assert -1 < stream.getvalue().rfind(hidden) < stream.getvalue().rfind(shown)
    assert "synced" not in stream.getvalue()


def test_a_stream_that_flower_copies_into_a_log_gets_plain_lines(tmp_path: Path) -> None:
    stream = Terminal()
    stream.write = stream.write  # type: ignore[method-assign]  # what Flower does to stdout
    record(tmp_path, steps=48, stream=stream, clients=1)
    assert "\x1b[" not in stream.getvalue()


# The figures


def test_the_panels_of_the_overview_show_the_numbers_of_the_record(
    finished: tuple[RunFolder, str],
) -> None:
    run = load(finished[0].path)
    _, (loss, sent, averages, drifts) = figure(2, 2, 7)
    fill_heldout_loss(loss, run)
    assert {text.get_text() for text in loss.texts} >= {*DOMAINS, "training"}
    overall = loss.lines[-1]
    assert [*overall.get_ydata()] == [*heldout(run, "loss").y]
    assert [*overall.get_xdata()] == [0, 48, 96, 144, 192]
    fill_bytes(sent, [run])
    rows = [text.get_text() for text in sent.get_yticklabels()]
    assert rows == ["up", "down", "Local Adam, up", "DDP, up"]
    widths = [bar.get_width() for bar in sent.patches[:3]]
    assert widths == [run.summary["bytes"]["measured"]["up"][stream] for stream in PERIODS]
    assert {text.get_text() for text in sent.texts} >= {
        "39.6 MB, 2.00 times",
        "211 MB, 10.7 times →",
    }
    fill_averages(averages, run)
    assert [len(bars.get_paths()) for bars in averages.collections] == [12, 4, 2]
    assert [text.get_text() for text in averages.get_yticklabels()] == [
        *(f"{stream}, every {period}" for stream, period in PERIODS.items()),
        "evaluated",
    ]
    fill(drifts, [run], DRIFT)
    for line, stream in zip(drifts.lines, PERIODS, strict=True):
        assert [*line.get_ydata()] == [*drift(run)[stream].y]
    assert drifts.get_yscale() == "log"


@pytest.mark.parametrize(
    ("streams", "steps", "change"),
    [
        ({"params": 8, "exp_avg": "never"}, 20, {}),
        ({"params": 1}, 1, {"central": None, "federated": None}),
    ],
)
def test_a_run_leaves_its_overview_and_partition(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    streams: Mapping[str, Any],
    steps: int,
    change: dict[str, None],
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("flower_desloc.runs.report.write_page", lambda *_: None)
    _, run = record(tmp_path, streams, steps, change=lambda window: replace(window, **change))
    assert run.picture.read_bytes().startswith(b"\x89PNG")
    assert run.partition.read_bytes().startswith(b"\x89PNG")
