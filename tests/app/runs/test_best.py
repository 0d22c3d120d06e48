"""`run.keep_best` and `run.patience`, also where a run is resumed."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from light_task import Light
from safetensors.torch import load_file
from tiny import failing_at, summary, train

from flower_desloc.app import load_run
from flower_desloc.app.config import Config, ConfigError, load
from flower_desloc.app.runs.best import Criterion, KeepBest
from flower_desloc.app.runs.copy import CopyView
from flower_desloc.app.runs.folder import RunFolder, read_lines
from flower_desloc.app.runs.recorder import to_line
from flower_desloc.core.streams import digest, parameters
from flower_desloc.flower.checkpoint import Checkpoints
from flower_desloc.flower.observer import EvaluationRecord, Traffic, WindowRecord

LOSSES = (3.0, 2.0, 4.0, 1.0, 1.0, 5.0, 0.5)


def config_of(*words: str) -> Config:
    return load("quickstart", ["run.keep_best=loss", *words])


def record_of(step: int, loss: float) -> WindowRecord:
    return WindowRecord(
        round=step, start=max(0, step - 1), step=step, streams=[], train_loss=None, clients={},
        left_out={}, traffic=Traffic(), drift={}, seconds={},
        central=EvaluationRecord(overall={"loss": loss}, parts={}),
    )  # fmt: skip


class Server:
    """The parts of a server's life around its hook, with a checkpoint every third window."""

    def __init__(self, folder: Path, resume: int = -1, **run: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.checkpoint, self.step = RunFolder(folder), resume, 0
        if resume >= 0:
            self.folder.rewind(resume)
        words = [f"run.{key}={value}" for key, value in run.items()]
        self.hook = KeepBest(config_of(*words), self.folder, self.save, lambda: self.checkpoint)

    def save(self, path: Path) -> None:
        (path / "model").write_text(str(self.step))

    def run(self, losses: Sequence[float], *, killed_in: int = -1) -> int:
        """Evaluate after each window from the checkpoint on; return the windows that were run."""
        for step in range(self.checkpoint + 1, len(losses)):
            if self.hook.finished:
                return step
            self.window(step, losses[step])
            if step == killed_in:  # between the hook and the checkpoint
                break
            if step % 3 == 0:
                self.checkpoint = step
        return len(losses)

    def window(self, step: int, loss: float) -> None:
        self.step, record = step, record_of(step, loss)
        self.folder.append_metrics(to_line(record))
        self.hook.window(record)

    def kept(self) -> tuple[int, float]:
        about = json.loads((self.folder.best / "best.json").read_text())
        assert (self.folder.best / "model").read_text() == str(about["step"])
        return about["step"], about["value"]


def test_the_first_of_the_best_is_kept(tmp_path):
    server = Server(tmp_path)
    for end, best in enumerate([0, 1, 1, 3, 3, 3, 6], start=1):
        server.run(LOSSES[:end])
        server.checkpoint = end - 1
        assert server.kept() == (best, LOSSES[best])


@pytest.mark.parametrize("killed_in", range(1, 7))
def test_a_run_that_resumes_from_its_checkpoint_has_the_best_of_what_it_then_finds(
    killed_in, tmp_path
):
    """Also where the windows that it repeats end otherwise: a client has lost its state."""
    server = Server(tmp_path)
    server.run(LOSSES, killed_in=killed_in)
    after = server.checkpoint
    resumed = Server(tmp_path, resume=after)
    seen = LOSSES[: after + 1]
    assert resumed.kept() == (seen.index(min(seen)), min(seen))
    others = [*seen, *(loss + 0.25 for loss in LOSSES[after + 1 :])]
    resumed.run(others)
    assert resumed.kept() == (others.index(min(others)), min(others))


def test_a_run_that_resumes_from_an_earlier_checkpoint_forgets_later_models(tmp_path):
    Server(tmp_path).run(LOSSES)
    others = (3.0, 2.5, 4.0, 4.0, 4.0)
    Server(tmp_path, resume=0).run(others)
    assert Server(tmp_path, resume=3).kept() == (1, 2.5)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_has_the_best_model_up_to_its_last_checkpoint_at_every_moment(seed, tmp_path):
    """However many windows end while one file is copied, and wherever the copy breaks off."""
    store, root = fsspec.filesystem("memory"), f"/best-{seed}/a"
    draw = random.Random(seed)
    losses = [draw.random() * 0.9**step for step in range(40)]
    server, steps = Server(tmp_path / "a"), iter(range(40))
    view = CopyView(server.folder, f"memory:/{root.removesuffix('/a')}")

    def go_on() -> bool:
        if (step := next(steps, None)) is None:
            return False
        server.window(step, losses[step])
        if step % draw.randint(1, 3) == 0:
            server.checkpoint = step
            server.folder.checkpoints.mkdir(exist_ok=True)
            (server.folder.checkpoints / f"step-{step:08}.safetensors").write_text(str(step))
            for old in Checkpoints(server.folder.checkpoints).all()[:-2]:
                old.unlink()
        return True

    def check() -> None:
        steps = [int(name[-20:-12]) for name in store.glob(f"{root}/checkpoints/*")]
        if not steps:
            return
        at = tmp_path / "resumed"
        shutil.rmtree(at, ignore_errors=True)
        store.get(root, str(at), recursive=True)
        best, value = Server(at, resume=max(steps)).kept()
        assert value == losses[best] == min(losses[: max(steps) + 1])

    def watched(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*what: object) -> None:
            for _ in range(draw.choice([0, 0, 1, 4])):
                go_on()
            if draw.random() < 0.05:
                raise OSError
            change(*what)
            check()

        return changed

    view._remote.put = watched(view._remote.put)  # type: ignore[method-assign]
    view._remote.delete = watched(view._remote.delete)  # type: ignore[method-assign]
    while go_on():
        try:
            view._copy()
        except OSError:
            view._models.clear()  # as for another start of the server
    assert not list(steps)
    check()
    view.finish(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("patience", "windows"), [(1, 3), (2, 6), (3, 7)])
def test_a_run_ends_after_so_many_evaluations_without_a_better_one(patience, windows, tmp_path):
    assert Server(tmp_path / "whole", patience=patience).run(LOSSES) == windows
    for killed_in in range(1, windows):  # before the first checkpoint there is no resume
        folder = tmp_path / str(killed_in)
        cut_off = Server(folder, patience=patience)
        cut_off.run(LOSSES, killed_in=killed_in)
        resumed = Server(folder, resume=cut_off.checkpoint, patience=patience)
        assert resumed.run(LOSSES) == windows


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run.keep_best=loss"], ("central", "loss", 1)),
        (["run.keep_best=accuracy", "evaluation.central=false"], ("federated", "accuracy", 2)),
        (["run.keep_best=federated/loss"], ("federated", "loss", 1)),
        (["run.keep_best=max:central/top/5"], ("central", "top/5", 2)),
    ],
)
def test_a_metric_is_named_with_where_it_is_measured_and_what_is_better(words, expected):
    found = Criterion.of(config_of(*words))
    assert (found.where, found.metric, found.better(1, 2)) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.keep_best=f1"], r"set run\.keep_best=max:central/f1, or min:central/f1"),
        (["run.keep_best=central/loss", "evaluation.central=false"], r"needs evaluation\.central"),
    ],
)
def test_a_metric_that_cannot_be_compared_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        Criterion.of(config_of(*words))


