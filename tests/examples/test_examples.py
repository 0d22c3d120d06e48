"""Models, data and optimizers of one's own: the examples run, and only what is trained travels."""

import csv
import filecmp
import importlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import accepted, refused
from configurations import with_values
from flwr.app import Context, RecordDict
from safetensors import safe_open
from safetensors.torch import load_file
from scripts import ROOT
from tiny import TINY, failing_at, summary
from torch import nn

from client_app import app as client_app
from client_app.worker import RunParts
from flower_desloc.app.config import Config, ConfigError, dump, load, parse
from flower_desloc.app.config.imports import IMPORT_FROM
from flower_desloc.app.engines.in_process import run_in_process
from flower_desloc.app.setup.build import (
    build_clipping,
    build_lr_schedule,
    build_optimizer,
    check_streams,
)
from flower_desloc.app.tasks import build_task
from flower_desloc.app.tasks.causal_lm import CausalLM
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.streams import check_optimizer, digest, frozen
from flower_desloc.core.worker import Clipping, Worker
from flower_desloc.flower.client import client_app as client_app_of
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.inprocess import InProcessGrid
from server_app import app as server_app

EXAMPLES = ROOT / "examples"
# peft 0.21 asks transformers 5.23 by a name that goes.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is dep:FutureWarning")
PAGE = "".join(
    (ROOT / "docs" / page).read_text()
    for page in ("tutorials/your-own-app.md", "how-to/own-task.md")
)
COMMANDS = re.findall(r"^desloc run (\S+)\.yaml", PAGE, re.MULTILINE)
SMALL = [
    *(*TINY, "data.batch_size=4", "simulation.num_clients=2"),
    *("run.steps=6", "run.eval_every=6", "sync.params=2", "sync.exp_avg=3"),
]


@pytest.fixture(autouse=True, scope="module")
def _in_the_examples() -> Iterator[None]:
    """Be where a user is who types the commands of the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(EXAMPLES)
        patch.setenv(IMPORT_FROM, str(EXAMPLES))
        patch.setattr(sys, "path", [*sys.path])
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model to be adapted."""
    config = load("quickstart", SMALL)
    folder = tmp_path_factory.mktemp("base")
    CausalLM(config).save(CausalLM(config).build_model(), folder)
    return folder


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(base: Path) -> Run:
    """A function that runs an example in a folder and returns its summary."""

    def run(name: str, output_dir: Path, *overrides: str) -> dict[str, Any]:
        own = [f"task_options.base={base}"] if name == "lora" else []
        text = " ".join([*SMALL, *own, *overrides])
        config = {"config": f"{name}.yaml", "overrides": text, "output-dir": str(output_dir)}
        run_in_process(config, 2)
        return summary(output_dir / name)

    return run


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder of a run of an example that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")

    def whole(name: str) -> Path:
        if not (folder / name).exists():
            run(name, folder)
        return folder / name

    return whole


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_of_the_page_train_and_send_what_the_formula_says(name, whole):
    found = summary(whole(name))
    assert found["status"] == "completed"
    loss = found["evaluation"]["central"]["loss"]
    assert loss["final"] < loss["first"]
    for way in ("up", "down"):
        assert found["bytes"]["measured"][way] == found["bytes"]["analytic"][way]
    assert any((whole(name) / "final").glob("*.safetensors"))


CPU = torch.device("cpu")


def test_the_page_names_every_example():
    federated = re.findall(r"^desloc federate (\S+)\.yaml", PAGE, re.MULTILINE)
    assert sorted(COMMANDS + federated) == sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("name", ["lion", "ademamix", "lora"])
def test_a_run_cut_off_ends_as_one_that_was_not(name, whole, run, tmp_path):
    with failing_at(3):
        run(name, tmp_path)
    if name == "lora":  # what clients keep, optimizer states included
        (file, *_) = tmp_path.glob(".clients/*/*/*.safetensors")
        with safe_open(file, "pt") as held:
            assert all("lora_" in key for key in held.keys())  # noqa: SIM118
            assert "exp_avg_sq" in {key.partition("/")[0] for key in held.keys()}  # noqa: SIM118
    resumed = run(name, tmp_path, "run.resume=auto")
    assert resumed["resumed"][0]["step"] == 3
    assert resumed["weights_sha256"] == summary(whole(name))["weights_sha256"]


