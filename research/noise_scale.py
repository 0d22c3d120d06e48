"""The gradient noise scale of a configuration, at a few points of a run or for trained weights.

    python research/noise_scale.py CONFIG [KEY=VALUE ...] --steps 0,64,512 [--json FILE]
    python research/noise_scale.py CONFIG [KEY=VALUE ...] --weights runs/NAME/final

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018): B = tr(S) / |G|^2, the batch
at which the noise of a gradient is as large as the gradient, in tokens. There is one estimate for
each client on its own data, and one for all clients together, with equal parts of a batch from
each.

Both terms are unbiased estimates from two batch sizes: --number batches of data.batch_size, and all
of them as one batch. The interval is a 95 % jackknife interval of |G|^2 / tr(S), inverted; its
upper end is infinite if |G|^2 can be 0. The points of a run are those of Local: every client
takes sync.params steps, then parameters and optimizer states are averaged.
"""

import copy
import math
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from paired import Overrides, about
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.app.config import Config, load
from flower_desloc.app.setup.build import build_clipping, build_lr_schedule, build_optimizer
from flower_desloc.app.tasks import ClientData, Site, Task, build_task
from flower_desloc.core.worker import Worker


@dataclass(frozen=True)
class NoiseScale:
    """``value`` = ``trace`` / ``squared_gradient``, with a 95 % interval."""

    value: float
    low: float
    high: float
    trace: float
    squared_gradient: float


def noise_scale(gradients: Tensor, batch: float) -> NoiseScale:
    """Return the noise scale, in units of ``batch``, from gradients of equal batches, one a row."""
    inner = (gradients @ gradients.T).double()
    n, own, total = len(inner), inner.diagonal(), inner.sum()

    def terms(n: int, squares: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        signal = (total - squares) / (n * (n - 1))  # mean product of two different batches
        return signal, squares / n - signal  # the rest is the variance of one batch

    signal, variance = terms(n, own.sum(), total)
    one_less = terms(n - 1, own.sum() - own, total - 2 * inner.sum(1) + own)
    ratio = float(signal / variance)
    error = math.sqrt((n - 1) * float((one_less[0] / one_less[1]).var(correction=0)))
    reach = float(stats.t.ppf(0.975, n - 1)) * error
    low, value, high = (
        batch / r if r > 0 else math.inf for r in (ratio + reach, ratio, ratio - reach)
    )
    return NoiseScale(value, low, high, float(variance) * batch, float(signal))


def measure(
    task: Task, model: nn.Module, shards: list[ClientData], number: int, tokens: int
) -> dict[str, Any]:
    """Return the noise scale of each client and of all together, in tokens."""
    params = [p for p in model.train().parameters() if p.requires_grad]
    found, mean = {}, torch.zeros(())
    for index, shard in enumerate(shards):
        rows = []
        for i in range(number):  # batches of steps that no run reaches
            loss = task.loss(model, shard.train_batch(10**8 + i))
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]))
        found[f"client {index}"] = asdict(noise_scale(torch.stack(rows), tokens))
        mean = mean + torch.stack(rows) / len(shards)
    return found | {"all clients": asdict(noise_scale(mean, tokens * len(shards)))}


def client_window(
    task: Task, start: tuple[nn.Module, Optimizer], config: Config, shard: ClientData, at: range
) -> tuple[nn.Module, Optimizer]:
    """Return model and optimizer of one client after the steps ``at``."""
    model = copy.deepcopy(start[0])
    optimizer = build_optimizer(config, model.parameters())  # a copy lacks an optimizer's own parts
    optimizer.load_state_dict(copy.deepcopy(start[1].state_dict()))
    worker = Worker(
        module=model,
        optimizer=optimizer,
        loss_at=lambda step: task.loss(model, shard.train_batch(step)),
        num_examples=1,
        lr_schedule=build_lr_schedule(config),
        clipping=build_clipping(config),
    )
    worker.steps(at.start, at.stop)
    return model, optimizer


def average(clients: list[tuple[nn.Module, Optimizer]]) -> tuple[nn.Module, Optimizer]:
    """Return the first client, with the mean of all clients' parameters and optimizer states."""
    tensors = []
    for model, optimizer in clients:
        states = [t for state in optimizer.state.values() for t in state.values()]
        moments = [t for t in states if isinstance(t, Tensor) and t.ndim]  # the rest are steps
        tensors.append([*model.parameters(), *moments])
    with torch.no_grad():
        for same in zip(*tensors, strict=True):
            same[0].copy_(torch.stack(same).mean(0))
    return clients[0]


def main(
    config: str,
    overrides: Overrides = None,
    steps: Annotated[str, typer.Option(help="measure after these numbers of steps")] = "0",
    weights: Annotated[Path | None, typer.Option(help="folder with model.safetensors")] = None,
    number: Annotated[int, typer.Option(help="batches per client")] = 64,
    json: Path | None = None,
) -> None:
    """The gradient noise scale of a configuration, at a few points of a run or for weights."""
    torch.set_num_threads(1)
    overrides = overrides or []
    loaded = load(config, overrides)
    task = build_task(loaded)
    model = task.build_model()
    if weights:  # a tied output embedding is not in the file
        model.load_state_dict(load_file(weights / "model.safetensors"), strict=False)
    state = (model, build_optimizer(loaded, model.parameters()))
    clients = loaded.simulation.num_clients
    shards = [task.client_data(Site(index, clients)) for index in range(clients)]
    tokens = loaded.data.batch_size * loaded.data.seq_len
    points: dict[str, Any] = {}
    step = 0
    for point in sorted(map(int, steps.split(","))):
        while step < point:
            at = range(step, min(step + loaded.sync["params"], point))
            state = average([client_window(task, state, loaded, shard, at) for shard in shards])
            step = at.stop
        name = str(weights or point)
        points[name] = measure(task, state[0], shards, number, tokens)
        for who, scale in points[name].items():
            interval = f"{scale['low']:.0f} to {scale['high']:.0f}"
            print(f"{name:>6} {who:12} {scale['value']:10.0f} tokens ({interval})", flush=True)
    if json:
        own = [text for text in overrides if not text.startswith("data.source=")]
        result = about() | {"config": config, "overrides": own, "batches_a_client": number}
        text = dumps(result | {"tokens_a_batch": tokens, "points": points}, indent=2)
        json.write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
