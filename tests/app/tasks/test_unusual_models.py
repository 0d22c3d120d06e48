"""Runs of tasks whose models are compiled, quantised, in half precision, or cannot be trained."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from light_task import Light
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.runs.export import export
from flower_desloc.app.setup.measured_step import measured_step
from flower_desloc.app.setup.preflight import Needs
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.streams import frozen, parts
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints

aten = torch.ops.aten


class Plain(Light):
    """Two layers and BatchNorm."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


class Compiled(Plain):
    """The eager backend needs no compiler, and names tensors as every other does."""

    def build_model(self) -> nn.Module:
        model: Any = torch.compile(super().build_model(), backend="eager")
        return model


class PartlyCompiled(Plain):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model[0] = torch.compile(model[0], backend="eager")
        return model


class Quantised(Tensor):
    """Int8 codes and a scale, used as float32; refuses what it does not know, as torchao's does."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Quantised":
        kind: dict[str, Any] = {"dtype": scale.dtype, "device": codes.device}
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, **kind)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as a function of any arguments
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten._to_copy.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        if func not in (aten.t.default, aten.mm.default, aten.addmm.default, aten.linear.default):
            raise NotImplementedError(f"{func} of {cls.__name__}")
        values = [a.codes * a.scale if isinstance(a, cls) else a for a in args]
        return func(*values, **(kwargs or {}))


class QuantisedBase(Plain):
    codes = 3

    def build_model(self) -> nn.Module:
        codes = torch.full((4, 4), self.codes, dtype=torch.int8)
        base = nn.Linear(4, 4)
        base.requires_grad_(False)
        nn.init.zeros_(base.bias)
        base.weight = nn.Parameter(Quantised(codes, torch.tensor(0.1)), requires_grad=False)
        return nn.Sequential(base, super().build_model())


class Half(Plain):
    def build_model(self) -> nn.Module:
        return super().build_model().bfloat16()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return mse_loss(model(batch[0].bfloat16()).float(), batch[1])


class Sparse(Plain):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(3, 4, sparse=True), super().build_model())


class ComplexBias(Plain):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model[3].bias = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        return model


def matrices(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """An optimizer that ignores all but matrices."""
    return torch.optim.SGD([p for p in params if p.dim() == 2], lr=lr, momentum=0.9)


SETTINGS = ["run.steps=6", "run.eval_every=0", "sync.params=3", "sync.exp_avg=3"]
SETTINGS += ["sync.exp_avg_sq=6", "sync.buffers=3", "evaluation.federated=false"]


def settings(task: type[Plain]) -> list[str]:
    return [*SETTINGS, f"task={__name__}:{task.__name__}"]


def run(task: type[Plain], folder: Path, *more: str) -> Path:
    return tiny.train(folder, *settings(task), *more)


def sha(folder: Path) -> str:
    return tiny.summary(folder)["weights_sha256"]


def test_a_compiled_model_has_the_names_of_its_run_without(tmp_path):
    """Another run's model starts it, and it starts another's; its checkpoint is exported."""
    folders = {task: run(task, tmp_path, "run.checkpoint_every=1") for task in (Plain, Compiled)}
    assert sha(folders[Plain]) == sha(folders[Compiled])
    again = {
        (task, start): run(task, tmp_path, f"run.init_from={folders[start]}")
        for task, start in [(Plain, Compiled), (Compiled, Plain), (PartlyCompiled, Compiled)]
    }
    assert len({sha(folder) for folder in again.values()}) == 1
    last = Checkpoints(folders[Compiled] / "checkpoints").all()[-1]
    assert not any("_orig_mod" in key for key in Checkpoint.read(last).averages["params"])
    export(last, tmp_path / "export")


def test_a_quantised_base_is_compared_and_counted_by_what_it_holds(tmp_path, monkeypatch):
    config = load("quickstart", settings(QuantisedBase))
    model: Any = QuantisedBase(config).build_model()
    needs = Needs(config)
    sizes = [part.nbytes for t in model.state_dict().values() for part in parts(t)]
    assert needs.weight_bytes == sum(sizes)
    assert needs.client_disk_bytes() > 0
    assert measured_step(config, torch.device("cpu"), 16).peak > 0
    before = frozen(model)
    monkeypatch.setattr(QuantisedBase, "codes", 4)
    assert frozen(QuantisedBase(config).build_model()) != before
    linear(torch.ones(1, 4), model[0].weight)  # it works
    assert tiny.summary(run(QuantisedBase, tmp_path))["status"] == "completed"


class Unsaved(Plain):
    def save(self, model: nn.Module, folder: Path) -> None:
        raise RuntimeError("invalid python storage")


def test_a_model_that_cannot_be_saved_says_what_failed_and_a_resume_only_saves_it(
    tmp_path, monkeypatch
):
    with pytest.raises(ValueError, match=r"all steps are done, but the save .*Unsaved.*storage"):
        run(Unsaved, tmp_path, "run.checkpoint_every=1")
    [folder] = tmp_path.glob("*/")
    with pytest.raises(ValueError, match=r"the save of task=.*Unsaved failed \(invalid python"):
        export(folder)
    monkeypatch.setattr(Unsaved, "save", Light.save)
    run(Unsaved, tmp_path, "run.checkpoint_every=1", f"run.resume={folder}")
    found = tiny.summary(folder)
    assert (found["status"], found["resumed"][0]["windows_again"]) == ("completed", 0)


def test_a_model_in_bfloat16_is_trained_saved_and_started_from(tmp_path):
    first = run(Half, tmp_path, "run.checkpoint_every=1", "evaluation.federated=true")
    found = tiny.summary(first)
    numel = sum(p.numel() for p in Half(load("quickstart")).build_model().parameters())
    assert (
        found["bytes"]["measured"]["up"]["params"] == 2 * 2 * 2 * numel
    )  # two clients, twice, two bytes
    lossy = ["compression.params=int8", "compression.exp_avg=int8", "compression.exp_avg_sq=bf16"]
    second = run(Half, tmp_path, f"run.init_from={first}", *lossy)
    assert tiny.summary(second)["status"] == "completed"
    assert sha(second) != sha(first)


@pytest.mark.parametrize(
    ("task", "more", "said"),
    [
        (Sparse, [], "Sparse: parameter '0.weight' has sparse gradients.*sparse=True"),
        (ComplexBias, [], "ComplexBias: parameter '3.bias' is of type torch.complex64"),
        (
            Plain,
            [
                "optimizer.name=test_unusual_models:matrices",
                "optimizer.lr=0.1",
                "sync.momentum_buffer=3",
            ],
            "optimizer.name=test_unusual_models:matrices: it does not hold '0.bias', '1.bias', "
            "'1.weight' and 1 more.*requires_grad=False for these in build_model",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_run_by_name(task, more, said):
    config = load("quickstart", [*settings(task), *more])
    with pytest.raises(ConfigError, match=said):
        RunStreams(config).initial(task(config).build_model())