def printed(mark: str, language: str) -> str:
    """The block of the page between two comments."""
    (block,) = re.findall(rf"<!-- {mark} -->\n```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(block)


def test_the_page_loads_the_model_of_a_run(whole, tmp_path, monkeypatch):
    (tmp_path / "runs").symlink_to(whole("cnn").parent)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(printed("load", "python"), names)
    found, task = summary(whole("cnn")), build_task(load(str(EXAMPLES / "cnn.yaml"), SMALL))
    loss = task.metrics(task.evaluate(names["model"], task.heldout()["digits"]))["loss"]
    assert loss == pytest.approx(found["evaluation"]["central"]["loss"]["final"], abs=1e-6)
    assert digest(dict(names["model"].named_parameters())) == found["weights_sha256"]


def test_an_export_is_what_the_task_saves_and_a_card(whole, tmp_path):
    accepted("export", whole("cnn"), tmp_path / "out")
    saved, exported = (whole("cnn") / "final", tmp_path / "out")
    assert {path.name for path in exported.iterdir()} == {"model.safetensors", "README.md"}
    assert filecmp.cmp(saved / "model.safetensors", exported / "model.safetensors", shallow=False)


def test_the_settings_on_the_page_are_pytorchs_adam(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: {EXAMPLES / 'cnn.yaml'}\n{printed('adam', 'yaml')}")
    config, weights = load(str(file)), [nn.Parameter(torch.ones(2))]
    theirs = torch.optim.Adam(weights).defaults
    ours = build_optimizer(config, weights).defaults
    assert {**ours, "fused": None} == {**theirs, "fused": None}
    assert build_clipping(config) == Clipping()
    assert {build_lr_schedule(config)(step) for step in range(config.run.steps)} == {1.0}


# ------------------------------------------------------------------------------------ Private data


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two CSV files, of one kind of text in the main each."""
    folder = tmp_path_factory.mktemp("private")
    lines = {"code": (EXAMPLES / "cnn.py").read_text(), "prose": (ROOT / "LICENSE").read_text()}
    texts = {label: [t for t in text.splitlines() if t][:100] for label, text in lines.items()}
    for main, other in (("code", "prose"), ("prose", "code")):
        with (folder / f"{main}.csv").open("w", encoding="utf-8-sig", newline="") as file:
            rows = [*((t, main) for t in texts[main]), *((t, other) for t in texts[other][::3])]
            rows[1] = ("two\nlines\u2028of text", main)
            csv.writer(file).writerows([("text", "label"), *rows])
    return sorted(folder.iterdir())


Sites = Callable[..., Path]


@pytest.fixture(scope="module")
def at_sites(files: list[Path]) -> Sites:
    """A function that runs the example at sites that have a file each and no partition."""

    def at_sites(output_dir: Path, *overrides: str) -> Path:
        text = " ".join(["run.steps=48", *overrides])
        config = {"config": "csv_classifier.yaml", "overrides": text}
        state = str(output_dir / ".clients")
        nodes = [{"name": f.stem, "data-path": str(f), "state-dir": state} for f in files]
        context = Context(1, 0, {}, RecordDict(), {**config, "output-dir": str(output_dir)})
        server_app(InProcessGrid(client_app, nodes), context)
        return output_dir / "csv_classifier"

    return at_sites


@pytest.fixture(scope="module")
def private(at_sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run at two sites."""
    return at_sites(tmp_path_factory.mktemp("sites"))


def test_sites_train_on_files_that_only_they_have(private):
    found = summary(private)
    held = found["client_data"]
    assert held["code"]["code"] > held["prose"]["code"]
    assert held["prose"]["prose"] > held["code"]["prose"]
    loss = found["evaluation"]["federated"]["loss"]
    assert loss["final"] < 0.8 * loss["first"]
    assert "central" not in found["evaluation"]


def test_buffers_are_averaged_if_they_have_a_period_and_integers_are_not_sent(
    private, at_sites, tmp_path
):
    def buffers(folder: Path) -> dict[str, torch.Tensor]:
        saved = load_file(folder / "final" / "model.safetensors")
        return {key: saved[f"1.{key}"] for key in ("running_mean", "num_batches_tracked")}

    assert buffers(private)["running_mean"].any()
    assert buffers(private)["num_batches_tracked"] == 0
    assert not buffers(at_sites(tmp_path, "sync.buffers=never"))["running_mean"].any()


def test_dropout_is_the_same_in_a_run_that_resumes(private, at_sites, tmp_path):
    with failing_at(3):
        at_sites(tmp_path)
    torch.rand(7)
    resumed = summary(at_sites(tmp_path, "run.resume=auto"))
    assert resumed["resumed"]
    assert resumed["weights_sha256"] == summary(private)["weights_sha256"]


# -------------------------------------------------------------------------------------------- LoRA


def test_only_the_adapters_travel_with_their_moments(base, whole):
    found = summary(whole("lora"))
    adapters = load_file(whole("lora") / "final" / "adapter_model.safetensors")
    size = sum(tensor.nbytes for tensor in adapters.values())
    assert 0 < size < sum(t.nbytes for t in load_file(base / "model.safetensors").values())
    assert found["stream_bytes"] == dict.fromkeys(("params", "exp_avg", "exp_avg_sq"), size)
    # Six steps: three averages of params, two of exp_avg; exp_avg_sq is due after 48.
    sent = {"params": 3 * size, "exp_avg": 2 * size, "exp_avg_sq": 0, "total": 5 * size}
    clients = 2
    measured = found["bytes"]["measured"]["up"]
    assert {name: measured[name] for name in sent} == {k: clients * n for k, n in sent.items()}


def test_transformers_loads_the_final_adapters_with_their_base(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapted = AutoModelForCausalLM.from_pretrained(whole("lora") / "final")
    assert AutoTokenizer.from_pretrained(whole("lora") / "final").encode("naïve")
    task = build_task(parse((whole("lora") / "config.yaml").read_text()))
    sums: dict[str, float] = {}
    for batches in task.heldout().values():
        totals = task.evaluate(adapted, batches)
        sums = {name: sums.get(name, 0.0) + value for name, value in totals.items()}
    final = summary(whole("lora"))["evaluation"]["central"]["loss"]["final"]
    assert task.metrics(sums)["loss"] == pytest.approx(final, abs=1e-6)


def test_a_client_whose_base_is_another_is_turned_away(whole, run, tmp_path, monkeypatch):
    settings = (whole("lora") / "config.yaml").read_text()
    model = build_task(parse(settings)).build_model()
    theirs = frozen(model)
    RunParts(settings, {"frozen": theirs}, CPU).build_model()
    next(p for p in model.parameters() if not p.requires_grad).view(-1)[-1] += 1e-6
    assert frozen(model) != theirs
    monkeypatch.setattr("server_app.required_alike", lambda *_: {"frozen": frozen(model)})
    with pytest.raises(
        FederationError, match=r"the frozen parameters of task=.* differ from the server's"
    ):
        run("lora", tmp_path, "run.steps=1")
    assert frozen(nn.Linear(2, 2)) == ""  # where all is trained nothing is compared


def test_adapters_begin_with_those_of_another_run(whole, run, tmp_path):
    second = run("lora", tmp_path, f"run.init_from={whole('lora')}", "run.steps=1")
    losses = [s["evaluation"]["central"]["loss"] for s in (summary(whole("lora")), second)]
    assert losses[1]["first"] == losses[0]["final"]


# -------------------------------------------------------------------------------------- Optimizers


def an_optimizer(name: str, *overrides: str) -> Config:
    return load("cnn.yaml", [f"optimizer.name={name}", "optimizer.lr=0.003", *overrides])


QHADAM = ["beta1_weight", "beta2_weight", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("pytorch_optimizer:Lion", ["exp_avg"]),
        ("pytorch_optimizer:AdEMAMix", ["exp_avg", "exp_avg_sq", "exp_avg_slow"]),
        ("pytorch_optimizer:QHAdam", QHADAM),
        ("torch.optim:Adagrad", ["sum"]),
        ("torch.optim:Muon", ["momentum_buffer"]),  # for matrices only
        ("torch.optim:Adafactor", []),  # others for matrices than for vectors
        ("flower_desloc.optim:ADOPT", ["exp_avg", "exp_avg_sq"]),
        ("flower_desloc.optim:AdamW", ["exp_avg", "exp_avg_sq"]),
        ("flower_desloc.optim:PaperAdam", ["exp_avg", "exp_avg_sq"]),
        ("flower_desloc.optim:SGDM", ["momentum_buffer"]),
    ],
)
def test_streams_of_any_optimizer_are_found_by_name(name, states):
    config = an_optimizer(name)
    config = with_values(config, {"sync": {"params": 2, **dict.fromkeys(states, 4)}})
    check_streams(config)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"exp_avgg": 2}, rf"sync\.exp_avgg: {name} has no stream of that name; .*params"),
        *(({state: None}, rf"sync\.{state} is not stated") for state in states),
    ]
    for wrong, message in refused:
        periods = {"params": 2, **dict.fromkeys(states, 4), **wrong}
        config = with_values(
            config, {"sync": {key: period for key, period in periods.items() if period}}
        )
        with pytest.raises(ConfigError, match=message):
            check_streams(config)


