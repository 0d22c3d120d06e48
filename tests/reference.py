"""DES-LOC transcribed naively from the paper: the oracle of the tests.

It imports nothing of flower_desloc, takes one tensor at a time in the type it is given, and
prefers the paper's lines to speed. The letters are the paper's:

    x  parameters       g  gradient             m = 0 .. M-1  workers
    u  first moment     eta  learning rate      t = 0 .. T-1  steps
    v  second moment    rho  clipping radius    E  mean over workers

A worker's state is ``{stream: {tensor name: tensor}}``, streams under PyTorch's names.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]
State = dict[str, Tree]
Grad = Callable[[int, int, Tree], Tree]
"""(m, t, x) -> g: the gradient of worker m's batch of step t, taken at x.

A tensor that the batch does not depend on may be left out: it takes no step, and t counts it.
"""


def each(f: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply ``f`` to the tensors of one name, for every name."""
    return {key: f(*(tree[key] for tree in trees)) for key in trees[0]}


def E(trees: Sequence[Tree], weights: Sequence[float] | None = None) -> Tree:  # noqa: N802
    """The mean over workers, uniform unless weights are given."""
    w = list(weights or [1.0] * len(trees))
    return each(lambda *s: sum(w_m * s_m for w_m, s_m in zip(w, s, strict=True)) / sum(w), *trees)


# ---------------------------------------------------------------- Algorithm 1, averages after steps


