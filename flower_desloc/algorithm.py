"""DES-LOC on one page: Algorithm 1 of the paper, for M workers in one process.

Every worker trains on data of its own, with an optimizer of its own. What they exchange are
*streams*: ``params``, and each state of the optimizer under PyTorch's name (``exp_avg``,
``exp_avg_sq``). Each stream has a period K of its own: after step t, every stream whose period
divides t is replaced on all workers by its mean over the workers. Parameters are averaged often,
moments rarely; that is all.

    python -m flower_desloc.algorithm

compares periods on a small problem. The rest of this package does the same on many machines, with
Flower; the tests compare both.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

PARAMS = "params"
Worker = tuple[nn.Module, Optimizer]


def des_loc(
    workers: Sequence[Worker],
    loss: Callable[[nn.Module, int, int], Tensor],
    periods: Mapping[str, float],
    T: int,
    eta: Callable[[int], float] | None = None,
    rho: float = math.inf,
) -> int:
    """Train every worker for T steps; return how many bytes each of them has sent.

    Args:
        workers: A model x^m and its optimizer, which has the states s^j, for each worker m. All
            begin with the weights of the first.
        loss: F(x; xi): called with a model, m and t, which name the batch xi_t^m.
        periods: K by stream: of ``params`` (K_x) and of every state; ``math.inf`` is never.
        T: Number of local steps.
        eta: The learning rate by t; by default the optimizers' own.
        rho: Clipping radius: the greatest norm of a gradient.

    """
    sent = 0
    for model, _ in workers:  # x_0^m <- x_0
        model.load_state_dict(workers[0][0].state_dict())
    for t in range(T):
        for m, (model, optimizer) in enumerate(workers):  # in parallel
            optimizer.zero_grad()
            loss(model, m, t).backward()  # g_t^m
            nn.utils.clip_grad_norm_(model.parameters(), rho)
            for group in optimizer.param_groups:
                group["lr"] = eta(t) if eta else group["lr"]
            optimizer.step()  # s_t^j <- UPD^j(s_{t-1}^j, g_t), x_{t+1} <- OPT(x_t, g_t, eta_t, s_t)
        for name, K in periods.items():
            # The paper's listing averages before the update, with a gradient of the local x; here
            # the gradient is that of the average. The last step averages the result.
            if (t + 1) % K == 0 or (name == PARAMS and t + 1 == T):
                sent += average([stream(worker, name) for worker in workers])
    return sent


def stream(worker: Worker, name: str) -> list[Tensor]:
    """Return the parameters of a worker, or one of its optimizer's states, without copying."""
    model, optimizer = worker
    if name == PARAMS:
        return [p.data for p in model.parameters()]
    return [optimizer.state[p][name] for p in model.parameters() if name in optimizer.state[p]]


def average(streams: Sequence[Sequence[Tensor]]) -> int:
    """Replace the workers' tensors by their mean, E_m; return the bytes that one worker sends."""
    for tensors in zip(*streams, strict=True):
        mean = torch.stack(tensors).mean(dim=0)
        for tensor in tensors:
            tensor.copy_(mean)
    return sum(tensor.nbytes for tensor in streams[0])


# ------------------------------------------------------------------------------------ An example

M, T = 4, 192
METHODS: dict[str, tuple[float, float, float]] = {  # K_x, K_u, K_v
    "all after every step": (1, 1, 1),
    "Local Adam": (16, 16, 16),
    "DES-LOC": (16, 48, 96),
    "moments never": (16, math.inf, math.inf),
}


def mean_squares(model: nn.Module, m: int, t: int) -> Tensor:
    """Return a regression's loss; each worker has inputs from a region of its own (non-IID)."""
    draw = torch.Generator().manual_seed(1000 * m + t)
    x = torch.randn(32, 2, generator=draw) + torch.tensor([math.cos(m), math.sin(m)])
    return nn.functional.mse_loss(model(x), torch.sin(2 * x[:, :1]) * x[:, 1:])


def main() -> None:
    """Print by method the loss of the averaged model on new batches of all workers, and bytes."""
    for method, (K_x, K_u, K_v) in METHODS.items():
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)) for _ in range(M)]
        workers = [(model, Adam(model.parameters(), 0.02, (0.9, 0.99))) for model in models]
        periods = {PARAMS: K_x, "exp_avg": K_u, "exp_avg_sq": K_v}
        sent = des_loc(workers, mean_squares, periods, T, rho=1.0)
        losses = [mean_squares(models[0], m, T + t).item() for m in range(M) for t in range(16)]
        mean = sum(losses) / len(losses)
        print(f"{method:20}  loss {mean:.3f}  {sent:7,} bytes sent by each worker")


if __name__ == "__main__":
    main()
