"""Private runs: the cost of a step, refusals at the site, and the content of replies."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter

import pytest
import torch
from flwr.app import Context, RecordDict
from tiny import TINY, failing_at, train

pytest.importorskip("opacus")

from client_app import worker as client_worker
from client_app.client import WorkerBuilder
from client_app.privacy import _processor, private_worker
from client_app.worker import RunParts
from flower_desloc.app.config import ConfigError, dump, load
from flower_desloc.app.engines import in_process
from flower_desloc.app.setup import measured_step
from flower_desloc.app.sites.multiprocess.parallelism import Parallelism
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.privacy import accounting
from flower_desloc.privacy.worker import PrivateLoss

STEPS = 8
SHORT = [*TINY, f"run.steps={STEPS}", "run.eval_every=0"]
PERIODS = ["sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=8"]


@pytest.fixture(autouse=True)
def _linear(monkeypatch):
    """Let a step cost its sample rate over its noise: the accountant takes seconds."""

    def cost(steps, delta):
        return sum(number * step.sample_rate / step.noise_multiplier for step, number in steps)

    monkeypatch.setattr(accounting, "_epsilon", cost)


def ledgers(folder):
    """Return the queries and their costs, by client."""
    files = (folder / ".clients" / "privacy").glob("*.jsonl")
    lines = {file.stem: file.read_text().splitlines() for file in files}
    return {client: [json.loads(line) for line in each] for client, each in lines.items()}


def costs(folder):
    return {
        client: Counter((line["noise_multiplier"], line["sample_rate"]) for line in lines)
        for client, lines in ledgers(folder).items()
    }


def windows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_periods_cost_nothing_and_the_server_is_told_nothing_of_the_records(tmp_path):
    run = train(tmp_path / "a", *SHORT, *PERIODS, "privacy.epsilon=1")
    never = ["sync.params=8", "sync.exp_avg=never", "sync.exp_avg_sq=never"]
    train(tmp_path / "b", *SHORT, *never, "privacy.epsilon=1")
    spent = costs(tmp_path / "a")
    assert spent == costs(tmp_path / "b")
    assert [each.total() for each in spent.values()] == [STEPS, STEPS]
    one, other = ({line["query"] for line in lines} for lines in ledgers(tmp_path / "a").values())
    assert not one & other
    for window in windows(run)[1:]:
        for client in window["clients"].values():
            assert client["num_examples"] == 1
            assert client["train_loss"] is None
            assert set(client["losses"]) == {None}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["client_data"] == {}
    assert "federated" not in summary["evaluation"]


def test_a_sites_audit_log_tells_what_the_run_has_spent_by_its_own_delta(tmp_path, monkeypatch):
    by_delta = {1e-5: 1, 1e-6: 2}
    monkeypatch.setattr(
        accounting,
        "_epsilon",
        lambda steps, delta: by_delta[delta] * sum(n * s.sample_rate for s, n in steps),
    )
    own = {"name": "site-b", "epsilon": 1e3, "delta": 1e-6}

    def grid(app, nodes, **options):
        logs = [{"audit-log": str(tmp_path / f"{m}.jsonl")} for m in range(2)]
        return InProcessGrid(app, [nodes[0] | logs[0], nodes[1] | logs[1] | own], **options)

    monkeypatch.setattr(in_process, "InProcessGrid", grid)
    for name in ("one", "two"):
        words = ["run.steps=4", "privacy.epsilon=1000", f"run.name={name}"]
        train(tmp_path, *SHORT, *PERIODS, *words)
    for m, delta in enumerate(by_delta):
        rate = ledgers(tmp_path)[f"client-{m}"][0]["sample_rate"]
        log = [json.loads(line) for line in (tmp_path / f"{m}.jsonl").read_text().splitlines()]
        told = [line["spent"] for line in log if "spent" in line]
        assert told == [
            {"steps": n, "epsilon": pytest.approx(by_delta[delta] * n * rate), "delta": delta}
            for n in (2, 4, 2, 4)
        ]
        assert {line["message"] for line in log if "spent" in line} == {"train"}


def test_an_audit_log_tells_also_what_a_failed_window_has_spent(tmp_path, monkeypatch):
    log = tmp_path / "site.jsonl"

    def grid(app, nodes, **options):
        return InProcessGrid(app, [nodes[0], nodes[1] | {"audit-log": str(log)}], **options)

    def failing(self, step):
        if step == 1:
            raise ValueError("the second step fails")
        return private_loss(self, step)

    private_loss = PrivateLoss.__call__
    monkeypatch.setattr(in_process, "InProcessGrid", grid)
    monkeypatch.setattr(PrivateLoss, "__call__", failing)
    words = [*SHORT, *PERIODS, "privacy.epsilon=1", "federation.on_failure=continue"]
    with pytest.raises(FederationError):
        train(tmp_path, *words)
    (line,) = [json.loads(x) for x in log.read_text().splitlines() if '"failed"' in x][:1]
    assert line["spent"]["steps"] == 1


def test_a_run_that_is_killed_and_resumed_spends_every_step_once(tmp_path):
    words = [*SHORT, *PERIODS, "privacy.epsilon=1"]
    with failing_at(3):
        train(tmp_path, *words)
    before = ledgers(tmp_path)
    assert [len(lines) for lines in before.values()] == [6, 6]  # of the third window as well
    train(tmp_path, *words, "run.resume=auto")
    for client, lines in ledgers(tmp_path).items():
        assert lines[:6] == before[client]
        assert len({line["query"] for line in lines}) == len(lines) == STEPS


def test_a_site_stops_when_its_own_budget_is_spent_and_the_others_go_on(tmp_path, monkeypatch):
    def grid(app, nodes, **options):
        own = {"name": "site-b", "epsilon": 1e-3, "delta": 1e-5}
        return InProcessGrid(app, [nodes[0], nodes[1] | own], **options)

    monkeypatch.setattr(in_process, "InProcessGrid", grid)
    words = [*SHORT, *PERIODS, "federation.on_failure=continue"]
    first, second = (train(tmp_path, *words, f"run.name={name}") for name in ("one", "two"))
    assert [len(window["clients"]) for window in windows(first)[1:]] == [2] * 4
    assert [len(window["clients"]) for window in windows(second)[1:]] == [1] * 4
    assert windows(second)[1]["clients"]["client-0"]["train_loss"] > 0  # it has no privacy
    assert {client: len(lines) for client, lines in ledgers(tmp_path).items()} == {
        "client-1": STEPS
    }
    with pytest.raises(FederationError, match=r"budget of this site, epsilon=0.001 .* is spent"):
        train(tmp_path, *words[:-1], "run.name=three")


def built(tmp_path, *overrides, run="run", builder=None, **node):
    """Return the worker that a client builds."""
    settings = {"settings": dump(load("quickstart", " ".join([*TINY, *overrides])))}
    site = {"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path), **node}
    context = Context(1, 1, site, RecordDict(), {})
    return (builder or WorkerBuilder())({**settings, "run-key": run}, context)


def test_the_stricter_of_two_budgets_holds(tmp_path):
    def noise(folder, *overrides, **node):
        loss = built(tmp_path / folder, *overrides, **node).loss_at
        assert isinstance(loss, PrivateLoss)
        return loss.account.noise_multiplier(loss.examples.sample_rate)

    loose, strict = {"epsilon": 0.1, "delta": 1e-5}, {"epsilon": 0.01, "delta": 1e-5}
    wide = noise("a", "privacy.epsilon=0.1")
    assert noise("b", "privacy.epsilon=0.1", **strict) == noise("c", **strict) > 5 * wide
    assert noise("d", "privacy.epsilon=0.01", **loose) > 5 * wide
    assert not isinstance(built(tmp_path / "e").loss_at, PrivateLoss)


@pytest.mark.parametrize(
    ("node", "overrides", "message"),
    [
        ({"epsilon": 1.0}, [], "must state both epsilon and delta"),
        ({"delta": 1e-5}, [], "must state both epsilon and delta"),
        ({"epsilon": "much", "delta": 1e-5}, [], "must state both epsilon and delta as numbers"),
        ({"epsilon": -1.0, "delta": 1e-5}, [], "epsilon must be above 0"),
        ({"processes": 2}, ["privacy.epsilon=1"], "processes=2 in the node config"),
        (
            {"epsilon": 1.0, "delta": 1e-5},
            ["federation.weighting=examples"],
            "federation.weighting=examples: differential privacy hides the number of examples",
        ),
        (
            {"epsilon": 1.0, "delta": 1e-5},
            ["data.streaming=true", "data.max_bytes=0"],
            r"StreamedShard has no method examples\(numbers\)",
        ),
    ],
)
def test_what_privacy_excludes_is_refused_at_the_site(tmp_path, node, overrides, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        built(tmp_path, *overrides, **node)


def test_a_site_with_a_budget_takes_part_where_the_best_model_is_that_of_the_clients(tmp_path):
    words = ["run.keep_best=federated/loss", "run.patience=2"]
    assert isinstance(built(tmp_path, *words, epsilon=1.0, delta=1e-5).loss_at, PrivateLoss)


ONE_STEP = """
import sys
from test_private_run import SHORT, accounting, built
accounting._epsilon = lambda steps, delta: 0.0
worker = built(sys.argv[1], *SHORT, "privacy.epsilon=1")
print(sum(float(grad.double().sum()) for grad in worker.gradient(0)[0].values()))
"""


def test_a_step_that_another_process_repeats_is_charged_once(tmp_path):
    """Python's hashes differ between processes, and some of transformers' attributes are hashes."""

    def summed(seed):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", ONE_STEP, str(tmp_path)]
        return subprocess.run(command, env=environment, check=True, capture_output=True).stdout

    assert summed("1") == summed("2") != b""
    (ledger,) = (tmp_path / "privacy").glob("*.jsonl")
    assert len(ledger.read_text().splitlines()) == 1


@pytest.mark.parametrize(("before", "now"), [("null", "1"), ("1", "null")])
def test_a_resumed_run_is_private_if_and_only_if_it_was(tmp_path, before, now):
    with failing_at(2):
        train(tmp_path, *SHORT, *PERIODS, f"privacy.epsilon={before}")
    with pytest.raises(ConfigError, match=r"privacy.epsilon=.* \(now .*\)"):
        train(tmp_path, *SHORT, *PERIODS, f"privacy.epsilon={now}", "run.resume=auto")


def test_a_site_cannot_become_private_in_the_middle_of_a_run(tmp_path):
    """Its moments are made of gradients that were not."""
    with failing_at(2):
        train(tmp_path, *SHORT, *PERIODS)
    folder = tmp_path / ".clients"
    (run,) = (path.name for path in folder.glob("quickstart-*"))
    budget = {"epsilon": 1.0, "delta": 1e-5}
    with pytest.raises(ValueError, match="steps of the run without differential privacy"):
        built(folder, *SHORT, run=run, **budget)
    built(folder, *SHORT, run="another", **budget)


def test_a_run_is_known_to_be_private_also_where_its_parts_cannot_be_built(tmp_path, monkeypatch):
    def failing(*_, **__):
        raise KeyError("Jane Doe")

    monkeypatch.setattr(client_worker, "with_micro_batch_size", failing)
    for epsilon, is_private in (("null", False), ("1", True)):
        builder = WorkerBuilder()
        with pytest.raises(KeyError):
            built(tmp_path, f"privacy.epsilon={epsilon}", builder=builder)
        assert builder.is_private() == is_private


@pytest.mark.parametrize(
    ("overrides", "node"), [(["privacy.epsilon=1"], {}), ([], {"epsilon": 1.0, "delta": 1e-5})]
)
def test_no_step_is_measured_on_private_records(tmp_path, monkeypatch, overrides, node):
    def measured(*_):
        raise AssertionError

    find = measured_step.with_micro_batch_size
    monkeypatch.setattr(measured_step, "_largest_that_fits", measured)
    monkeypatch.setattr(  # where there is a GPU
        client_worker,
        "with_micro_batch_size",
        lambda config, _, path, **options: find(config, torch.device("cuda", 0), path, **options),
    )
    built(tmp_path, "data.micro_batch_size=auto", *overrides, **node)
    with pytest.raises(AssertionError):
        built(tmp_path, "data.micro_batch_size=auto")


ARM = "processor\t: {n}\nBogoMIPS\t: {n}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n\n"


def test_a_processor_is_its_model_whatever_the_machine_is_called(tmp_path, monkeypatch):
    def written(text):
        (tmp_path / "cpuinfo").write_text(text)
        return _processor(tmp_path / "cpuinfo")

    of_x86 = written("processor\t: 0\nmodel name\t: Xeon\ncpu MHz\t: 2000.1\n")
    assert of_x86 == written("processor\t: 0\nmodel name\t: Xeon\ncpu MHz\t: 2000.2\n")
    cores = [ARM.format(n=n, part=part) for n, part in enumerate(("0xd05", "0xd0a"))]
    assert written("".join(cores)) == written("".join(reversed(cores)))
    assert len({of_x86, written(cores[0]), written(cores[1]), written("".join(cores))}) == 4
    once = written(""), _processor(tmp_path / "none")
    called = platform.uname()._replace(node="another")
    monkeypatch.setattr(platform, "uname", lambda: called)
    assert (written(""), _processor(tmp_path / "none")) == once


def test_a_ledger_bears_a_name_that_stays(tmp_path):
    with pytest.raises(ValueError, match="needs the site's name"):
        private_worker(
            RunParts(dump(load("quickstart", SHORT)), {}, torch.device("cpu"), None),
            Context(1, 1, {"epsilon": 1.0, "delta": 1e-5}, RecordDict(), {}),
            "run",
            Parallelism.of({}),
        )
