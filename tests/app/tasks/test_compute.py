"""How a loss is computed: in parts, in bf16 or compiled, it is the same loss."""

import logging
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from tiny import TINY
from torch import nn
from torch.nn import functional

import server_app
from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.setup.build import build_local_optimizer, build_optimizer
from flower_desloc.app.tasks import Site, build_task
from flower_desloc.app.tasks.compute import Evaluator, TrainingLoss

SMALL = {"text": ("quickstart", TINY), "images": ("digits", TINY[:3])}


@pytest.fixture(params=SMALL)
def of(request):
    """The loss and gradients of a task's first batch under further settings."""
    preset, small = SMALL[request.param]

    def loss_and_gradients(settings=""):
        config = load(preset, [*small, "data.batch_size=6", *settings.split()])
        task = build_task(config)
        model = task.build_model()
        loss = task.loss(model, task.client_data(Site(0, 4)).train_batch(0))
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters() if p.requires_grad]

    return loss_and_gradients


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_mean_over_micro_batches_is_that_of_the_batch(of, size):
    whole, parts = (of(f"model.dtype=float64 data.micro_batch_size={n}") for n in (6, size))
    torch.testing.assert_close(whole, of("model.dtype=float64"), rtol=0, atol=0)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_in_bf16_weights_and_gradients_stay_fp32_and_the_loss_near(of):
    (full, exact), (loss, gradients) = of(), of("model.precision=bf16")
    assert {g.dtype for g in gradients} == {loss.dtype} == {torch.float32}
    assert loss != full
    torch.testing.assert_close(loss, full, rtol=2e-2, atol=0)
    norms = (nn.utils.get_total_norm(g) for g in (gradients, exact))
    torch.testing.assert_close(*norms, rtol=5e-2, atol=0)


def test_in_bf16_a_model_is_evaluated_as_it_is_trained():
    nats = {}
    for precision in ("full", "bf16"):
        task = build_task(load("quickstart", [*TINY, f"model.precision={precision}"]))
        heldout = task.client_data(Site(0, 4)).heldout()
        nats[precision] = task.evaluate(task.build_model(), heldout)["nats"]
    assert nats["bf16"] != nats["full"]
    assert nats["bf16"] == pytest.approx(nats["full"], rel=2e-2)


@pytest.mark.parametrize("task_kind", SMALL)
def test_an_evaluation_in_micro_batches_is_that_of_whole_batches(task_kind):
    """To the bit where a micro-batch holds the whole batch, and never with more rows at once."""
    preset, small = SMALL[task_kind]

    def totals(settings=""):
        config = load(preset, [*small, "data.batch_size=12", *settings.split()])
        task, rows = build_task(config), []
        model = task.build_model()
        model.register_forward_pre_hook(
            lambda _, __, given: rows.append(len(next(iter(given.values())))), with_kwargs=True
        )
        (batch, *_) = task.client_data(Site(0, 4)).heldout()
        return task.evaluate(model, [batch]), rows

    whole, [most] = totals()
    assert totals("data.micro_batch_size=12") == (whole, [most])
    parts, rows = totals("data.micro_batch_size=3")
    assert max(rows) == 3
    assert sum(rows) == most > 3
    assert parts == {key: pytest.approx(value, rel=1e-5) for key, value in whole.items()}


def test_an_evaluation_without_memory_is_tried_again_with_half_the_rows(caplog):
    seen = []

    def measure(_model, rows):
        seen.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rows.sum().item()

    evaluation = Evaluator(measure, load("quickstart", "data.micro_batch_size=8"))
    model, rows = nn.Linear(1, 1), torch.arange(16.0)
    assert sum(evaluation(model, rows)) == rows.sum()
    assert model.training
    assert seen == [8, 4, *[2] * 8]
    assert "going on with 2" in caplog.text


