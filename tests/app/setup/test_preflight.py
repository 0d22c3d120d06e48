"""What is said before a run: against what the run then takes, and when it stops one."""

import ctypes
import gc
import logging
import re
import socket
import subprocess
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
import torch
from command import accepted, desloc, refused
from flwr.app import ConfigRecord
from torch import nn

from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.engines.in_process import run_in_process
from flower_desloc.app.plan import dry_run
from flower_desloc.app.plan.dry_run import memory_line
from flower_desloc.app.plan.from_config import planned_run
from flower_desloc.app.plan.wall_clock import H100, Link
from flower_desloc.app.setup import preflight
from flower_desloc.app.setup.build import build_lr_schedule
from flower_desloc.app.setup.meta_model import meta_model
from flower_desloc.app.setup.preflight import (
    Hardware,
    Needs,
    Preflight,
    federation_on_this_machine,
    memory_for_states,
    on_the_server,
    on_this_machine,
)
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.app.tasks import build_task
from flower_desloc.app.tasks.causal_lm.batches import TextBatch
from flower_desloc.app.tasks.image_classification import ImageClassification
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.schedule import SyncSchedule
from flower_desloc.core.traffic import stream_bytes
from flower_desloc.flower.client_info import from_config
from flower_desloc.flower.observer import RunInfo

CPU = torch.device("cpu")
TINY = " ".join([*tiny.TINY, "data.batch_size=8"])


# --- The paper's sizes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("smollm2_135m", 134_515_008),  # SmolLM2-135M's own number
        # 24 blocks with a gated expansion of 4, two norms each, and one.
        ("smollm2_1_7b", 49152 * 2048 + 24 * (16 * 2048**2 + 2 * 2048) + 2048),
        # A plain expansion of 4, no biases but the norms'.
        ("paper_135m", 50368 * 576 + 30 * (12 * 576**2 + 4 * 576) + 2 * 576),
        ("paper_1b", 50368 * 2048 + 24 * (12 * 2048**2 + 4 * 2048) + 2 * 2048),
    ],
)
def test_the_paper_presets_have_the_papers_sizes(preset, parameters):
    config = load(preset)
    needs = Needs(config)
    assert needs.num_params == parameters
    assert needs.sizes == dict.fromkeys(config.sync, 4 * parameters)


@pytest.mark.parametrize(
    ("preset", "steps", "warmup", "decay", "period", "local"),
    [
        ("smollm2_135m", 3072, 512, 307, 256, ("adopt", 0.0021, (0.95, 0.9999))),
        ("smollm2_135m_niid", 1536, 512, 153, 128, ("adam", 0.003, (0.95, 0.95))),
        ("smollm2_1_7b", 20480, 2048, 2048, 256, ("adopt", 0.0005, (0.95, 0.9999))),
        ("paper_135m", 3072, 512, 307, 256, ("adopt", 0.0021, (0.95, 0.9999))),
        ("paper_1b", 20480, 2048, 2048, 256, ("adopt", 0.0005, (0.95, 0.9999))),
    ],
)
def test_the_paper_presets_have_the_papers_tables(preset, steps, warmup, decay, period, local):
    config = load(preset)
    assert config.run.steps == steps
    assert config.data.batch_size * config.simulation.num_clients == 1024
    assert (config.data.seq_len, config.optimizer.clip_norm) == (2048, 1.0)
    assert config.sync == {"params": period, "exp_avg": 3 * period, "exp_avg_sq": 6 * period}
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.betas) == local
    rate = build_lr_schedule(config)
    assert rate(warmup - 2) < rate(warmup - 1) == rate(steps - decay) == 1
    assert rate(steps - decay + 1) < 1


# --- Estimates, against what is so ------------------------------------------------------------


