"""Theorem 1, measured: SGDM with coins on quadratics and on logistic regression.

    python research/theorem.py   # into research/results/theorem.json: two minutes on one core

Both problems have known constants: L, sigma, and G and B of the paper's bounded heterogeneity,
mean_m |grad f_m(x)|^2 <= G^2 + B^2 |grad f(x)|^2. The step size is the theorem's, min(eta_0,
1 / sqrt(T)), and the coins are p_x and p_u after every step.

All settings and seeds of a problem run side by side in one array; the seeds of two settings have
the same batches and uniform numbers behind their coins. tests/research/test_theorem.py compares
these steps with a run of the strategy and its clients. Stability is not simulated: the maps of one
step with each outcome of the coins are read off the package's own steps and averages, and the
growth of second moments follows from them exactly.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from paired import (
    BLUE,
    GREEN,
    GREY,
    PINK,
    RED,
    RESEARCH,
    RESULTS,
    Draw,
    Estimate,
    Table,
    about,
    draw_lines,
    label,
)
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.datasets import load_digits
from torch import Tensor, nn

from flower_desloc import Mean, Worker, prime, put, take
from flower_desloc.app.runs.figures import style
from flower_desloc.optim import SGDM

FILE = RESULTS / "theorem.json"
BETA, L, SEEDS = 0.9, 1 / 4, 16
STEPS = tuple(4**n for n in range(4, 9))
EVALUATIONS = 64
Array = np.ndarray


def psi(p_x: float, p_u: float, beta: float) -> float:
    """Return Theorem 1's psi, for averages with probabilities ``p_x`` and ``p_u`` after a step.

    psi = 4 (1 - p_x) / p_x^2  (1 - beta) / (1 - (1 - p_u) beta)

    The paper's psi has one more factor, 1 - p_u, because its Algorithm 5 averages u before x takes
    its step. Here u is averaged after the step, so x takes the step along the worker's own u
    (research/paper.md, "Theorem 1"). It is infinite if parameters are never averaged.
    """
    if p_x == 0:
        return math.inf
    return 4 * (1 - p_x) / p_x**2 * (1 - beta) / (1 - (1 - p_u) * beta)


def step_size_bound(
    psi: float, beta: float, *, smoothness: float = 1.0, dissimilarity: float = 1.0
) -> float:
    """Return eta_0, the largest step size for which Theorem 1 is proved.

    eta_0 = 1 / (4 L) min(1 - beta, 1 / (6 sqrt(psi max(1, B^2 - 1))))

    ``smoothness`` is L of every worker's loss. ``dissimilarity`` is B of the workers' gradients: 1
    if all have the same data.
    """
    spread = 6 * math.sqrt(psi * max(1.0, dissimilarity**2 - 1))
    by_averages = 1 / spread if spread else math.inf
    return min(1 - beta, by_averages) / (4 * smoothness)


class Coins(NamedTuple):
    """The probabilities of an average of x and of u after a step."""

    p_x: float
    p_u: float

    @property
    def psi(self) -> float:
        return psi(self.p_x, self.p_u, BETA)


MINIBATCH = Coins(1, 0)
BASE = Coins(1 / 16, 1 / 48)
COINS = (
    MINIBATCH,
    *(Coins(1 / K, 0) for K in (4, 16, 64)),
    *(Coins(1 / 16, p_u) for p_u in (1 / 48, 1 / 16, 1 / 4, 1)),
)


# --------------------------------------------------------------------------------------- Problems


@dataclass(frozen=True)
class Quadratics:
    """f_m(x) = c_m / 2 (x - b_m)' H (x - b_m), and Gaussian noise on every gradient.

    Every fourth worker has negative curvature. Workers are repeated in blocks of four, so that f
    does not depend on their number.
    """

    num_workers: int = 4
    dim: int = 8
    variance: float = 16.0
    at_minimum: bool = False

    @property
    def c(self) -> Array:
        return np.resize([1.0, 1.0, 1.0, -0.5], self.num_workers)

    @property
    def b(self) -> Array:
        four = np.random.default_rng(5).normal(size=(4, self.dim))
        return np.resize(four, (self.num_workers, self.dim))

    @property
    def H(self) -> Array:  # noqa: N802
        return L * np.geomspace(1 / 4, 1, self.dim)

    @property
    def minimum(self) -> Array:
        return self.c @ self.b / self.c.sum()

    @property
    def start(self) -> Array:
        return self.minimum + (0 if self.at_minimum else 1)

    @property
    def gap(self) -> float:
        return float(self.c.mean() / 2 * (self.H * (self.start - self.minimum) ** 2).sum())

    @property
    def heterogeneity(self) -> tuple[float, float]:
        """G^2 and B^2.

        grad f_m = (c_m / c) grad f + c_m H (x* - b_m), and 2 <a, e> <= s |a|^2 + |e|^2 / s for the
        product of the two in the mean, with s the mean of c_m^2.
        """
        c, s = self.c, float((self.c**2).mean())
        own = c[:, None] * self.H * (self.minimum - self.b)
        together = float(((c @ own / len(c)) ** 2).sum())
        G2 = float((own**2).sum(1).mean()) + together / s
        return G2, 2 * s / float(c.mean()) ** 2

    def draw(self, rng: np.random.Generator, seeds: int) -> Array:
        scale = math.sqrt(self.variance / self.dim)
        return scale * rng.standard_normal((seeds, self.num_workers, self.dim))

    def gradient(self, x: Array, noise: Array) -> Array:
        return self.c[:, None] * self.H * (x - self.b) + noise

    def full_gradient(self, x: Array) -> Array:
        return self.c.mean() * self.H * (x - self.minimum)


class Logistic:
    """Whether a digit is 5 or more, on scikit-learn's digits; worker m has the digits m and m + 5.

    Eight principal components and a constant, scaled so that the largest curvature of a worker is
    L. A batch is one image. Workers are repeated in blocks of five.
    """

    decay = L / 32

    def __init__(self, num_workers: int = 5, *, at_minimum: bool = False) -> None:
        self.num_workers, self.at_minimum = num_workers, at_minimum
        images, digits = load_digits(return_X_y=True)
        images = images - images.mean(0)
        _, _, axes = np.linalg.svd(images, full_matrices=False)
        images = images @ axes[:8].T
        images = np.column_stack([images, np.full(len(images), images.std())])
        self.X = [images[digits % 5 == m] for m in range(5)]
        self.y = [(digits[digits % 5 == m] >= 5) * 1.0 for m in range(5)]
        curvature = max(np.linalg.norm(X, 2) ** 2 / len(X) / 4 for X in self.X)
        self.X = [X * math.sqrt((L - self.decay) / curvature) for X in self.X]
        weights = np.concatenate([np.full(len(X), 1 / len(X) / 5) for X in self.X])
        self.all = np.concatenate(self.X), np.concatenate(self.y), weights
        self.dim = images.shape[1]
        search = {"jac": self.full_gradient, "method": "BFGS", "options": {"gtol": 1e-9}}
        self.minimum = minimize(self.value, np.zeros(self.dim), **search).x

    @property
    def start(self) -> Array:
        return self.minimum if self.at_minimum else np.zeros(self.dim)

    @property
    def gap(self) -> float:
        return float(self.value(self.start) - self.value(self.minimum))

    @property
    def heterogeneity(self) -> tuple[float, float]:
        """G^2 and B^2: |X' r / n|^2 is at most the largest eigenvalue of X'X / n for |r_i| <= 1."""
        return float(np.mean([np.linalg.norm(X, 2) ** 2 / len(X) for X in self.X])), 1.0

    @property
    def variance(self) -> float:
        """Of one image's gradient, at most the mean of its squared norm; the residual is <= 1."""
        return float(max((X**2).sum(1).mean() for X in self.X))

    def draw(self, rng: np.random.Generator, seeds: int) -> tuple[Array, Array]:
        kinds = [m % 5 for m in range(self.num_workers)]
        chosen = [rng.integers(len(self.X[k]), size=seeds) for k in kinds]
        X = np.stack([self.X[k][rows] for k, rows in zip(kinds, chosen, strict=True)], 1)
        y = np.stack([self.y[k][rows] for k, rows in zip(kinds, chosen, strict=True)], 1)
        return X, y

    def gradient(self, x: Array, batch: tuple[Array, Array]) -> Array:
        X, y = batch
        return (expit((x * X).sum(-1)) - y)[..., None] * X + self.decay * x

    def value(self, x: Array) -> Array:
        X, y, weights = self.all
        z = X @ x
        return weights @ (np.logaddexp(0, z) - y * z) + self.decay / 2 * (x @ x)

    def full_gradient(self, x: Array) -> Array:
        X, y, weights = self.all
        return ((expit(x @ X.T) - y) * weights) @ X + self.decay * x


