"""Micro-batches are found by steps on the device, and halved where it has too little memory."""

import logging

import pytest
import tiny
import torch
from torch import nn

from client_app.worker import RunParts
from flower_desloc.app.config import dump, load
from flower_desloc.app.setup import measured_step as steps
from flower_desloc.app.setup.measured_step import measured_step, with_micro_batch_size
from flower_desloc.app.tasks.compute import Evaluator, TrainingLoss

CPU, GPU = torch.device("cpu"), torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def auto(*settings):
    return load("quickstart", [*tiny.TINY, "data.micro_batch_size=auto", *settings])


class SmallGPU:
    """Stands for ``torch.cuda`` and steps on it: a GPU that holds so many rows."""

    def __init__(self, rows, monkeypatch, error=torch.OutOfMemoryError):
        self.rows, self.error = rows, error
        self.tried: list[int] = []
        self.shares: list[float] = []
        monkeypatch.setattr(steps, "measured_step", self.step)
        monkeypatch.setattr(
            torch.cuda,
            "set_per_process_memory_fraction",
            lambda share, _: self.shares.append(share),
        )

    def step(self, config, device, rows, data_path):
        assert (device, data_path) == (GPU, None)
        self.tried.append(rows)
        if rows > self.rows:
            raise self.error("too many")


@pytest.mark.parametrize(
    ("batch", "rows", "tried"),
    [
        (14, 3, [14, 7, 2]),  # 3 does not divide it
        (24, 1, [24, 12, 6, 3]),  # 1 is not tried: there is no less
        (1, 0, []),
    ],
)
def test_auto_halves_the_batch_until_a_step_fits_into_the_gpu(batch, rows, tried, monkeypatch):
    gpu = SmallGPU(rows, monkeypatch)
    config = auto(f"data.batch_size={batch}", "simulation.client_gpus=0.25")
    found = with_micro_batch_size(config, GPU).data.micro_batch_size
    assert gpu.tried == tried
    assert found == (tried[-1] if tried and tried[-1] <= rows else 1)
    assert batch % found == 0
    # Of the total memory, with a rest; afterwards there is no limit.
    assert gpu.shares == [pytest.approx(0.8 / 4), 1.0]


def test_auto_is_the_batch_where_a_step_raises_and_the_run_shows_why(monkeypatch):
    gpu = SmallGPU(0, monkeypatch, error=ValueError)
    assert with_micro_batch_size(auto("data.batch_size=8"), GPU).data.micro_batch_size == 8
    assert gpu.shares[-1] == 1


def test_auto_is_one_on_a_cpu_where_no_step_can_run_out_of_memory(monkeypatch):
    gpu = SmallGPU(8, monkeypatch)
    assert with_micro_batch_size(auto(), CPU).data.micro_batch_size == 1
    assert gpu.tried == gpu.shares == []


def test_nothing_is_measured_on_the_examples_of_a_private_client(monkeypatch):
    gpu = SmallGPU(8, monkeypatch)
    of_run = RunParts(dump(auto("privacy.epsilon=1")), {}, GPU)
    of_site = RunParts(dump(auto()), {}, GPU, is_private=True)
    assert [parts.config.data.micro_batch_size for parts in (of_run, of_site)] == [1, 1]
    assert gpu.tried == gpu.shares == []


def test_a_client_has_the_number_that_was_found_and_keeps_one_that_is_stated(monkeypatch):
    SmallGPU(3, monkeypatch)
    found = RunParts(dump(auto("data.batch_size=8")), {}, GPU).config
    assert found.data.micro_batch_size == 2
    for stated in (None, 4):
        config = load("quickstart", [f"data.micro_batch_size={stated or 'null'}"])
        assert RunParts(dump(config), {}, GPU).config == config


# --- During a run -----------------------------------------------------------------------------


class Small(nn.Module):
    """A GPU that holds so many rows, on the CPU."""

    def __init__(self, rows):
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.rows, self.seen = rows, []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.linear(x).square().mean()


def test_parts_without_memory_are_halved_with_a_warning_and_the_gradient_is_the_same(caplog):
    loss = TrainingLoss(lambda model, x: model(x), load("quickstart", "data.micro_batch_size=8"))
    x = torch.arange(64, dtype=torch.float64).view(16, 4).cos()
    model = Small(3)
    with caplog.at_level(logging.WARNING):
        loss(model, x).backward()
    (gradient,) = torch.autograd.grad(model.linear(x).square().mean(), model.linear.weight)
    torch.testing.assert_close(model.linear.weight.grad, gradient, rtol=1e-12, atol=0)
    assert model.seen == [8, 4, *[2] * 8]
    assert [r.message.rpartition(" ")[2] for r in caplog.records] == ["4", "2"]
    model.seen.clear()
    loss(model, x)
    assert model.seen == [2] * 8  # the larger ones are not tried again
    with pytest.raises(torch.OutOfMemoryError):
        loss(Small(0), x)


def test_without_a_number_auto_begins_with_the_batch_on_a_gpu_and_with_one_row_on_a_cpu():
    """As on the server and in clients of several processes."""
    rows = torch.arange(8.0)
    seen = []
    evaluation = Evaluator(lambda _, part: seen.append(len(part)), auto("data.batch_size=4"))
    evaluation(nn.Linear(1, 1), rows)
    assert seen == [1] * 8
    if torch.cuda.is_available():
        evaluation = Evaluator(lambda _, part: seen.append(len(part)), auto("data.batch_size=4"))
        evaluation(nn.Linear(1, 1, device=GPU), rows)
        assert seen[8:] == [4, 4]


# --- On a real device -------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["quickstart", "digits"])
def test_a_step_has_a_time_and_a_peak(preset):
    step = measured_step(load(preset, tiny.TINY[:3]), CPU, 2)
    assert step.seconds > 0
    assert step.peak > 5e7  # Python and PyTorch alone


@on_gpu
def test_a_larger_part_would_not_fit_and_that_which_was_found_does(monkeypatch):
    monkeypatch.setattr(steps, "_AUTO_SHARE", 2e9 / torch.cuda.mem_get_info()[1])
    words = ["model.hidden_size=512", "model.vocab_size=32768", "data.seq_len=512"]
    config = auto(*words, "data.batch_size=64")
    found = with_micro_batch_size(config, GPU)
    size = found.data.micro_batch_size
    assert isinstance(size, int)
    assert 1 < size < 64
    assert measured_step(found, GPU, size).peak <= 2e9
    assert measured_step(found, GPU, 2 * size).peak > 1.5e9  # the limit is on whole blocks
    assert with_micro_batch_size(config, GPU) == found