@dataclass(frozen=True)
class Optimizer:
    """``update(t, eta, g, x, *states) -> (x, *states)``, for one tensor; all states start at 0."""

    states: tuple[str, ...]
    update: Callable[..., tuple[Tensor, ...]]
    seeds: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    """What a state of zeros is set to from g and x where a worker starts at t > 0."""
    decays: Mapping[str, float] = field(default_factory=dict)
    """beta of every state ``s <- beta s + e``, where e is what enters it."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """The greatest |u| / sqrt(v) of every state u that a step divides by sqrt(v)."""
    has: Callable[[str, Tensor], bool] = lambda stream, x: True
    """Which states a tensor x has; ``update`` takes and returns these."""


def run(
    optimizer: Optimizer,
    x0: Tree,
    grad: Grad,
    *,
    num_workers: int,
    num_steps: int,
    due: Mapping[int, Collection[str]],
    lr: Callable[[int], float],
    clip: Callable[[Tree], Tree] = lambda g: g,
    present: Callable[[int, int], bool] = lambda m, t: True,
    heard: Callable[[int, int], bool] = lambda m, t: True,
    restarts: Callable[[int, int], bool] = lambda m, t: False,
    weights: Sequence[float] | None = None,
    delay: int = 0,
    takes: Callable[[int, int], bool] | None = None,
    bound: bool = False,
    codes: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> list[State]:
    """Run DES-LOC and return the state of every worker.

    ``due[n]`` are the streams averaged when n steps are completed (``every`` makes the table
    from periods; coins give any other). ``lr(t)`` is eta_t. A worker that is not ``present(m, t)``
    takes no step t and is not in the averages that follow it; it still receives them. One that is
    present but not ``heard(m, t)`` takes the step and is not in the averages. One that
    ``restarts(m, t)`` has lost its state before step t: it starts from the last averages, and from
    zeros where there is none; the optimizer's ``seeds`` and ``ratios`` apply to it, as to one that
    takes its first step at t > 0.

    With a ``delay`` an average reaches a worker that goes on so many steps later, at the latest
    when streams are due again: the worker then takes over a state that started from the average in
    time, and that what entered the worker's own entered as well.

    With ``takes`` workers are of unequal speed: a worker that is present but does not take step t
    is in the averages all the same. After k steps of its own since the last average of a stream it
    has the weight k in the mean of params and 1 - beta^k in that of a state.

    With ``bound`` a worker that goes on from an average of u keeps to the optimizer's ``ratios``,
    with its own v.

    With ``codes`` a stream that is sent, to the server and back, arrives as its code has it; of
    params the difference from those that everybody has is sent. The sender adds what the code lost
    to what it sends next, except of v.
    """
    averages: State = {"params": x0}
    lost: dict[tuple[int, str], Tree] = {}

    def received(sender: int, stream: str, s: Tree) -> Tree:
        code = (codes or {}).get(stream)
        if code is None:
            return s
        zeros = each(torch.zeros_like, s)
        base = averages["params"] if stream == "params" else zeros
        meant = each(lambda s, b, e: s - b + e, s, base, lost.get((sender, stream), zeros))
        sent = each(code, meant)
        if stream != "exp_avg_sq":
            lost[sender, stream] = each(torch.sub, meant, sent)
        return each(torch.add, base, sent)

    streams = ("params", *optimizer.states)
    workers = [start(optimizer, x0) for _ in range(num_workers)]
    in_time: list[State] = [{} for _ in workers]
    merge_at = -1
    started: set[int] = set()
    taken = [dict.fromkeys(streams, 0) for _ in workers]
    for t in range(num_steps):
        if bound and due.get(t) and not delay:
            bounded([workers[m] for m in sorted(started)], optimizer.ratios)
        at_work = [m for m in range(num_workers) if present(m, t)]
        for m in at_work:
            if takes and not takes(m, t):
                continue
            taken[m] = {stream: k + 1 for stream, k in taken[m].items()}
            new = t > 0 and (m not in started or restarts(m, t))
            started.add(m)
            if restarts(m, t):
                workers[m] = start(optimizer, x0) | {n: dict(s) for n, s in averages.items()}
            s = workers[m]
            g = clip(grad(m, t, s["params"]))
            for stream, seed in optimizer.seeds.items():
                if t > 0 and not any(tensor.any() for tensor in s[stream].values()):
                    s[stream] = each(seed, {key: g[key] for key in s[stream]}, s["params"])
            if new:
                bounded([s], optimizer.ratios)
            for key in g:
                own = [stream for stream in streams if key in s[stream]]
                states = [s[stream][key] for stream in own]
                updated = optimizer.update(t, lr(t), g[key], *states)
                for stream, tensor in zip(own, updated, strict=True):
                    if stream in in_time[m]:
                        beta = optimizer.decays.get(stream, 1.0)
                        entered = tensor - beta * s[stream][key]
                        in_time[m][stream][key] = beta * in_time[m][stream][key] + entered
                    s[stream][key] = tensor
        if t + 1 == merge_at:
            for m in range(num_workers):
                workers[m] |= in_time[m]
                in_time[m] = {}
            if bound:
                bounded(workers, optimizer.ratios)
        senders = [m for m in at_work if heard(m, t)]
        for stream in due.get(t + 1, ()):
            if senders:
                w = list(weights or [1.0] * num_workers)
                if takes:
                    beta = optimizer.decays.get(stream, 1.0)
                    for m, k in ((m, taken[m][stream]) for m in senders):
                        w[m] *= k if stream == "params" else 1 - beta**k
                sent = [received(m, stream, workers[m][stream]) for m in senders]
                mean = received(-1, stream, E(sent, [w[m] for m in senders]))
                averages[stream] = mean
                for m in range(num_workers):
                    goes_on = m in at_work and t + 1 < num_steps and present(m, t + 1)
                    to = in_time[m] if delay and goes_on else workers[m]
                    to[stream] = dict(mean)
                    taken[m][stream] = 0
        if due.get(t + 1):
            merge_at = min([t + 1 + delay, *(n for n in due if n > t + 1 and due[n])])
    return workers


def bounded(workers: Sequence[State], ratios: Mapping[str, float]) -> None:
    """Move every u to at most its ratio times sqrt(v) from 0."""
    for s in workers:
        for stream, ratio in ratios.items():
            most = each(lambda v: ratio * v.sqrt(), s["exp_avg_sq"])  # noqa: B023
            s[stream] = each(lambda u, c: u.clamp(-c, c), s[stream], most)


def start(optimizer: Optimizer, x0: Tree) -> State:
    """The state before the first step."""
    return {
        "params": each(torch.clone, x0),
        **{
            stream: each(
                torch.zeros_like, {k: x for k, x in x0.items() if optimizer.has(stream, x)}
            )
            for stream in optimizer.states
        },
    }


def every(periods: Mapping[str, int | None], num_steps: int) -> dict[int, set[str]]:
    """The table of averages for these periods (None: never); the end is one of params."""
    due: dict[int, set[str]] = {num_steps: {"params"}}
    for stream, period in periods.items():
        for n in range(period or num_steps + 1, num_steps + 1, period or 1):
            due.setdefault(n, set()).add(stream)
    return due


def clip_norm(rho: float) -> Callable[[Tree], Tree]:
    """Scale the whole gradient to at most the norm rho, as ``clip_grad_norm_`` documents it."""

    def clip(g: Tree) -> Tree:
        squares: Any = sum((tensor**2).sum() for tensor in g.values())
        norm = torch.sqrt(squares)
        return each(lambda tensor: tensor * torch.clamp(rho / (norm + 1e-6), max=1.0), g)

    return clip


def clip_coordinates(rho: float) -> Callable[[Tree], Tree]:
    """The listings' clip(g, rho)."""
    return lambda g: each(lambda tensor: tensor.clamp(-rho, rho), g)