def test_a_run_whose_clients_evaluate_nothing_says_that_none_of_its_models_is_the_best(
    tmp_path, caplog
):
    words = ["run.keep_best=federated/loss"]
    hook = KeepBest(config_of(*words), RunFolder(tmp_path), lambda _: None, lambda: -1)
    for step in range(3):
        hook.window(record_of(step, 1.0))  # evaluated on the server alone
    assert [r.levelname for r in caplog.records if "run.keep_best" in r.getMessage()] == ["WARNING"]


def test_a_metric_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="no metric accuracy; it has loss"):
        Criterion.of(config_of("run.keep_best=accuracy")).value({"loss": 1.0})


RUN = [
    *("optimizer.lr=0.05", "lr_schedule.name=constant"),
    "sync={params: 2, exp_avg: 4, exp_avg_sq: 4}",
    *("run.steps=40", "run.eval_every=2", "run.keep_best=federated/loss", "run.patience=2"),
    "run.checkpoint_every=3",
]  # fmt: skip


def test_a_whole_run_keeps_the_best_model_ends_early_and_so_does_its_resume(tmp_path):
    (tmp_path / "light.yaml").write_text(f"extends: quickstart\ntask: {Light.__module__}:Light\n")

    def run(folder: str, *words: str) -> Path:
        return train(tmp_path / folder, *RUN, *words, config=str(tmp_path / "light.yaml"))

    whole = run("whole")
    lines = list(read_lines(whole / "metrics.jsonl"))
    losses = {x["step"]: x["evaluation"]["federated"]["overall"]["loss"] for x in lines}
    best = min(losses, key=losses.__getitem__)
    about = json.loads((whole / "best" / "best.json").read_text())
    assert about == {"metric": "federated/loss", "value": losses[best], "step": best}
    last = summary(whole)
    assert (last["status"], last["steps"]) == ("completed", best + 4)
    assert last["steps"] < 40
    assert Checkpoints(whole / "checkpoints").all()[-1].name.endswith(f"{best + 4:08}.safetensors")
    assert digest(parameters(load_run(whole).model())) == last["weights_sha256"]
    with failing_at(lines[-1]["round"]):
        run("cut off")
    resumed = run("cut off", "run.resume=auto")
    assert summary(resumed)["weights_sha256"] == last["weights_sha256"]
    models = [load_file(folder / "best" / "model.safetensors") for folder in (whole, resumed)]
    assert all(models[0][key].equal(tensor) for key, tensor in models[1].items())