def test_a_shape_s_own_streams_may_be_stated():
    config = an_optimizer("torch.optim:Adafactor")
    config = with_values(
        config, {"sync": dict.fromkeys(("params", "row_var", "col_var", "variance"), 2)}
    )
    check_streams(config)


class Forgetful(torch.optim.SGD):
    """An optimizer that remembers in a list, of which no stream knows."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                seen = self.state[p].setdefault("seen", [])
                seen.append(p.detach().clone())
                p.data.add_(seen[0], alpha=0.01)


class Counting(torch.optim.SGD):
    """Keeps an array, which neither is a tensor nor has a truth."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].get("count", np.zeros(2))
                self.state[p]["count"] = count + 1
                p.data.mul_(1 - 0.01 * float(count[0]))


def test_qhadam_by_its_import_path_passes_the_trial_and_trains(tmp_path):
    """In place of an optimizer of the project's own (docs/explanation/beyond.md)."""
    words = [*SMALL, "optimizer.name=pytorch_optimizer:QHAdam", "optimizer.lr=0.003"]
    words += ["optimizer.options={nus: [0.7, 1.0], betas: [0.99, 0.95], eps: 1e-6}", "run.steps=24"]
    words += ["sync.exp_avg=6", *(f"sync.{name}=12" for name in QHADAM if name != "exp_avg")]
    config = load("cnn.yaml", words)
    names = check_optimizer(partial(build_optimizer, config), 3, 2)
    assert sorted(names) == sorted(["params", *QHADAM])
    arguments = {"config": "cnn.yaml", "overrides": " ".join(words), "output-dir": str(tmp_path)}
    run_in_process(arguments, 2)
    loss = summary(tmp_path / "cnn")["evaluation"]["central"]["loss"]
    assert loss["final"] < loss["first"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim:NAdam", "'mu_product' of NAdam is not zero before the first step"),
        ("torch.optim:LBFGS", "closure"),
        ("pytorch_optimizer:SimplifiedAdEMAMix", "remembers more than its step count"),
        ("pytorch_optimizer:ScheduleFreeAdamW", "remembers more than its step count"),
        ("pytorch_optimizer:SOAP", "remembers more than its step count"),
        ("pytorch_optimizer:Prodigy", "remembers more than its step count"),
        ("test_examples:Forgetful", "remembers more than its step count"),
        ("test_examples:Counting", "remembers more than its step count"),
    ],
)
def test_an_optimizer_whose_memory_would_be_lost_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"optimizer.name={name}: .*{message}"):
        check_streams(an_optimizer(name))