# ----------------------------------------------------------------------- The optimizers, one tensor


def adam(beta1, beta2, eps, *, decay=0.0, decoupled=False) -> Optimizer:
    """Adam with bias correction; with ``decoupled`` decay AdamW (PyTorch's documented steps)."""

    def update(t, eta, g, x, u, v):
        x, g = _decayed(eta, g, x, decay, decoupled)
        u = beta1 * u + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u_hat = u / (1 - beta1 ** (t + 1))
        v_hat = v / (1 - beta2 ** (t + 1))
        return x - eta * u_hat / (torch.sqrt(v_hat) + eps), u, v

    return _adam(update, beta1, beta2, lambda g, x: _decayed(0.0, g, x, decay, decoupled)[1] ** 2)


def amsgrad(beta1: float, beta2: float, eps: float) -> Optimizer:
    """AMSGrad as PyTorch has it: the maximum is taken of the uncorrected v."""

    def update(t, eta, g, x, u, v, v_max):
        u = beta1 * u + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        v_max = torch.maximum(v_max, v)
        u_hat = u / (1 - beta1 ** (t + 1))
        v_hat = v_max / (1 - beta2 ** (t + 1))
        return x - eta * u_hat / (torch.sqrt(v_hat) + eps), u, v, v_max

    made = _adam(update, beta1, beta2)
    return replace(made, states=(*made.states, "max_exp_avg_sq"), decays={})


def paper_adam(beta1: float, beta2: float, lam: float) -> Optimizer:
    """Adam as Algorithm 3 prints it: no bias correction, lambda inside the root."""

    def update(t, eta, g, x, u, v):
        u = beta1 * u + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        return x - eta / torch.sqrt(v + lam**2) * u, u, v

    return _adam(update, beta1, beta2)


def fourth_root(t: int) -> float:
    return t**0.25


def adopt(beta1, beta2, eps, *, clip=fourth_root, decay=0.0, decoupled=False) -> Optimizer:
    """ADOPT as its authors' code has it: the first step only seeds v, then n is clipped."""

    def update(t, eta, g, x, u, v):
        decayed, g = _decayed(eta, g, x, decay, decoupled)
        if t == 0:
            return x, u, v + g**2
        n = g / torch.clamp(torch.sqrt(v), min=eps)
        if clip is not None:
            n = torch.clamp(n, -clip(t), clip(t))
        u = beta1 * u + (1 - beta1) * n
        return decayed - eta * u, u, beta2 * v + (1 - beta2) * g**2

    seeds = {"exp_avg_sq": lambda g, x: _decayed(0.0, g, x, decay, decoupled)[1] ** 2}
    return Optimizer(("exp_avg", "exp_avg_sq"), update, seeds, _moments(beta1, beta2))


def paper_adopt(beta1: float, beta2: float, eps: float) -> Optimizer:
    """ADOPT as Algorithm 4 prints it: v starts at zero and n = g / max(sqrt(v_old), eps)."""

    def update(t, eta, g, x, u, v):
        u = beta1 * u + (1 - beta1) * g / torch.clamp(torch.sqrt(v), min=eps)
        return x - eta * u, u, beta2 * v + (1 - beta2) * g * g

    return Optimizer(("exp_avg", "exp_avg_sq"), update)