@pytest.mark.parametrize("preset", ["quickstart", "desloc_sgdm", "digits"])
def test_the_estimate_has_the_streams_of_the_run(preset):
    config = load(preset, TINY)
    needs = Needs(config)
    model = build_task(config).build_model()
    streams = RunStreams(config).initial(model)
    assert needs.sizes == stream_bytes(streams)
    assert needs.num_params == sum(p.numel() for p in model.parameters())
    states = [name for name in streams if name not in ("params", "buffers")]
    assert needs.state_bytes == len(states) * needs.sizes["params"]


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory_since(act):
    """Return by how many bytes at most this process grew while ``act`` ran."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is there now
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def test_an_evaluation_never_holds_all_logits():
    config = load(
        "quickstart",
        f"{TINY} model.hidden_size=64 model.vocab_size=16384 data.seq_len=1024 "
        "data.batch_size=16 data.micro_batch_size=4",
    )
    task = build_task(config)
    model = task.build_model()
    first, batch = (TextBatch(torch.zeros(n, 1025, dtype=torch.int64), 0) for n in (1, 16))
    task.evaluate(model, [first])  # imports what it needs
    taken = memory_since(lambda: task.evaluate(model, [batch]))
    assert taken < 16 * 1024 * 16384 * 4 / 3  # the logits alone, in fp32


@pytest.mark.soak
def test_sequences_of_the_papers_are_evaluated_in_a_few_hundred_megabytes():
    """The logits of one and their softmax alone are 800 MB; `auto` takes one at a time."""
    words = ["model.num_hidden_layers=1", "model.precision=full", "model.compile=false"]
    config = load("smollm2_135m", [*words, "data.tokenizer=bytes"])
    assert config.data.micro_batch_size == "auto"
    task = build_task(config)
    model = task.build_model()
    first, batch = (TextBatch(torch.zeros(n, 2049, dtype=torch.int64), 0) for n in (1, 4))
    task.evaluate(model, [first])
    assert memory_since(lambda: task.evaluate(model, [batch])) < 4e8


def test_a_run_in_one_process_takes_the_memory_that_was_estimated(tmp_path):
    settings = (
        f"{TINY} model.hidden_size=512 model.intermediate_size=2048 model.num_hidden_layers=3 "
        "data.batch_size=2 run.steps=2 run.eval_every=0 evaluation.federated=false "
        "evaluation.central=false sync.params=1 sync.exp_avg=1 sync.exp_avg_sq=1 "
        "simulation.num_clients=2"
    )
    needs = Needs(load("quickstart", settings))
    parts = [*needs.client_bytes(CPU).items(), *needs.server_bytes().items()]
    estimate = sum(size for what, size in parts if what != "Python")
    run_config = {"config": "quickstart", "overrides": settings, "output-dir": str(tmp_path)}
    taken = memory_since(lambda: run_in_process(run_config, 2))
    assert taken / 1.5 < estimate < taken * 1.5
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert written < needs.server_disk_bytes() < 2.5 * written


def test_a_stream_that_is_never_averaged_is_not_held_by_the_server():
    settings = [*TINY.split(), "model.hidden_size=512", "run.steps=12", "sync.params=4"]
    needs = Needs(load("quickstart", [*settings, "sync.exp_avg=never", "sync.exp_avg_sq=13"]))
    params = needs.sizes["params"]
    assert (
        needs.server_bytes()["averages"] == needs.host_bytes()["streams received or sent"] == params
    )
    assert needs.client_disk_bytes() == 4 * 3 * params
    all_averaged = Needs(load("quickstart", [*settings, "sync.exp_avg=4", "sync.exp_avg_sq=12"]))
    assert all_averaged.server_bytes()["averages"] == 3 * params


# --- When a run is stopped --------------------------------------------------------------------


def clients(memory):
    return {"client-0": ClientInfo(device="cpu", memory_total=int(memory))}


def test_replies_that_wait_beside_messages_are_on_the_server_s_disk(monkeypatch, tmp_path):
    by_flight = f"{TINY} federation.data_address=127.0.0.1:8443"
    needs = Needs(load("quickstart", by_flight))
    folder_only = needs.server_disk_bytes()
    usage = Mock(return_value=Mock(free=folder_only + 2 * needs.waiting_disk_bytes(1) - 1))
    monkeypatch.setattr("shutil.disk_usage", usage)
    one = clients(1e12)
    two = {**one, "client-1": one["client-0"]}
    assert not [*on_the_server(needs, one, tmp_path)]
    (found,) = on_the_server(needs, two, tmp_path)
    assert "federation.data_address=null" in found.what
    for without in (TINY, f"{by_flight} sync_delay=1"):
        assert not [*on_the_server(Needs(load("quickstart", without)), two, tmp_path)]


def test_a_client_that_has_too_little_memory_ends_the_run_before_it_trains(tmp_path):
    need = sum(Needs(load("quickstart", TINY)).client_bytes(CPU).values())

    def start(memory, *settings):
        config = load("quickstart", f"{TINY} {' '.join(settings)}")
        run = RunInfo(
            schedule=SyncSchedule({"params": 1}),
            num_steps=1,
            num_windows=1,
            stream_bytes={},
            clients=clients(memory),
        )
        Preflight(config, tmp_path).started(run)

    start(need)
    with pytest.raises(ConfigError, match=r"^client-0: .*model.hidden_size.*run.preflight=warn"):
        start(need - 1)
    start(need - 1, "run.preflight=warn")
    start(need - 1, "federation.on_failure=continue")


@pytest.mark.parametrize(
    "stated",
    [
        {"memory-total": 1},
        {"memory-total": "much", "device": "cpu"},
        {"memory-total": -1, "device": "cpu"},
        {"memory-total": 1, "device": "quantum:7"},
        {"memory-total": 1, "device": 7},
        {"device": "cpu"},
    ],
)
def test_what_a_client_says_of_itself_that_cannot_be_ends_nothing(stated, tmp_path):
    needs, info = Needs(load("quickstart", TINY)), from_config(ConfigRecord(stated))
    assert not [*on_the_server(needs, {"client-0": info}, tmp_path)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_ends_the_run_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    for more in ("stop", "warn"):  # it is no estimate
        settings = [*TINY.split(), "simulation.client_gpus=1", f"run.preflight={more}"]
        said = refused("run", "quickstart", *settings, "--output-dir", tmp_path)
        assert "set simulation.client_gpus=0" in said
        assert "run.preflight=warn" not in said


def test_fewer_clients_at_once_are_advised_only_if_there_are_several(tmp_path):
    needs = Needs(load("quickstart", ["model.hidden_size=65536"]))
    for at_once in (1, 2):
        found, *_ = on_this_machine(needs, Hardware(CPU, at_once), tmp_path)
        assert ("--workers 1" in found.what) == (at_once > 1), found.what


def test_what_does_not_fit_on_this_machine_is_found(tmp_path):
    large = Needs(load("quickstart", f"{TINY} model.hidden_size=65536"))
    found = [*on_this_machine(large, Hardware(CPU, 1), tmp_path / "not" / "there")]
    assert found[0].stops
    assert "model.hidden_size" in found[0].what
    found = [*federation_on_this_machine(large, [CPU], tmp_path)]
    assert found[0].stops
    assert "--nodes" in found[0].what
    small = Needs(load("quickstart", TINY))
    for found in (
        [*on_this_machine(small, Hardware(CPU, 1), tmp_path)],
        [*federation_on_this_machine(small, [CPU], tmp_path)],
    ):
        assert not any(finding.stops for finding in found)


def test_the_states_of_simulated_clients_take_what_the_run_leaves(monkeypatch):
    needs = Needs(load("quickstart", TINY))
    run = needs.machine_bytes(CPU, 2)
    for free, expected in ((run - 1, 0), (run + 4_000_000, 3_000_000)):
        monkeypatch.setattr(preflight, "memory", lambda free=free: (2 * free, free))
        assert memory_for_states(needs, Hardware(CPU, 2)) == expected


def test_a_federation_on_one_machine_needs_memory_for_every_site():
    needs = Needs(load("quickstart", [*TINY.split(), "model.hidden_size=512"]))
    one, two, three = (needs.federation_bytes([CPU] * sites) for sites in (1, 2, 3))
    assert three - two == two - one > sum(needs.client_bytes(CPU).values())
    assert one > sum(needs.server_bytes().values()) + sum(needs.client_bytes(CPU).values())


# --- The measured step ------------------------------------------------------------------------


def test_no_step_is_measured_that_does_not_fit_or_takes_long(monkeypatch):
    monkeypatch.setattr(dry_run, "measured_step", Mock(side_effect=AssertionError("a step")))
    hardware = Hardware(CPU, 1)
    large = Needs(load("quickstart", f"{TINY} model.hidden_size=65536"))
    *_, last = dry_run.full_report(large, hardware)
    assert re.search(r"no step is measured: a client needs .* without activations", last)
    long = Needs(load("smollm2_135m", "model.num_hidden_layers=1"))
    *_, last = dry_run.full_report(long, hardware)
    assert "no step is measured: one example would take long" in last


@pytest.mark.parametrize(("batch_size", "rows"), [(4, 4), (1_000_000, 8)])
def test_of_a_long_batch_a_few_examples_are_measured(batch_size, rows):
    report = [
        *dry_run.full_report(
            Needs(load("digits", f"data.batch_size={batch_size}")), Hardware(CPU, 1)
        )
    ]
    (step,) = [line for line in report if line.startswith("a step takes")]
    assert f"({batch_size} examples, measured here with {rows} at once)" in step
    assert "with activations, this process has filled" in report[report.index(step) + 1]


# --- Tasks of one's own ---------------------------------------------------------------------------


class CachedData(ImageClassification):
    """Reads its data once in a process, where it first needs them."""

    def __init__(self, config):
        super().__init__(config)
        numbers()

    def build_model(self):
        model = super().build_model()
        model.register_buffer("scale", scale(), persistent=False)
        return model


@cache
def numbers():
    return torch.tensor([1.0])


@cache
def scale():
    return torch.tensor([2.0])


def test_an_estimate_leaves_no_tensor_without_a_value_in_a_tasks_caches():
    for cached in (numbers, scale):
        cached.cache_clear()
    assert Needs(load("digits", f"task={__name__}:CachedData")).weight_bytes > 0
    assert (numbers(), scale()) == (1.0, 2.0)


class Tied(ImageClassification):
    def build_model(self):
        model = nn.Module()
        weight = nn.Parameter(torch.ones(3))
        model.one, model.two = nn.Module(), nn.Module()
        model.one.weight = model.two.weight = weight
        model.own = Own(torch.ones(2))
        return model


class Own(nn.Parameter):
    """A parameter of a type of its own."""


def test_a_model_without_memory_keeps_what_is_tied_and_types_of_ones_own():
    model: Any = meta_model(load("digits", f"task={__name__}:Tied"))
    assert model.one.weight is model.two.weight
    assert model.one.weight.is_meta
    assert type(model.own) is Own


class Raises(ImageClassification):
    """Raises in the method, and by the error, that the options name."""

    def __init__(self, config):
        super().__init__(config)
        for name, error in config.task_options.items():
            setattr(self, name, partial(self.fail, error))

    @staticmethod
    def fail(error, *_):
        raise {"KeyError": KeyError, "SystemExit": SystemExit, "OSError": OSError}[error]("mine")


@pytest.mark.parametrize("error", ["KeyError", "SystemExit", "OSError"])
@pytest.mark.parametrize("method", ["client_data", "loss"])
def test_a_run_whose_task_raises_starts(method, error, tmp_path):
    words = [f"task={__name__}:Raises", f"task_options.{method}={error}", "run.steps=1"]
    words += ["simulation.num_clients=1", "sync.params=1", "--output-dir", str(tmp_path)]
    result = desloc("run", "digits", *words, "--engine", "inprocess")
    assert result.exit_code == 1
    assert "estimate" not in result.stdout
    own = re.escape("sys.exit('mine')") if error == "SystemExit" else error
    assert re.search(
        rf"client-0 is left out of .*{own}|node 1 cannot take part: .*{own}",
        " ".join(result.stderr.split()),
    )


def test_a_run_whose_model_cannot_be_built_ends_with_the_tasks_own_error(tmp_path):
    words = [f"task={__name__}:Raises", "task_options.build_model=KeyError"]
    result = desloc("run", "digits", *words, "--engine", "inprocess", "--output-dir", tmp_path)
    said = "cannot estimate whether this run fits: the model cannot be built (KeyError: 'mine')"
    assert said in result.stdout
    assert result.stderr == "error: the run failed: KeyError: 'mine'\n"


@pytest.mark.parametrize("method", ["client_data", "loss", "build_model"])
def test_a_dry_run_of_a_task_that_raises_says_so(method):
    words = [f"task={__name__}:Raises", f"task_options.{method}=KeyError"]
    result = desloc("run", "digits", *words, "--dry-run")
    assert result.exit_code == (2 if method == "build_model" else 0)
    assert "KeyError: 'mine'" in result.output


def test_a_server_goes_on_without_the_estimate_and_says_so(tmp_path, caplog):
    config = load("digits", [f"task={__name__}:Raises", "task_options.build_model=KeyError"])
    run = RunInfo(
        schedule=SyncSchedule({"params": 1}),
        num_steps=1,
        num_windows=1,
        stream_bytes={},
        clients=clients(1e12),
    )
    with caplog.at_level(logging.WARNING, "flwr"):
        Preflight(config, tmp_path).started(run)
    [said] = caplog.messages
    assert said.endswith("cannot be estimated: the model cannot be built (KeyError: 'mine')")


# --- What is printed --------------------------------------------------------------------------


def test_a_preset_of_the_hub_is_looked_at_without_the_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=AssertionError("a connection")))
    small = "model.hidden_size=18 model.num_hidden_layers=1 data.seq_len=32 data.batch_size=4"
    output = accepted("run", "smollm2_135m", *small.split(), "run.steps=1536", "--dry-run")
    for said in (
        "in embeddings", "not read", "data.tokenizer=HuggingFaceTB/SmolLM2-135M", "a client needs",
        "the server needs", "not counted: activations", "on disk", "will receive",
    ):  # fmt: skip
        assert said in output


@pytest.mark.parametrize(("precision", "name"), [("bf16", "bf16"), ("full", "float32")])
def test_the_estimate_and_the_plan_name_the_precision_of_the_run(precision, name):
    small = "model.hidden_size=18 model.num_hidden_layers=1 data.seq_len=32 data.batch_size=4"
    words = ["smollm2_135m", *small.split(), f"model.precision={precision}"]
    config = load(words[0], words[1:])
    hardware = Hardware.of(config, in_process=True, workers=None)
    assert f"computed in {name};" in memory_line(Needs(config), hardware)
    link = Link(bandwidth=1e9, latency=0)
    run = planned_run(config, link, mfu=0.5)
    assert run.peak == f"50% of an H100's peak in {name}"
    assert planned_run(config, link, mfu=0.5, flops=H100[name]).compute == run.compute


def test_presets_of_real_size_compute_in_bf16_and_are_compiled():
    for preset in ("smollm2_135m", "smollm2_135m_niid", "smollm2_1_7b"):
        model = load(preset).model
        assert (model.dtype, model.precision, model.compile) == ("float32", "bf16", True)


@pytest.mark.parametrize("preset", ["ddp", "fedavg"])
def test_other_methods_are_looked_at_too(preset):
    assert "a step takes" in accepted("run", preset, *TINY.split(), "--dry-run")