def test_frozen_parameters_are_given_to_no_optimizer():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    for name in ("adam", "pytorch_optimizer:Lion"):
        (group,) = build_optimizer(an_optimizer(name), module.parameters()).param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in module[1].parameters()]


def ademamix(params: Any) -> torch.optim.Optimizer:
    return build_optimizer(an_optimizer("pytorch_optimizer:AdEMAMix"), params)


def test_the_servers_optimizer_goes_on_where_it_was():
    """Data parallelism, whose one optimizer counts its steps once for all parameters."""
    grads = [{"x": torch.tensor([1.0, -2.0]) * (t + 1)} for t in range(6)]
    whole, first, then = (OuterOptimizer(ademamix) for _ in range(3))
    for outer in (whole, first):
        outer.begin({"x": torch.ones(2)})
    for step, grad in enumerate(grads):
        expected = whole.step(grad, step)
    for step, grad in enumerate(grads[:3]):
        first.step(grad, step)
    then.begin(first.params)
    then.restore({name: dict(stream) for name, stream in first.state.items()})
    for step, grad in enumerate(grads[3:], start=3):
        got = then.step(grad, step)
    assert torch.equal(got["x"], expected["x"])


# ---------------------------------------------------------------------------------- Configuration


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=nowhere:Task"], r"task=nowhere:Task: .*\(ModuleNotFound.*\); call desloc in"),
        (["task=cnn:CMM"], r"task=cnn:CMM: it cannot be imported here \(AttributeError.*\)$"),
        (["task=cnn.CNN"], r"task=cnn\.CNN: must be one of causal_lm, .*module:name"),
        (
            ["optimizer.name=nowhere:Lion", "optimizer.lr=1"],
            r"optimizer\.name=nowhere:Lion: it cannot be imported",
        ),
        (
            ["optimizer.name=cnn:CNN", "optimizer.lr=1"],
            r"optimizer\.name=cnn:CNN: it cannot be constructed",
        ),
        (["optimizer.name=lion"], r"optimizer\.name=lion: must be one of adopt, .*module:name"),
        (["optimizer.options.betas=[0.9,0.9]"], r"set optimizer\.KEY=VALUE"),
        (
            ["optimizer.name=torch.optim:Adagrad", "optimizer.lr=1", "optimizer.weight_decay=0.1"],
            r"set optimizer\.options\.weight_decay for optimizer\.name=torch\.optim:Adagrad",
        ),
        (
            ["optimizer.name=torch.optim:Adagrad", "optimizer.lr=1", "optimizer.options.beta=1"],
            r"cannot be constructed with .*options=\{'beta': 1\} \(TypeError.*'beta'",
        ),
        (["task=causal_lm"], r"task_options=\{'width': 8\}: they are for a task of your own"),
        (["data.partition=by_hand"], r"data\.partition=by_hand: must be one of by_domain, dir"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence_that_names_the_setting(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_streams(load("cnn.yaml", overrides))


def test_a_class_that_is_no_task_is_refused_before_anything_is_trained():
    config = load("cnn.yaml", ["task=flower_desloc.app.config:dump"])
    with pytest.raises(ConfigError, match=r"is not a task, it lacks build_model, client_data, "):
        build_task(config)


def test_a_task_that_does_not_read_a_sites_private_data_is_refused_there(tmp_path):
    """Otherwise the client would train on other data without an error."""
    parts = RunParts(dump(load("cnn.yaml")), {}, CPU)
    with pytest.raises(
        ValueError, match=r"^data-path=.*: task=cnn:CNN does not state that it reads site.data_path"
    ):
        parts.single_worker({"data-path": str(tmp_path)})
    assert parts.single_worker({"partition-id": 0, "num-partitions": 2})


def test_options_keep_their_types_on_the_way_to_the_clients():
    words = ["task_options.deep.list=[1,2.5,a]", "task_options.flag=true", "task_options.n=null"]
    config = load("lion.yaml", words)
    options = {"width": 8, "deep": {"list": [1, 2.5, "a"]}, "flag": True, "n": None}
    assert config.task_options == options
    assert parse(dump(config)) == config


@pytest.mark.parametrize(
    ("module", "code", "told"),
    [
        ("leaves", "import sys\nsys.exit(3)\n", "it cannot be imported here (SystemExit: 3)"),
        ("needs", "import nolibrary\n", "the folder that holds nolibrary, or install it, at every"),
    ],
)
def test_the_command_says_why_a_module_cannot_be_imported(
    tmp_path, monkeypatch, module, code, told
):
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    error = refused("run", "quickstart", f"task={module}:Task", "--dry-run")
    assert f"task={module}:Task: " in error
    assert told in error


def test_the_command_imports_from_the_folder_where_it_is_called(tmp_path, monkeypatch):
    shutil.copy(EXAMPLES / "cnn.py", tmp_path / "cnn_beside_me.py")
    command = ["run", str(EXAMPLES / "cnn.yaml"), "task=cnn_beside_me:CNN", "--dry-run"]
    monkeypatch.setenv(IMPORT_FROM, "")  # which the command changes
    error = refused(*command)
    assert "task=cnn_beside_me:CNN: it cannot be imported here (ModuleNotFound" in error
    monkeypatch.chdir(tmp_path)
    assert "each client will send, in 96 steps" in accepted(*command)


# ----------------------------------------------------------------------------------------- Library


def test_a_flower_app_of_forty_lines_learns(monkeypatch, tmp_path, capsys):
    source = EXAMPLES / "stock_app" / "stock_app.py"
    assert len(source.read_text().splitlines()) < 40
    monkeypatch.syspath_prepend(source.parent)
    stock_app = importlib.import_module("stock_app")
    nodes = [{"partition-id": i, "state-dir": str(tmp_path)} for i in range(3)]
    context = Context(1, 0, {}, RecordDict(), {"lr": 0.1})
    torch.manual_seed(0)
    stock_app.server(InProcessGrid(stock_app.client, nodes), context)
    slopes = re.findall(r"-?\d+\.\d+", capsys.readouterr().out.rpartition("slopes:")[2])
    assert [float(slope) for slope in slopes] == pytest.approx([1, -2, 3], abs=0.1)


@pytest.fixture
def printed_app(tmp_path: Path) -> Callable[..., Any]:
    """A function that runs the app on the page, in a folder, and returns what it saved."""

    def app(folder: str, change: Callable[[dict[str, Any]], Any] = dict) -> dict[str, torch.Tensor]:
        names: dict[str, Any] = {}
        exec(printed("app", "python"), names)
        change(names)
        nodes = [{"partition-id": i, "state-dir": str(tmp_path / "state")} for i in range(3)]
        config: dict[str, Any] = {"lr": 0.02, "folder": str(tmp_path / folder)}
        names["server"](
            InProcessGrid(names["client"], nodes), Context(1, 0, {}, RecordDict(), config)
        )
        return torch.load(tmp_path / folder / "model.pt")

    return app


def test_the_app_on_the_page_learns_and_says_its_bytes(printed_app, capsys):
    model = printed_app("run")
    assert model["1.running_mean"].any()
    printed_bytes = [int(n) for n in re.findall(r"(\d+) bytes up", capsys.readouterr().out)]
    assert len(printed_bytes) == 1 + 12
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).eval()
    net.load_state_dict(model)
    assert (net(x) - x.sum(1, keepdim=True)).square().mean() < 0.3 < x.sum(1).square().mean()


def test_the_app_on_the_page_resumes_and_ends_with_the_same_weights(printed_app, capsys):
    def stops(names: dict[str, Any]) -> None:
        window = names["Bytes"].window

        def until(self: Any, record: Any) -> None:
            window(self, record)
            if record.step == 56:
                raise KeyboardInterrupt

        names["Bytes"].window = until

    with pytest.raises(KeyboardInterrupt):
        printed_app("stopped", stops)
    capsys.readouterr()
    resumed = printed_app("stopped")
    assert re.findall(r"step (\d+): \d+ bytes", capsys.readouterr().out)[:2] == ["56", "64"]
    whole = printed_app("whole")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_the_app_on_the_page_goes_on_without_a_client_that_fails(printed_app, capsys):
    def fails(names: dict[str, Any]) -> None:
        def build(config: Any, context: Context) -> Worker:
            worker: Worker = names["build"](config, context)

            def loss_at(step: int) -> torch.Tensor:
                if step == 20 and context.node_config["partition-id"] == 2:
                    raise RuntimeError("no more memory")
                return worker.loss_at(step)

            return replace(worker, loss_at=loss_at)

        names["client"] = client_app_of(build)

    printed_app("run", fails)
    lines = [line for line in capsys.readouterr().out.splitlines() if "no more memory" in line]
    assert [line.split(":")[0] for line in lines] == ["step 24"]


QUICKSTART_TASK = """
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

def load_data(partition_id, num_partitions, batch_size):
    images, labels = load_digits(return_X_y=True)
    here = slice(partition_id, None, num_partitions)
    data = Dataset.from_dict({"img": images[here] / 16, "label": labels[here]})
    parts = data.train_test_split(test_size=0.2, seed=42)
    parts = parts.with_transform(lambda d: {**d, "img": [torch.tensor(i) for i in d["img"]]})
    return [DataLoader(parts[name], batch_size) for name in ("train", "test")]

def test(net, loader, device):
    batch = loader.dataset[:]
    logits, labels = net(torch.stack(batch["img"])), torch.tensor(batch["label"])
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).float().mean().item()

load_centralized_dataset = None  # the test does not call global_evaluate
"""


def test_flowers_quickstart_learns_with_the_changes_on_the_page(monkeypatch, tmp_path):
    """The client as printed, and the server's main as the diff leaves it, with other images."""
    client_code, server = printed("client", "python"), printed("server", "diff")
    head, main = re.split(r"^@@ .*\n", server, flags=re.MULTILINE)[1:]
    after = [line[1:] for line in (head + main).splitlines() if not line.startswith("-")]
    body = after.index('    """Main entry point for the ServerApp."""')
    after[body:body] = ["def main(grid, context):"]

    package = tmp_path / "pytorchexample"
    package.mkdir()
    (package / "task.py").write_text(QUICKSTART_TASK)
    (package / "client_app.py").write_text(client_code)
    (package / "server_app.py").write_text("\n".join([*after, "    return result"]))
    monkeypatch.syspath_prepend(tmp_path)
    server_app = importlib.import_module("pytorchexample.server_app")
    client = importlib.import_module("pytorchexample.client_app")
    evaluations = []
    monkeypatch.setattr(
        server_app, "global_evaluate", lambda *at: evaluations.append(at[0]), raising=False
    )
    config: dict[str, Any] = {"num-steps": 96, "learning-rate": 0.003, "batch-size": 32}
    nodes = [{"partition-id": i, "num-partitions": 3, "state-dir": str(tmp_path)} for i in range(3)]
    lines = []
    monkeypatch.setattr(
        "flower_desloc.flower.log_lines.log", lambda _, text, *values: lines.append(text % values)
    )
    grid = InProcessGrid(client.app, nodes, run_config=config)
    result = server_app.main(grid, Context(1, 0, {}, RecordDict(), config))
    assert evaluations == [0, 3, 6]
    measured = result.evaluate_metrics_clientapp
    assert measured[6]["eval_acc"] > 0.8 > 0.3 > measured[0]["eval_acc"]
    # The run, where the clients keep their state, who takes part; round 0, and six windows.
    assert len(lines) == 3 + 7
    last = r"step 96 of 96: averaged params, exp_avg, exp_avg_sq; train loss [\d.]+; "
    assert re.fullmatch(last + r"eval_acc 0[.\d]+, eval_loss [.\d]+ on the clients", lines[-1])
