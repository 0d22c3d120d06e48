"""The examples that the page runs: they learn, resume, export, and only what is trained travels."""

import filecmp
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import accepted
from own_code import EXAMPLES, PAGE, SMALL, printed
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import failing_at, summary
from torch import nn

from client_app.worker import RunParts
from flower_desloc.app.config import load, parse
from flower_desloc.app.engines.in_process import run_in_process
from flower_desloc.app.setup.build import build_clipping, build_lr_schedule, build_optimizer
from flower_desloc.app.tasks import build_task
from flower_desloc.app.tasks.causal_lm import CausalLM
from flower_desloc.core.streams import digest, frozen
from flower_desloc.core.worker import Clipping
from flower_desloc.flower.failures import FederationError

pytestmark = [
    pytest.mark.usefixtures("in_the_examples"),
    # peft 0.21 asks transformers 5.23 by a name that goes.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is dep:FutureWarning"),
]
COMMANDS = re.findall(r"^desloc run (\S+)\.yaml", PAGE, re.MULTILINE)
CPU = torch.device("cpu")


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
