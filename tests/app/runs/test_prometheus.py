"""The numbers of a run that Prometheus reads, and what is drawn of them."""

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from scripts import ROOT
from tiny import TINY, train

from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.runs.prometheus import PrometheusView
from flower_desloc.app.sites.deployment.environment import free_port
from flower_desloc.core.client_info import ClientInfo

MONITORING = ROOT / "containers" / "monitoring"
Numbers = dict[tuple[str, ...], float]


def numbers(port: int) -> Numbers:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


@pytest.fixture
def view() -> Iterator[tuple[PrometheusView, int]]:
    port = free_port()
    made = PrometheusView(port)
    yield made, port
    made.finish(None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    settings = ("run.steps=4", "run.eval_every=2", "sync.params=2", "sync.exp_avg=2")
    folder = train(tmp_path_factory.mktemp("runs"), *TINY, *settings, "sync.exp_avg_sq=4")
    return list(read_lines(folder / "metrics.jsonl"))


def test_they_are_those_of_the_runs_record(view, lines):
    made, port = view
    for line in lines:
        made.window(line)
    found, last = numbers(port), lines[-1]
    assert found["desloc_step",] == 4
    assert found["desloc_windows_total",] == 2
    assert found["desloc_clients",] == 2
    assert found["desloc_train_loss",] == last["train_loss"]
    assert (
        found["desloc_heldout", "loss", "central"]
        == (last["evaluation"]["central"]["overall"]["loss"])
    )
    for way in ("up", "down"):
        for stream in ("params", "exp_avg", "exp_avg_sq"):
            sent = sum(line[f"bytes_{way}"].get(stream, 0) for line in lines)
            assert found.get(("desloc_bytes_total", way, stream), 0) == sent
    assert found["desloc_window_seconds", "exchange"] == last["seconds_split"]["exchange"]


def test_a_client_is_left_out_with_its_reason(view, lines):
    made, port = view
    events = [
        {"kind": "late", "client": "client-1", "what": "no reply", "evaluation": False},
        {"kind": "refused", "client": "client-1", "what": "NaN", "evaluation": True},
        {"kind": "left", "client": "client-1", "what": "", "evaluation": False},
    ]
    line = {**lines[-1], "left_out": {"client-1": "no reply in 60 s"}, "events": events}
    made.joined("client-1", ClientInfo(device="cpu"))
    assert numbers(port)["desloc_left_out_total", "client-1", "late"] == 0
    made.replay(line)
    made.window(line)
    found = numbers(port)
    assert found["desloc_left_out_total", "client-1", "late"] == 2
    assert found["desloc_events_total", "client-1", "left"] == 2


def test_a_port_that_is_taken_leaves_the_run_as_it_is(tmp_path, caplog):
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        train(tmp_path, *TINY, "run.steps=2", "run.eval_every=0", f"run.metrics_port={port}")
    assert f"run.metrics_port={port} failed and is left out" in caplog.text


def test_dashboard_and_alerts_are_of_numbers_that_there_are(view):
    _, port = view
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        stated = set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.MULTILINE))
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((MONITORING / "rules.yml").read_text())
    shown += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    used = {name for each in shown for name in re.findall(r"desloc_\w+", each)}
    assert used <= stated
    assert len(used) >= 7
