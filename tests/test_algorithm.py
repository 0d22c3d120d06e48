"""The algorithm on one page is the federated path: both end with the same streams."""

import math
from runpy import run_path
from typing import Any

import pytest
from federation import OPTIMIZERS, Objective, Quadratic, Regression, assert_close, falling
from flower_path import Run
from import_graph import imported_names
from scripts import ROOT

from flower_desloc import take
from flower_desloc.algorithm import des_loc
from flower_desloc.core.schedule import Period

M, T = 3, 12


CASES: list[tuple[tuple[float, ...], Objective]] = [
    ((2, 4, 6), Regression()),
    ((4,), Quadratic()),
    ((3, 5, 7), Quadratic()),
    ((math.inf, 5, 3), Quadratic()),
    ((4, math.inf, math.inf), Regression()),
]


@pytest.mark.parametrize(
    ("name", "periods", "problem"),
    [
        *(("adopt", *case) for case in CASES),
        *((name, *CASES[i % len(CASES)]) for i, name in enumerate(OPTIMIZERS)),
    ],
)
def test_the_federated_path_ends_with_the_streams_of_the_one_page(name, periods, problem, tmp_path):
    case = OPTIMIZERS[name]
    models = [problem.module() for _ in range(M)]
    workers = [(model, case.make(model.parameters())) for model in models]
    by_stream: dict[str, Any] = case.periods(*periods)
    sent = des_loc(workers, problem.loss, by_stream, T, eta=lambda t: case.lr * falling(t))

    federated: list[Period] = ["never" if math.isinf(K) else K for K in periods]
    run = Run(
        name,
        federated,
        tmp_path,
        problem=problem,
        num_clients=M,
        num_steps=T,
        lr_schedule=falling,
    )
    assert_close(run.start(), [take(*worker, by_stream) for worker in workers])
    assert M * sent == sum(sum(record.traffic.up.values()) for record in run.watch.records)


def test_the_page_needs_pytorch_alone_and_runs(capsys):
    path = ROOT / "flower_desloc" / "algorithm.py"
    assert {name.partition(".")[0] for name in imported_names(path)} <= {
        *("collections", "math", "torch"),
    }
    run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out
    assert "DES-LOC" in lines
    assert len(lines.splitlines()) == 4