def sgdm(beta: float, *, decay: float = 0.0) -> Optimizer:
    """SGD with momentum as Algorithm 5 prints it."""

    def update(t, eta, g, x, u):
        g = g + decay * x
        u = beta * u + (1 - beta) * g
        return x - eta * u, u

    return Optimizer(("momentum_buffer",), update, decays={"momentum_buffer": beta})


def muon(beta: float, decay: float, adamw: Optimizer) -> Optimizer:
    """Muon (Jordan et al.) for matrices, at the scale of Liu et al., and ``adamw`` for the rest."""

    def update(t, eta, g, x, *states):
        if x.ndim != 2:
            return adamw.update(t, eta, g, x, *states)
        u = beta * states[0] + (1 - beta) * g
        step = orthogonal((1 - beta) * g + beta * u).to(x)
        return x - eta * decay * x - 0.2 * eta * math.sqrt(max(x.shape)) * step, u

    return Optimizer(
        ("momentum_buffer", *adamw.states),
        update,
        adamw.seeds,
        {"momentum_buffer": beta, **adamw.decays},
        adamw.ratios,
        has=lambda stream, x: (stream == "momentum_buffer") == (x.ndim == 2),
    )


def orthogonal(g: Tensor) -> Tensor:
    """Five Newton-Schulz iterations X <- a X + (b A + c A A) X with A = X X^T, in bfloat16."""
    X = g.bfloat16()
    X = X.T if len(g) > len(g.T) else X
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.T
        B = torch.addmm(A, A, A, beta=-4.7750, alpha=2.0315)
        X = torch.addmm(X, B, X, beta=3.4445)
    return X.T if len(g) > len(g.T) else X


def _adam(update, beta1: float, beta2: float, seed=lambda g, x: g**2) -> Optimizer:
    """Return an Adam, whose step divides u by sqrt(v)."""
    seeds, ratios = {"exp_avg_sq": seed}, {"exp_avg": _ratio(beta1, beta2)}
    return Optimizer(("exp_avg", "exp_avg_sq"), update, seeds, _moments(beta1, beta2), ratios)


def _ratio(beta1: float, beta2: float) -> float:
    """By Cauchy and Schwarz, of means of g and of g^2 with these decays; beta1^2 < beta2."""
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def _moments(beta1: float, beta2: float) -> dict[str, float]:
    return {"exp_avg": beta1, "exp_avg_sq": beta2}


def _decayed(eta: float, g: Tensor, x: Tensor, decay: float, decoupled: bool):
    return (x - eta * decay * x, g) if decoupled else (x, g + decay * x)


# ------------------------------------------------------------------- The listings, line by line
#
# They average inside the step, at t mod K = 0 with t from 0, and take the arguments of ``run``.
# ``gradient_at_mean`` is not in the paper: it takes the gradient of a step that averages x at E[x]
# instead of at the worker's own x, which is what joins the listings to ``run``.


def listing_adam(
    x0, grad, *, num_workers, num_steps, periods, lr, beta1, beta2, lam, gradient_at_mean=False
) -> list[State]:
    """Algorithm 3, DES-LOC-Adam."""
    M = range(num_workers)
    x, u, v = _seeds(x0, num_workers)
    for t in range(num_steps):
        E_u = _averaged(t, periods["exp_avg"], u)
        E_v = _averaged(t, periods["exp_avg_sq"], v)
        E_x = _averaged(t, periods["params"], x)
        g = [grad(m, t, E_x[m] if gradient_at_mean else x[m]) for m in M]
        u = [each(lambda u, g: beta1 * u + (1 - beta1) * g, E_u[m], g[m]) for m in M]
        v = [each(lambda v, g: beta2 * v + (1 - beta2) * g * g, E_v[m], g[m]) for m in M]
        d = [each(lambda u, v: lr(t) / torch.sqrt(v + lam**2) * u, u[m], v[m]) for m in M]  # noqa: B023
        x = [each(torch.sub, E_x[m], d[m]) for m in M]
    return _states(x, u, v)