def test_the_server_evaluates_on_the_cpu_where_its_gpu_is_too_small(monkeypatch, caplog):
    devices = []

    def totals(_task, _model, device):
        devices.append(device.type)
        return None if device.type == "cuda" else {"a": {"nats": 2.0, "tokens": 1.0, "bytes": 1.0}}

    monkeypatch.setattr(server_app, "_totals", totals)
    monkeypatch.setattr(server_app, "default_device", lambda: torch.device("cuda"))
    config = load("quickstart", TINY)
    task = build_task(config)
    evaluate = server_app._evaluate_fn(config, task, task.build_model())
    found: list[Any] = [evaluate(n, ArrayRecord()) for n in (1, 2)]
    assert [metrics["loss"] for metrics in found] == [2.0, 2.0]
    assert devices == ["cuda", "cpu", "cpu"]
    assert "on the CPU" in caplog.text


def twice_if_compiled(model, tensor):
    loss = model(tensor).square().mean()
    return 2 * loss if torch.compiler.is_compiling() else loss


@pytest.fixture
def compiling(tmp_path, monkeypatch):
    """A compiled loss."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    # Precompiled headers take longer than the one kernel they are for, and so do its vectors.
    with config.patch({"cpp_cache_precompile_headers": False, "cpp.simdlen": 1}):
        yield TrainingLoss(twice_if_compiled, load("quickstart", "model.compile=true"))
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "expected"), [("adopt", [{"dynamic": False}]), ("adam", [])])
def test_the_steps_of_our_own_optimizers_are_compiled(name, expected, monkeypatch):
    """To the same numbers, see test_optim.py; PyTorch's Adam is one kernel without that."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda update, **options: compiled.append(options))
    config = load("quickstart", f"optimizer.name={name} optimizer.lr=0.1 model.compile=true")
    build_local_optimizer(config, nn.Linear(7, 5))
    assert compiled == expected


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
def test_a_compiled_loss_is_compiled(compiling):
    model = nn.Linear(4, 3, dtype=torch.float64).requires_grad_(False)  # no backward to compile
    tensor = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    expected = 2 * twice_if_compiled(model, tensor).item()
    assert compiling(model, tensor).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("default")
def test_without_a_compiler_training_goes_on_and_one_line_says_so(compiling, caplog):
    from torch._inductor import config

    model, tensor = nn.Linear(5, 3), torch.ones(2, 5)
    with (
        config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        caplog.at_level(logging.WARNING, "flower_desloc"),
    ):
        losses = [compiling(model, tensor) for _ in range(3)]
    assert losses == [twice_if_compiled(model, tensor)] * 3
    [line] = [r for r in caplog.records if r.name.startswith("flower_desloc")]
    assert "model.compile=true: going on without" in line.message
    assert "\n" not in line.message


def test_an_error_of_the_model_is_its_own_compiled_or_not(compiling):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        compiling(nn.Linear(5, 3), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("model.precision=fp16", "model.precision=fp16: must be one of full, bf16"),
        ("model.precision=bf16 model.dtype=float64", "needs model.dtype=float32"),
    ],
)
def test_a_precision_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load("quickstart", settings)


@pytest.mark.parametrize("name", ["adam", "adamw", "amsgrad"])
def test_the_configured_adam_is_pytorchs_fused_and_the_plain_one_to_rounding(name):
    sync = "sync.max_exp_avg_sq=768" if name == "amsgrad" else ""
    config = load("quickstart", f"optimizer.name={name} optimizer.weight_decay=0.1 {sync}")
    ours, theirs = nn.Linear(7, 5), nn.Linear(7, 5)
    theirs.load_state_dict(ours.state_dict())
    fused = build_optimizer(config, ours.parameters())
    assert fused.defaults["fused"]
    same = {k: fused.defaults[k] for k in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
    make: Any = type(fused)
    plain = make(theirs.parameters(), **same, foreach=False, fused=False)
    for t in range(5):
        for module, optimizer in ((ours, fused), (theirs, plain)):
            optimizer.zero_grad()
            functional.mse_loss(module(torch.full((2, 7), t + 1.0)), torch.ones(2, 5)).backward()
            optimizer.step()
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-5, atol=1e-6)
