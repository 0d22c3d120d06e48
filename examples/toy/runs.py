"""The runs of the figures: every method through the federation and through the transcription."""

import logging
import multiprocessing
import os
import tempfile
from functools import partial
from itertools import product
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from examples.toy.federation import federate
from examples.toy.problem import SPLITS, Reals, distance
from examples.toy.setting import K_X, METHODS, ToySetting
from examples.toy.transcription import noise, transcribe

PATH_EVERY = 8  # steps


class MethodRuns(NamedTuple):
    """The parameters over time of one method; all arrays end in (splits, seeds)."""

    federated: Reals
    """Averages of the parameters through the federation: (1 + rounds, 2, ...)."""
    averages: Reals
    """The same by transcription, over more rounds."""
    means: Reals
    """The workers' mean every ``PATH_EVERY`` steps, by transcription: (times, 2, ...)."""


def run_all(
    setting: ToySetting, size: dict[str, int], jobs: int, console: Console
) -> dict[str, MethodRuns]:
    """Return the runs of every method; a bar on ``console`` shows the progress.

    ``size`` has the number of ``workers`` and ``seeds``, and of the ``rounds`` of K_x local steps
    through the federation and ``transcribed``.
    """
    # The clients' state files are written often and needed only until the end: keep them in memory.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with (
        tempfile.TemporaryDirectory(prefix="desloc-toy-", dir=memory) as folder,
        processes(jobs) as pool,
    ):
        runs = pool.imap(partial(_run, setting, size, Path(folder)), METHODS)
        done = track(runs, "methods", len(METHODS), console=console)
        return dict(zip(METHODS, done, strict=True))


def _run(setting: ToySetting, size: dict[str, int], folder: Path, name: str) -> MethodRuns:
    method, seeds = METHODS[name], range(size["seeds"])
    federated = federate(
        setting,
        method,
        num_workers=size["workers"],
        num_steps=K_X * size["rounds"],
        seeds=seeds,
        state_dir=folder,
    )
    noises = noise(size["workers"], K_X * size["transcribed"], seeds)
    course = transcribe([setting], method, noises, every=PATH_EVERY)
    return MethodRuns(federated, course.averages[:, :, 0], course.means[:, :, 0])


def final_distances(runs: dict[str, MethodRuns]) -> list[dict[str, Any]]:
    """Return the final distances of every method on every split, as mean and std over seeds.

    - federated: after the last round through Flower
    - same_round: after the same round, by transcription
    - last: mean over the second half of the rounds, by transcription, as are the next two
    - offset: distance from the optimum to the centre of those averages
    - sway: standard deviation of those averages about their centre
    """
    rows = []
    for (j, split), name in product(enumerate(SPLITS), METHODS):
        # (2, rounds, seeds)
        federated, points = (way[:, :, j].swapaxes(0, 1) for way in runs[name][:2])
        late = points[:, points.shape[1] // 2 :]
        same_round = min(federated.shape[1], points.shape[1]) - 1
        by_seed = {
            "federated": distance(federated[:, -1]),
            "same_round": distance(points[:, same_round]),
            "last": distance(late).mean(axis=0),
            "offset": distance(late.mean(axis=1)),
            "sway": np.sqrt(late.var(axis=1).sum(axis=0)),
        }
        ends = {what: (float(x.mean()), float(x.std())) for what, x in by_seed.items()}
        rows.append({"split": split, "method": name, **ends})
    return rows


def processes(jobs: int) -> Pool:
    """Return a pool of processes of one thread each, to be used in a ``with`` statement."""
    return multiprocessing.get_context("spawn").Pool(jobs, initializer=_prepare)


def _prepare() -> None:
    torch.set_num_threads(1)
    np.seterr(over="ignore", invalid="ignore")  # the client reports a run that diverges
    logging.getLogger("flwr").setLevel(logging.WARNING)