PROBLEMS: dict[str, Callable[..., Any]] = {"quadratics": Quadratics, "logistic": Logistic}


# ------------------------------------------------------------------------------------ The descent


def step(
    x: Array, u: Array, gradient: Array, eta: Array, average_x: Array, average_u: Array
) -> tuple[Array, Array]:
    """Take a step of SGDM, then average where the coins fell; workers are the last axis but one."""
    u = BETA * u + (1 - BETA) * gradient
    x = x - eta[..., None, None] * u
    mean_x, mean_u = x.mean(-2, keepdims=True), u.mean(-2, keepdims=True)
    return (
        np.where(average_x[..., None, None], mean_x, x),
        np.where(average_u[..., None, None], mean_u, u),
    )


class Means(NamedTuple):
    """Means over the steps of a run, an array (settings, seeds) each."""

    squared_gradient: Array
    """|grad f|^2 at the mean of the workers."""
    spread: Array
    """Mean over workers of |x_m - x|^2."""
    gradient_spread: Array
    """Mean over workers of |g_m - g|^2."""


def descend(
    problem: Any, coins: Iterable[Coins], etas: Iterable[float], num_steps: int, seeds: int
) -> Means:
    """Run every setting with every seed."""
    coins = list(coins)
    shape = (len(coins), seeds)
    p_x, p_u = (np.array(p)[:, None] for p in zip(*coins, strict=True))
    eta = np.broadcast_to(np.array(list(etas))[:, None], shape)
    rng = np.random.default_rng([num_steps, problem.num_workers])
    x = np.broadcast_to(problem.start, (*shape, problem.num_workers, problem.dim))
    u = np.zeros_like(x)
    sums = np.zeros((3, *shape))
    every = max(1, num_steps // EVALUATIONS)
    for t in range(num_steps):
        if t % every == every // 2:
            mean = x.mean(-2, keepdims=True)
            gradient = problem.full_gradient(mean[..., 0, :])
            sums[0] += (gradient**2).sum(-1)
            sums[1] += ((x - mean) ** 2).sum(-1).mean(-1)
        g = problem.gradient(x, problem.draw(rng, seeds))
        if t % every == every // 2:
            sums[2] += ((g - g.mean(-2, keepdims=True)) ** 2).sum(-1).mean(-1)
        falls = rng.random((2, seeds))
        x, u = step(x, u, g, eta, falls[0] < p_x, falls[1] < p_u)
    return Means(*(sums / (num_steps // every)))


def rates(problem: Any, coins: Coins, num_steps: int) -> dict[str, float]:
    """Return the theorem's step size, and 1 / sqrt(T)."""
    B = math.sqrt(problem.heterogeneity[1])
    eta_0 = step_size_bound(coins.psi, BETA, smoothness=L, dissimilarity=B)
    root = 1 / math.sqrt(num_steps)
    return {"theorem": min(eta_0, root), "1/sqrt(T)": root}


def bound(problem: Any, coins: Coins, num_steps: int, eta: float) -> float:
    """Return the theorem's bound for steps of size eta, with the constants of its proof."""
    noise = problem.variance / problem.num_workers
    return (
        4 * problem.gap / (eta * num_steps)
        + 2 * eta * L * noise
        + 4 * (eta * L * BETA / (1 - BETA)) ** 2 * noise
        + 8 * (eta * L) ** 2 * coins.psi * (problem.variance + 3 * problem.heterogeneity[0])
    )


# -------------------------------------------------------------------------------------- Stability


def step_maps(curvatures: Sequence[float], eta: float) -> dict[tuple[bool, bool], Array]:
    """Return the linear map of one step of all workers, for each outcome of the coins of x and u.

    Worker m's loss is c_m x^2 / 2, and the state is x of all workers, then u. The package's own
    optimizer, steps and averages are applied to every unit vector.
    """
    workers = len(curvatures)
    unit = torch.eye(2 * workers, dtype=torch.float64)
    maps = {}
    for outcome in product((False, True), (False, True)):
        streams = [s for s, due in zip(STREAMS, outcome, strict=True) if due]
        team, mean = [], Mean()
        for m, c in enumerate(curvatures):
            module = nn.ParameterDict({"x": nn.Parameter(unit[:, m].clone())})
            optimizer = SGDM(module.parameters(), lr=eta, momentum=BETA)
            prime(optimizer)
            put(module, optimizer, {"momentum_buffer": {"x": unit[:, workers + m]}})

            def loss(_: int, x: Tensor = module["x"], c: float = c) -> Tensor:
                return c / 2 * x.square().sum()

            Worker(module=module, optimizer=optimizer, loss_at=loss, num_examples=1).steps(0, 1)
            mean.add(take(module, optimizer, streams))
            team.append((module, optimizer))
        for worker in team:
            put(*worker, mean.result())
        states = [take(*worker, STREAMS) for worker in team]
        after = [state[stream]["x"] for stream in STREAMS for state in states]
        maps[outcome] = torch.stack(after).numpy()
    return maps


def second_moments(maps: dict[tuple[bool, bool], Array], coins: Coins) -> Array:
    """Return the linear map of E[s s'] in one step."""
    terms = (
        (coins.p_x if of_x else 1 - coins.p_x)
        * (coins.p_u if of_u else 1 - coins.p_u)
        * np.kron(A, A)
        for (of_x, of_u), A in maps.items()
    )
    return sum(terms, start=np.zeros(1))


def largest_stable_rate(curvatures: Sequence[float], coins: Coins) -> float:
    """Return the rate below which second moments shrink, for curvatures of at most 1."""

    def stable(eta: float) -> bool:
        grown = second_moments(step_maps(curvatures, eta), coins)
        return float(np.abs(np.linalg.eigvals(grown)).max()) < 1

    low = high = 1e-5
    while stable(high):
        low, high = high, high * 1.5
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


STREAMS = ("params", "momentum_buffer")
TEAMS = {
    "one of four curvatures negative": (1, 1, 1, -0.5),
    "four positive curvatures": (1, 0.75, 0.5, 0.25),
}
STABILITY = (
    *(Coins(1 / K, 0) for K in (4, 8, 16, 32, 64, 128, 256, 512)),
    *(Coins(1 / 64, p_u) for p_u in (1 / 256, 1 / 64, 1 / 16, 1 / 4)),
    *(Coins(1 / K, 1) for K in (4, 8, 16, 32, 64, 128, 256, 512)),
)


# ------------------------------------------------------------------------------------ The results


def measure() -> None:
    """Measure everything: two minutes on one core."""
    began = time.process_time()
    result: dict[str, Any] = about() | {"beta": BETA, "L": L, "seeds": SEEDS}
    for name, make in PROBLEMS.items():
        problem = make()
        G2, B2 = problem.heterogeneity
        result[name] = {"gap": problem.gap, "G2": G2, "B2": B2, "sigma2": problem.variance}
        result[name]["cells"] = []
        for num_steps in STEPS:
            settings = [(c, *r) for c in COINS for r in rates(problem, c, num_steps).items()]
            result[name]["cells"] += _cells(problem, settings, num_steps)
        result[name]["by_workers"] = []
        for blocks in (1, 2, 4, 8):
            many = make(num_workers=blocks * problem.num_workers, at_minimum=True)
            settings = [(c, "1/sqrt(T)", 1 / math.sqrt(STEPS[-2])) for c in (MINIBATCH, BASE)]
            result[name]["by_workers"] += _cells(many, settings, STEPS[-2])
    result["stability"] = {
        name: [
            {**coins._asdict(), "psi": coins.psi, "rate": largest_stable_rate(team, coins)}
            for coins in STABILITY
        ]
        for name, team in TEAMS.items()
    }
    result["cpu_seconds"] = round(time.process_time() - began)
    text = json.dumps(result, indent=1)  # with the innermost lists on one line
    line = re.compile(r"\[\s+([^][{}]+?)\s+\]")
    FILE.write_text(line.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")
    print(f"{FILE}: {result['cpu_seconds']} CPU seconds")


def _cells(
    problem: Any, settings: list[tuple[Coins, str, float]], num_steps: int
) -> list[dict[str, Any]]:
    all_coins, _, etas = zip(*settings, strict=True)
    means = descend(problem, all_coins, etas, num_steps, SEEDS)
    return [
        {
            "workers": problem.num_workers,
            **coins._asdict(),
            "psi": coins.psi,
            "steps": num_steps,
            "rate": name,
            "eta": eta,
            "bound": bound(problem, coins, num_steps, eta),
            **{
                key: [float(f"{value:.6g}") for value in values[at]]
                for key, values in means._asdict().items()
            },
        }
        for at, (coins, name, eta) in enumerate(settings)
    ]


# ----------------------------------------------------------------------------- Tables and picture

Cell = dict[str, Any]


def chosen(cells: list[Cell], **wanted: Any) -> list[Cell]:
    """Return the cells with these values, and the seeds' results as arrays."""
    return [
        cell | {key: np.array(cell[key]) for key in Means._fields}
        for cell in cells
        if all(cell[key] == value for key, value in wanted.items())
    ]


def excess(cells: list[Cell], cell: Cell) -> Estimate:
    """Return by how much |grad f|^2 is above minibatch SGDM's, in per cent, paired by seed."""
    (plain,) = chosen(cells, p_x=1, **{key: cell[key] for key in ("steps", "rate", "workers")})
    return Estimate.of(100 * (cell["squared_gradient"] / plain["squared_gradient"] - 1))


def exponent(cells: list[Cell], cell: Cell) -> Estimate:
    """Return the slope of log |grad f|^2 over log T, from T / 4 to T."""
    same = {key: cell[key] for key in ("p_x", "p_u", "rate")}
    (before,) = chosen(cells, steps=cell["steps"] // 4, **same)
    ratio = cell["squared_gradient"] / before["squared_gradient"]
    return Estimate.of(np.log(ratio) / math.log(4))


def relative_spread(cell: Cell) -> float:
    """Return what psi bounds: the workers' spread over eta^2 and the spread of their gradients."""
    return float(cell["spread"].mean() / cell["gradient_spread"].mean() / cell["eta"] ** 2)


def text(one: Estimate, digits: int = 2) -> str:
    return f"{one.mean:.{digits}f} ± {one.reach:.{digits}f}".replace("-", "\u2212")


def period(p: float) -> str:
    return "never" if p == 0 else f"{1 / p:.0f}"


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def _by_coins() -> Table:
    rows = []
    for name, coins in product(PROBLEMS, COINS):
        cells = results()[name]["cells"]
        some = chosen(cells, **coins._asdict())
        (root,) = (c for c in some if (c["rate"], c["steps"]) == ("1/sqrt(T)", STEPS[-1]))
        below = [c["bound"] / c["squared_gradient"].mean() for c in some if c["rate"] == "theorem"]
        row = [name, period(coins.p_x), period(coins.p_u), f"{coins.psi:,.0f}"]
        row += [text(exponent(cells, root), 3), text(excess(cells, root)) if coins.p_x < 1 else "0"]
        spread = relative_spread(root)
        row += [f"{min(below):.0f} to {max(below):.0f}"]
        rows.append([*row, f"{spread:,.0f}" if spread >= 100 else f"{spread:.3g}"])
    heads = ["problem", "1/p_x", "1/p_u", "ψ", "power of T", "above minibatch, %"]
    return Table([*heads, "bound / measured", "spread"], rows)


def _by_steps() -> Table:
    rows = []
    for name, rate, coins in product(PROBLEMS, ("1/sqrt(T)", "theorem"), COINS):
        cells = results()[name]["cells"]
        for cell in chosen(cells, rate=rate, **coins._asdict()):
            mean = cell["squared_gradient"].mean()
            row = [name, rate, period(coins.p_x), period(coins.p_u), cell["steps"]]
            row += [f"{cell['eta']:.3g}", f"{mean:.3g}", f"{cell['bound'] / mean:.0f}"]
            above = "" if coins == MINIBATCH else text(excess(cells, cell), 1)
            rows.append([*row, above])
    heads = ["problem", "step size", "1/p_x", "1/p_u", "T", "η", "mean |∇f|²"]
    return Table([*heads, "bound / measured", "above minibatch, %"], rows)


def _by_workers() -> Table:
    rows = []
    for name in PROBLEMS:
        cells = results()[name]["by_workers"]
        for both in zip(chosen(cells, p_x=1), chosen(cells, p_x=1 / 16), strict=True):
            scaled = (1e4 * cell["workers"] * cell["squared_gradient"] for cell in both)
            means = (text(Estimate.of(values)) for values in scaled)
            rows.append([name, both[0]["workers"], *means, text(excess(cells, both[1]), 1)])
    heads = ["problem", "workers M", "M · 10⁴ · mean, minibatch", "1/p_x = 16, 1/p_u = 48"]
    return Table([*heads, "above, %"], rows)


def _by_stability() -> Table:
    rows = []
    for ours, convex in zip(*results()["stability"].values(), strict=True):
        row = [period(ours["p_x"]), period(ours["p_u"]), f"{ours['psi']:,.0f}"]
        row += [f"{ours['rate']:.3g}", f"{ours['rate'] * math.sqrt(ours['psi']):.2f}"]
        rows.append([*row, f"{convex['rate']:.3g}"])
    heads = ["1/p_x", "1/p_u", "ψ", "largest stable step, one curvature negative", "times √ψ"]
    return Table([*heads, "all positive"], rows)


TABLES: dict[str, Draw] = {
    "theorem": _by_coins,
    "theorem_steps": _by_steps,
    "theorem_workers": _by_workers,
    "theorem_stability": _by_stability,
}

COLOURS = ("#000000", GREEN, BLUE, RED, PINK, "#E69F00", "#56B4E9", "#882255")


def picture() -> None:
    made, panels = style.figure(2, 3, 7)
    for row, (name, colour) in enumerate(zip(PROBLEMS, (BLUE, RED), strict=True)):
        left, middle = panels[3 * row : 3 * row + 2]
        cells = results()[name]["cells"]
        lines = []
        for coins, dark in list(zip(COINS, COLOURS, strict=True))[:4]:
            some = chosen(cells, **coins._asdict())
            words = "minibatch SGDM" if coins.p_x == 1 else f"1/p_x = {period(coins.p_x)}, p_u = 0"
            for rate, form in (("1/sqrt(T)", "o-"), ("theorem", "s--")):
                of_rate = [cell for cell in some if cell["rate"] == rate]
                points = [(c["steps"], Estimate.of(c["squared_gradient"])) for c in of_rate]
                lines.append((words if form == "o-" else "", dark, form, points))
            left.plot(STEPS, [cell["bound"] for cell in of_rate], ":", color=dark, lw=1)
        how: dict[str, Any] = {"x": "steps T", "ticks": STEPS, "yscale": "log"}
        draw_lines(left, lines, f"{name}: mean |∇f|²", **how)
        left.set_ylim(left.get_ylim()[0] / 30)
        words = "solid: step 1/√T; dashed: the\ntheorem's; dotted: its bound"
        left.legend(frameon=False, fontsize=7, title_fontsize=7, loc="lower left", title=words)
        lines = []
        for coins, dark in zip(COINS[1:], COLOURS[1:], strict=True):
            line = chosen(cells, rate="1/sqrt(T)", **coins._asdict())
            points = [(cell["steps"], excess(cells, cell)) for cell in line]
            lines.append((f"{period(coins.p_x)}, {period(coins.p_u)}", dark, "o-", points))
        draw_lines(middle, lines, f"{name}: above minibatch, %", ylim=(0.02, 200), **how)
        small: dict[str, Any] = {
            "frameon": False,
            "fontsize": 7,
            "title_fontsize": 7,
            "loc": "lower left",
        }
        middle.legend(ncols=2, title="1/p_x, 1/p_u", **small)
        some = chosen(cells, steps=STEPS[-1], rate="1/sqrt(T)", p_x=1 / 16)
        some.sort(key=lambda cell: cell["p_u"])
        x = [max(cell["p_u"], 1 / 128) for cell in some]
        panels[2].plot(x, list(map(relative_spread, some)), "o-", ms=4, color=colour, label=name)
    _psi(panels[2])
    _stability(panels[5], results()["stability"])
    made.savefig(RESEARCH / "theorem.png", dpi=110)


def _psi(panel: Axes) -> None:
    p = np.geomspace(1 / 128, 1, 200)
    here = [psi(1 / 16, p_u, BETA) for p_u in p]
    panel.plot(p, here, color=GREY, label="psi of the order that is run")
    panel.plot(p[:-1], ((1 - p) * here)[:-1], ":", color=GREY, label="the paper's, 0 at p_u = 1")
    panel.set(yscale="log", ylim=(0.1, 3000))
    ticks = {1 / 128: "0", 1 / 64: "1/64", 1 / 16: "1/16", 1 / 4: "1/4", 1: "1"}
    label(panel, "spread / (η² spread of gradients)", "p_u; p_x = 1/16", ticks)


def _stability(panel: Axes, stability: dict[str, list[Cell]]) -> None:
    for (name, cells), mark in zip(stability.items(), ("o", "s"), strict=True):
        for p_u, colour in ((0, BLUE), (1, RED)):
            line = [(cell["psi"], cell["rate"]) for cell in cells if cell["p_u"] == p_u]
            words = f"{name}, p_u = {p_u}"
            panel.plot(*zip(*line, strict=True), f"{mark}-", ms=4, color=colour, label=words)
    span = np.geomspace(5, 1e6, 50)
    B = math.sqrt(curvature_dissimilarity(TEAMS["one of four curvatures negative"]))
    theirs = [step_size_bound(value, BETA, dissimilarity=B) for value in span]
    panel.plot(span, theirs, ":", color=GREY, label="eta_0 of the theorem")
    panel.set(xscale="log", yscale="log", ylim=(1e-9, 100))
    label(panel, "largest stable step, in units of 1/L", "psi")


def curvature_dissimilarity(curvatures: Sequence[float]) -> float:
    """Return B^2 of f_m = c_m x^2 / 2: the mean of c_m^2 over the square of their mean."""
    c = np.array(curvatures)
    return float((c**2).mean() / c.mean() ** 2)


if __name__ == "__main__":
    measure()