def listing_adopt(
    x0, grad, *, num_workers, num_steps, periods, lr, beta1, beta2, eps, gradient_at_mean=False
) -> list[State]:
    """Algorithm 4, DES-LOC-ADOPT; the denominator is the worker's own v, averaged or not."""
    M = range(num_workers)
    x, u, v = _seeds(x0, num_workers)
    for t in range(num_steps):
        E_u = _averaged(t, periods["exp_avg"], u)
        E_v = _averaged(t, periods["exp_avg_sq"], v)
        E_x = _averaged(t, periods["params"], x)
        g = [grad(m, t, E_x[m] if gradient_at_mean else x[m]) for m in M]
        n = [each(lambda g, v: g / torch.clamp(torch.sqrt(v), min=eps), g[m], v[m]) for m in M]
        v = [each(lambda v, g: beta2 * v + (1 - beta2) * g * g, E_v[m], g[m]) for m in M]
        u = [each(lambda u, n: beta1 * u + (1 - beta1) * n, E_u[m], n[m]) for m in M]
        x = [each(lambda x, u: x - lr(t) * u, E_x[m], u[m]) for m in M]  # noqa: B023
    return _states(x, u, v)


def listing_sgdm(x0, grad, *, num_workers, num_steps, coins, lr, beta) -> list[State]:
    """Algorithm 5, DES-LOC-SGDM; ``coins[n]`` are the streams whose coin fell in the n-th step.

    Counted from 1, so that a table of averages for ``run`` is a table of coins.
    """
    M = range(num_workers)
    x, u = _seeds(x0, num_workers)[:2]
    for t in range(num_steps):
        fell = coins.get(t + 1, ())
        g = [grad(m, t, x[m]) for m in M]
        u = [each(lambda u, g: beta * u + (1 - beta) * g, u[m], g[m]) for m in M]
        if "momentum_buffer" in fell:
            u = [E(u)] * num_workers
        x = [each(lambda x, u: x - lr(t) * u, x[m], u[m]) for m in M]  # noqa: B023
        if "params" in fell:
            x = [E(x)] * num_workers
    return [{"params": x[m], "momentum_buffer": u[m]} for m in M]


def listing_amsgrad(
    x0, grad, *, num_workers, num_steps, coins, lr, beta1, beta2, lam
) -> list[State]:
    """Algorithm 6, DES-LOC-Adam with coins: AMSGrad, the maximum taken after v is averaged.

    ``coins`` as in ``listing_sgdm``. The maximum v~ is never averaged.
    """
    M = range(num_workers)
    x, u, v = _seeds(x0, num_workers)
    v_max = v
    for t in range(num_steps):
        fell = coins.get(t + 1, ())
        g = [grad(m, t, x[m]) for m in M]
        u = [each(lambda u, g: beta1 * u + (1 - beta1) * g, u[m], g[m]) for m in M]
        if "exp_avg" in fell:
            u = [E(u)] * num_workers
        v = [each(lambda v, g: beta2 * v + (1 - beta2) * g * g, v[m], g[m]) for m in M]
        if "exp_avg_sq" in fell:
            v = [E(v)] * num_workers
        v_max = [each(torch.maximum, v[m], v_max[m]) for m in M]
        d = [each(lambda u, w: lr(t) / torch.sqrt(w + lam**2) * u, u[m], v_max[m]) for m in M]  # noqa: B023
        x = [each(torch.sub, x[m], d[m]) for m in M]
        if "params" in fell:
            x = [E(x)] * num_workers
    states = _states(x, u, v)
    return [state | {"max_exp_avg_sq": v_max[m]} for m, state in enumerate(states)]


def _seeds(x0: Tree, num_workers: int) -> tuple[list[Tree], list[Tree], list[Tree]]:
    zeros = each(torch.zeros_like, x0)
    return [x0] * num_workers, [zeros] * num_workers, [zeros] * num_workers


def _averaged(t: int, period: int | None, s: list[Tree]) -> list[Tree]:
    return s if period is None or t % period else [E(s)] * len(s)


def _states(x: list[Tree], u: list[Tree], v: list[Tree]) -> list[State]:
    return [
        {"params": x_m, "exp_avg": u_m, "exp_avg_sq": v_m}
        for x_m, u_m, v_m in zip(x, u, v, strict=True)
    ]
